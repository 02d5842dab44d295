"""Other ways to reduce gradients over replicas, to hold PowerSGD against at equal bytes.

:class:`TorchPowerSgd` is torch's own PowerSGD hook on the same gradients. :class:`FourBit` sends
gradients in four bits, after the idea of SDP4Bit (arXiv 2410.15526).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd

from optimus_cc import low_rank
from optimus_cc.blocks import HadamardBlocks
from optimus_cc.error_feedback import ErrorFeedback
from optimus_cc.settings import Settings
from optimus_cc.sizes import BLOCK_NUMEL
from optimus_cc.traffic import Kind, Traffic


class TorchPowerSgd:
    """Torch's ``powerSGD_hook``, in the gradients' own type throughout.

    The hook expects a bucket of ``DistributedDataParallel``. It gets one that holds all gradients
    of a type, so that it reduces all P at once, and all Q. What it takes is compression to
    :class:`Traffic`, its reductions included, which lie inside the hook.
    """

    def __init__(
        self, settings: Settings, group: dist.ProcessGroup, traffic: Traffic, seed: int = 0
    ) -> None:
        """Make the hook's state.

        Args:
            settings: rank and error feedback.
            group: the data-parallel ranks.
            traffic: where what is sent is counted.
            seed: of the first queries; the same on all ranks.
        """
        self._group, self._traffic, self._seed = group, traffic, seed
        self._state = torch_power_sgd.PowerSGDState(
            process_group=group,
            matrix_approximation_rank=settings.grad_comp_rank,
            start_powerSGD_iter=2,
            min_compression_rate=1,
            use_error_feedback=settings.use_error_feedback,
            batch_tensors_with_same_shape=True,
        )
        # The warm-up is over before the first call.
        self._state.iter = self._state.start_powerSGD_iter

    def takes(self, gradient: Tensor) -> bool:
        """Whether a gradient is a matrix of which P and Q are smaller."""
        return gradient.dim() == 2 and low_rank.saves(
            gradient.shape, self._state.matrix_approximation_rank
        )

    @torch.no_grad()
    def average(self, gradients: Sequence[Tensor]) -> None:
        """Average gradients over the ranks, in place; see :meth:`.selective.PowerSgd.average`."""
        for index, members in enumerate(_by_type(gradients)):
            bucket = _Bucket(index, members)
            if index not in self._state.p_memory_dict:
                # First queries are of the seed alone, whatever was drawn before.
                self._state.rng.seed(self._seed + index)
            averaged = torch_power_sgd.powerSGD_hook(self._state, bucket).wait()
            for factors in (self._state.p_memory_dict[index], self._state.q_memory_dict[index]):
                num_ranks = dist.get_world_size(self._group)
                self._traffic.all_reduce(Kind.GRADIENTS, factors, num_ranks, compressed=True)
            bucket.give_back(averaged, members)
            if not averaged.isfinite().all():
                self._forget(index)

    def _forget(self, index: int) -> None:
        """Begin anew, or one overflow would spoil all that follows; all ranks see it alike."""
        for remembered in self._remembered().values():
            remembered.pop(index, None)

    def _remembered(self) -> dict[str, dict[int, Tensor]]:
        state = self._state
        return {"p": state.p_memory_dict, "q": state.q_memory_dict, "errors": state.error_dict}

    def state_dict(self) -> dict[str, Any]:
        """P, Q and errors, to go on as if training had not stopped."""
        return {
            # The hook works in place.
            name: {index: tensor.clone() for index, tensor in remembered.items()}
            for name, remembered in self._remembered().items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        for name, remembered in self._remembered().items():
            remembered.clear()
            remembered.update({index: tensor.clone() for index, tensor in state[name].items()})


class _Bucket:
    """What the hook asks a bucket of ``DistributedDataParallel`` for."""

    def __init__(self, index: int, members: Sequence[Tensor]) -> None:
        self._index = index
        self._shapes = [member.shape for member in members]
        self._flat = torch.cat([member.flatten() for member in members])

    def index(self) -> int:
        """Under which the hook keeps factors and errors."""
        return self._index

    def is_last(self) -> bool:
        """Whether an iteration of the hook's count ends."""
        return True

    def buffer(self) -> Tensor:
        """All gradients, flat; the hook changes them in place."""
        return self._flat

    def gradients(self) -> list[Tensor]:
        """Each gradient, as a view of the buffer."""
        return self._views(self._flat)

    def give_back(self, averaged: Tensor, members: Sequence[Tensor]) -> None:
        """Put what the hook made of the buffer where the gradients were."""
        for member, view in zip(members, self._views(averaged), strict=True):
            member.copy_(view)

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = torch.split(flat, [shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


class FourBit:
    """Gradients in four bits: scattered and added by their owners, whose means are gathered.

    Each rank owns one part of all gradients. Every rank sends every owner its part in four bits,
    the owner adds them up in fp32, and sends the mean of its part to all, in four bits again. Both
    roundings are fed back, if errors are: a rank's own to what it sends next, the mean's to the
    owner's next mean.
    """

    def __init__(
        self, settings: Settings, group: dist.ProcessGroup, traffic: Traffic, seed: int = 0
    ) -> None:
        """Keep the settings.

        Args:
            settings: error feedback.
            group: the data-parallel ranks.
            traffic: where what is sent is counted.
            seed: of the rotation of blocks; the same on all ranks.
        """
        self._group, self._traffic = group, traffic
        self._blocks = HadamardBlocks(seed)
        self._feedback = ErrorFeedback(settings.use_error_feedback)

    def takes(self, gradient: Tensor) -> bool:
        """Whether a gradient is a matrix: vectors are few, and worth more than their bytes."""
        return gradient.dim() == 2

    @torch.no_grad()
    def average(self, gradients: Sequence[Tensor]) -> None:
        """Average gradients over the ranks, in place; see :meth:`.selective.PowerSgd.average`."""
        for members in _by_type(gradients):
            num_ranks = dist.get_world_size(self._group)
            flat = torch.cat([member.flatten() for member in members]).float()
            numel = flat.numel()
            # Parts are whole blocks.
            flat = torch.nn.functional.pad(flat, (0, -numel % (BLOCK_NUMEL * num_ranks)))
            mean = self._mean(flat, str(members[0].dtype), num_ranks)[:numel]
            parts = torch.split(mean, [member.numel() for member in members])
            for member, part in zip(members, parts, strict=True):
                member.copy_(part.view_as(member))

    def _mean(self, flat: Tensor, key: str, num_ranks: int) -> Tensor:
        """The mean of a flat fp32 tensor over the ranks."""
        packed = self._pack(("own", key), flat)
        received = torch.empty_like(packed)
        with self._traffic.timed(Kind.GRADIENTS):
            dist.all_to_all_single(received, packed, group=self._group)
        part = self._blocks.unpack(received, flat.numel()).view(num_ranks, -1).mean(0)
        packed_part = self._pack(("mean", key), part)
        parts = [torch.empty_like(packed_part) for _ in range(num_ranks)]
        with self._traffic.timed(Kind.GRADIENTS):
            dist.all_gather(parts, packed_part, group=self._group)
        # Scattered and gathered, each rank sends what an all-reduce of these bytes sends in a ring.
        self._traffic.all_reduce(Kind.GRADIENTS, packed, num_ranks, compressed=True)
        return self._blocks.unpack(torch.cat(parts), flat.numel())

    def _pack(self, key: tuple[str, str], numbers: Tensor) -> Tensor:
        """Bytes of some numbers and of the error before."""
        given = self._feedback.add(key, numbers)
        packed = self._blocks.pack(given)
        if self._feedback.enabled:
            self._feedback.keep(key, given, self._blocks.unpack(packed, numbers.numel()))
        return packed

    def state_dict(self) -> dict[str, Any]:
        """Errors, to go on as if training had not stopped."""
        return self._feedback.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self._feedback.load_state_dict(state)


def _by_type(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients of each type together.

    Raises:
        TypeError: a gradient is neither fp32 nor bf16.
    """
    alike: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        low_rank.require_dtype(gradient)
        alike.setdefault(gradient.dtype, []).append(gradient)
    yield from alike.values()
