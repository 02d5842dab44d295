"""Compressed backpropagation for any PyTorch model, on ``torch.distributed.pipelining``.

:class:`CompressedStage` takes the place of ``PipelineStage``, under ``Schedule1F1B``. The gradients
of the stage's parameters are reduced by :class:`optimus_cc.gradients.GradientReduction` after
``schedule.step``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed as dist
from torch.distributed.pipelining import PipelineStage

from optimus_cc.backpropagation import BackwardCompressor, in_epilogue
from optimus_cc.settings import NO_INTERLEAVING, Settings, SettingsError
from optimus_cc.traffic import COMPRESSION, Kind, Traffic


class CompressedStage(PipelineStage):
    """A pipeline stage that sends activation gradients as the settings say.

    Messages are counted but not timed, their compression is: the stage only says what is to be
    sent, and the schedule posts it and waits for it in functions of its own.
    """

    def __init__(
        self,
        submodule: torch.nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        settings: Settings,
        *,
        traffic: Traffic | None = None,
        **options: Any,
    ) -> None:
        """Make the stage; what is not described here is as in ``PipelineStage``.

        Args:
            submodule: the stage's module.
            stage_index: from 0.
            num_stages: as many as there are ranks in ``group``.
            device: of this rank.
            settings: whether and how messages are compressed; the same on all ranks.
            traffic: where sent messages are counted, and compression is timed.
            options: ``group``, ``input_args`` and the like.

        Raises:
            SettingsError: the schedule would be an interleaved one, or the pipeline is one stage.
        """
        super().__init__(submodule, stage_index, num_stages, device, **options)
        if self.group_size != num_stages:
            raise SettingsError(
                f"num_stages = {num_stages}: {self.group_size} ranks would hold several stages "
                f"each, as in interleaved schedules; {NO_INTERLEAVING}"
            )
        settings.check_stages(num_stages)
        self.traffic = traffic or Traffic()
        self.compressor = BackwardCompressor(settings, self.traffic)
        self._awaited: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the stage's sends of activations, counted."""
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        for operation in operations:
            self.traffic.message(Kind.FORWARD, operation.tensor)
        return operations

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the stage's sends of gradients, compressed ones in place of whole ones."""
        operations = super().get_bwd_send_ops(bwd_chunk_id)
        late = self._in_epilogue(bwd_chunk_id, self.stage_index - 1)
        with self.traffic.timed(COMPRESSION):
            for stream, operation in enumerate(operations):
                operation.tensor = self.compressor.compress(operation.tensor, late, stream)
        return operations

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the stage's receives of gradients, into buffers of what arrives."""
        operations = super().get_bwd_recv_ops(bwd_chunk_id)
        late = self._in_epilogue(bwd_chunk_id, self.stage_index)
        awaited = []
        for operation in operations:
            gradient = operation.tensor
            shape = self.compressor.received_shape(gradient.shape, late, gradient.dtype)
            if shape != gradient.shape:
                operation.tensor = gradient.new_empty(shape)
                awaited.append((gradient, operation.tensor))
        self._awaited[bwd_chunk_id] = awaited
        return operations

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Any, ...]:
        activations: tuple[Any, ...] = super()._retrieve_recv_activations(fwd_chunk_id)
        if self.compressor.statistics is not None and not self.is_first:
            for stream, activation in enumerate(activations):
                self.compressor.statistics.arrived(stream, activation)
        return activations

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        late = self._in_epilogue(bwd_chunk_id, self.stage_index)
        with self.traffic.timed(COMPRESSION):
            for gradient, received in self._awaited.pop(bwd_chunk_id, ()):
                gradient.copy_(self.compressor.restore(received, gradient.shape, late))
        gradients: tuple[Tensor | None, ...] = super()._retrieve_recv_grads(bwd_chunk_id)
        return gradients

    def _in_epilogue(self, micro_batch: int, receiver: int) -> bool:
        assert self.chunks is not None  # The schedule set it before the first backward.
        return in_epilogue(
            micro_batch,
            receiver=receiver,
            num_stages=self.num_stages,
            num_micro_batches=self.chunks,
        )
