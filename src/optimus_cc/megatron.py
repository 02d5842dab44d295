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

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, is_single_shape
from torch import Tensor, distributed as dist

from optimus_cc.backpropagation import BackwardCompressor
from optimus_cc.gradients import GradientReduction
from optimus_cc.settings import NO_INTERLEAVING, Settings, SettingsError
from optimus_cc.traffic import COMPRESSION, Kind, Traffic

Messages = Tensor | Sequence[Tensor | None] | None


class CompressedCommunicator(P2PCommunicator):
    """Messages between pipeline stages, activation gradients as the settings say.

    The schedule sends and receives gradients alone in the epilogue, and together with activations
    before, so that the method it calls tells which a message is.
    """

    def __init__(
        self,
        pp_group: dist.ProcessGroup,
        config: Any,  # noqa: ANN401 - megatron-core's ModelParallelConfig
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
                shapes of messages are not known beforehand.
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
        settings.check_stages(pp_group.size())
        super().__init__(pp_group, config)
        self.device = device
        self.traffic = traffic or Traffic()
        self.compressor = BackwardCompressor(settings, self.traffic)

    def send_backward(self, input_tensor_grads: Messages, is_first_stage: bool) -> None:
        """Send gradients in the epilogue."""
        grads = self._compressed(input_tensor_grads, is_first_stage, in_epilogue=True)
        super().send_backward(grads, is_first_stage)

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Any:  # noqa: ANN401
        """Receive activations; one shape gives one tensor, a list a list."""
        received = super().recv_forward(tensor_shapes, is_first_stage)
        self._note(received)
        return received

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:  # noqa: ANN401
        """Receive gradients in the epilogue; one shape gives one tensor, a list a list."""
        shapes = _as_list(tensor_shapes)
        received = super().recv_backward(self._received_shapes(shapes, True), is_last_stage)
        restored = self._restored(received, shapes, in_epilogue=True)
        return restored[0] if is_single_shape(tensor_shapes) else restored

    def send_backward_recv_forward(
        self,
        input_tensor_grads: Messages,
        tensor_shapes: Any,  # noqa: ANN401 - one shape or several
        is_first_stage: bool,
    ) -> Any:  # noqa: ANN401 - one tensor or several
        """Send gradients in the steady phase, and receive activations."""
        grads = self._compressed(input_tensor_grads, is_first_stage, in_epilogue=False)
        received = super().send_backward_recv_forward(
            grads, _as_list(tensor_shapes), is_first_stage
        )
        self._note(received)
        return received if isinstance(input_tensor_grads, list) else received[0]

    def send_forward_recv_backward(
        self,
        output_tensors: Messages,
        tensor_shapes: Any,  # noqa: ANN401 - one shape or several
        is_last_stage: bool,
    ) -> Any:  # noqa: ANN401 - one tensor or several
        """Send activations in the steady phase, and receive gradients."""
        outputs = output_tensors if isinstance(output_tensors, list) else [output_tensors]
        shapes = _as_list(tensor_shapes)
        received = super().send_forward_recv_backward(
            outputs, self._received_shapes(shapes, False), is_last_stage
        )
        restored = self._restored(received, shapes, in_epilogue=False)
        return restored if isinstance(output_tensors, list) else restored[0]

    def send_forward_recv_forward(self, *_args: object, **_options: object) -> None:
        """Refused: interleaved schedules alone call it."""
        raise SettingsError(
            f"send_forward_recv_forward is of interleaved schedules; {NO_INTERLEAVING}"
        )

    def send_backward_recv_backward(self, *_args: object, **_options: object) -> None:
        """Refused: interleaved schedules alone call it."""
        raise SettingsError(
            f"send_backward_recv_backward is of interleaved schedules; {NO_INTERLEAVING}"
        )

    def _compressed(
        self, grads: Messages, is_first_stage: bool, *, in_epilogue: bool
    ) -> list[Tensor | None]:
        listed = [grads] if grads is None or isinstance(grads, Tensor) else list(grads)
        if is_first_stage:
            return listed
        compress = self.compressor.compress
        with self.traffic.timed(COMPRESSION):
            return [
                None if grad is None else compress(grad, in_epilogue, stream)
                for stream, grad in enumerate(listed)
            ]

    def _note(self, activations: Messages) -> None:
        """Give received activations to the statistics of errors, if there are any."""
        statistics = self.compressor.statistics
        if statistics is None or activations is None:
            return
        listed = [activations] if isinstance(activations, Tensor) else activations
        for stream, activation in enumerate(listed):
            if activation is not None:
                statistics.arrived(stream, activation)

    def _received_shapes(self, shapes: list[Any], in_epilogue: bool) -> list[torch.Size]:
        dtype = self._dtype
        return [self.compressor.received_shape(shape, in_epilogue, dtype) for shape in shapes]

    def _restored(
        self, received: Sequence[Tensor | None], shapes: list[Any], *, in_epilogue: bool
    ) -> list[Tensor | None]:
        restore = self.compressor.restore
        with self.traffic.timed(COMPRESSION):
            return [
                None if tensor is None else restore(tensor, shape, in_epilogue)
                for tensor, shape in zip(received, shapes, strict=True)
            ]

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,  # noqa: ANN401 - torch.Size, tuple or list
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, None]:
        """Exchange messages with the neighbours and wait for them.

        All of the schedule's communication goes through here. Receives are posted before sends:
        gloo would otherwise end a send before it begins to receive, and use the link in one
        direction at a time.
        """
        from_prev = self._buffer(tensor_shape) if recv_prev else None
        from_next = self._buffer(tensor_shape) if recv_next else None
        if tensor_send_next is not None:
            self.traffic.message(Kind.FORWARD, tensor_send_next)
        planned = [
            (Kind.FORWARD, dist.irecv, from_prev, self.prev_rank),
            (Kind.BACKWARD, dist.irecv, from_next, self.next_rank),
            (Kind.BACKWARD, dist.isend, tensor_send_prev, self.prev_rank),
            (Kind.FORWARD, dist.isend, tensor_send_next, self.next_rank),
        ]
        self._exchange(
            [
                (kind, dist.P2POp(operation, tensor.detach(), peer, self.pp_group))
                for kind, operation, tensor, peer in planned
                if tensor is not None
            ]
        )
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
                    work.wait()

    @property
    def _dtype(self) -> torch.dtype:
        """Type of all messages."""
        dtype: torch.dtype | None = self.config.pipeline_dtype
        if dtype is None:
            raise SettingsError("pipeline_dtype = None: set it to the type of the activations")
        return dtype

    def _buffer(self, shape: Any) -> Tensor:  # noqa: ANN401 - torch.Size, tuple or list
        return torch.empty(tuple(shape), dtype=self._dtype, device=self.device, requires_grad=True)


class FinalizeGradients:
    """What megatron-core's schedule calls when all micro-batches are through.

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
        config = model[0].config
        if num_tokens is not None:
            raise SettingsError(
                "calculate_per_token_loss = True: losses are averaged over micro-batches here; "
                "leave it out"
            )
        if config.sequence_parallel:
            raise SettingsError(
                "sequence_parallel = True: gradients of norms are not added over tensor-parallel "
                "ranks here; leave it out"
            )
        self.reduction.reduce()


def _as_list(shapes: Any) -> list[Any]:  # noqa: ANN401 - one shape or several
    return [shapes] if is_single_shape(shapes) else list(shapes)
