"""The schemes on megatron-core's 1F1B schedule, through the arguments it has for that.

``forward_backward_pipelining_without_interleaving`` takes a communicator (``p2p_communicator=``)
and process groups (``pg_collection=``), and calls ``config.finalize_model_grads_func`` when all
micro-batches are through. :class:`CompressedCommunicator` is the first, :class:`FinalizeGradients`
the last::

    communicator = CompressedCommunicator(groups.pp, config, settings, device)
    config.finalize_model_grads_func = FinalizeGradients(reduction)
    forward_backward_pipelining_without_interleaving(
        ..., p2p_communicator=communicator, pg_collection=groups
    )
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor, distributed as dist

from optimus_cc.backpropagation import BackwardCompressor
from optimus_cc.gradients import GradientReduction
from optimus_cc.settings import NO_INTERLEAVING, Settings, SettingsError
from optimus_cc.traffic import COMPRESSION, Kind, Traffic


class CompressedCommunicator(P2PCommunicator):
    """Messages between pipeline stages, activation gradients as the settings say.

    All of the schedule's communication goes through one method. The schedule sends and receives
    gradients alone in the epilogue, and together with activations before.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: Any,
        settings: Settings,
        device: torch.device,
        *,
        traffic: Traffic | None = None,
    ) -> None:
        """Check that the schedule is one that messages can be compressed under.

        Args:
            pp_group: the stages of this rank's pipeline.
            config: the model's.
            settings: whether and how messages are compressed; the same on all ranks.
            device: of this rank.
            traffic: where sent messages are counted and timed.

        Raises:
            SettingsError: the schedule is an interleaved one, the pipeline is one stage, or the
                shapes or the type of messages are not known beforehand.
        """
        chunks = config.virtual_pipeline_model_parallel_size
        if chunks is not None:
            raise SettingsError(
                f"virtual_pipeline_model_parallel_size = {chunks}: the schedule is interleaved; "
                f"{NO_INTERLEAVING}"
            )
        if config.variable_seq_lengths:
            raise SettingsError(
                "variable_seq_lengths = True: the receiver must know a message's shape; pad the "
                "sequences to one length"
            )
        if config.pipeline_dtype is None:
            raise SettingsError("pipeline_dtype = None: set it to the type of the activations")
        settings.check_stages(pp_group.size())
        super().__init__(pp_group, config)
        self.device = device
        self.traffic = traffic or Traffic()
        self.compressor = BackwardCompressor(settings, self.traffic)

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, None]:
        """Exchange messages with the neighbours and wait for them.

        Receives are posted before sends: gloo would otherwise end a send before it begins to
        receive, and use the link in one direction at a time.
        """
        gradient, from_prev, from_next = None, None, None
        if tensor_send_prev is not None:
            with self.traffic.timed(COMPRESSION):
                gradient = self.compressor.compress(tensor_send_prev, in_epilogue=not recv_prev)
        if tensor_send_next is not None:
            self.traffic.message(Kind.FORWARD, tensor_send_next)
        if recv_prev:
            from_prev = self._buffer(tensor_shape)
        receives_in_epilogue = tensor_send_next is None
        if recv_next:
            from_next = self._buffer(
                self.compressor.received_shape(
                    tensor_shape, receives_in_epilogue, self.config.pipeline_dtype
                )
            )
        planned = [
            (Kind.FORWARD, dist.irecv, from_prev, self.prev_rank),
            (Kind.BACKWARD, dist.irecv, from_next, self.next_rank),
            (Kind.BACKWARD, dist.isend, gradient, self.prev_rank),
            (Kind.FORWARD, dist.isend, tensor_send_next, self.next_rank),
        ]
        self._exchange(
            [
                (kind, dist.P2POp(operation, tensor.detach(), peer, self.pp_group))
                for kind, operation, tensor, peer in planned
                if tensor is not None
            ]
        )
        if from_prev is not None and self.compressor.statistics is not None:
            self.compressor.statistics.arrived(0, from_prev)
        if from_next is not None:
            with self.traffic.timed(COMPRESSION):
                from_next = self.compressor.restore(from_next, tensor_shape, receives_in_epilogue)
        return from_prev, from_next, None

    def _exchange(self, operations: list[tuple[Kind, dist.P2POp]]) -> None:
        """Post operations, then wait for each in their order, timed as its own kind.

        What is waited for first is what is received, the neighbour's computing included; a message
        sent counts for as long as it is under way after that. NCCL would block operations that are
        not posted together, and ends those that are as one: there all of an exchange counts as the
        kind that is received, or sent where nothing is.
        """
        together = self.device.type == "cuda" and operations
        batches = [operations] if together else [[one] for one in operations]
        posted = []
        for batch in batches:
            kind = batch[0][0]
            with self.traffic.timed(kind):
                works = dist.batch_isend_irecv([operation for _, operation in batch])
            posted.append((kind, works))
        for kind, works in posted:
            with self.traffic.timed(kind):
                for work in works:
                    # No deadline: torch ends it at the process group's own.
                    work.wait()

    def _buffer(self, shape: Any) -> Tensor:
        dtype = self.config.pipeline_dtype
        return torch.empty(tuple(shape), dtype=dtype, device=self.device, requires_grad=True)


class FinalizeGradients:
    """Reduces gradients when megatron-core's schedule has all micro-batches through.

    It takes the place of ``finalize_model_grads``, and works on plain modules and on modules in
    megatron-core's ``DistributedDataParallel`` whose reduction is not overlapped.
    """

    def __init__(self, reduction: GradientReduction) -> None:
        """Keep the reduction of this rank's gradients."""
        self.reduction = reduction

    def __call__(
        self,
        model: list[Any],
        num_tokens: Tensor | None = None,
        *_others: object,
        **_options: object,
    ) -> None:
        """Reduce all gradients of this rank.

        Args:
            model: one chunk, the stage's module.
            num_tokens: must be None.

        Raises:
            SettingsError: the model asks for reductions that are not made here.
        """
        if num_tokens is not None:
            raise SettingsError(
                "calculate_per_token_loss = True: losses are averaged over micro-batches here; "
                "leave it out"
            )
        if model[0].config.sequence_parallel:
            raise SettingsError(
                "sequence_parallel = True: gradients of norms are not added over tensor-parallel "
                "ranks here; leave it out"
            )
        self.reduction.reduce()
