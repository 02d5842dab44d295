"""Selective stage compression (SC): compressed reduction of the gradients of some stages.

The first stages end their backward last, so that nothing overlaps the reduction of their gradients:
those are worth compressing. Gradients are reduced where a schedule leaves them in place until all
micro-batches are through, as megatron-core's does. :class:`PowerSgd` is SC as published. Two others
are there to hold it against at equal bytes: :class:`TorchPowerSgd`, torch's own PowerSGD hook, and
:class:`FourBit`, after the idea of SDP4Bit (arXiv 2410.15526).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd

from optimus_cc.formats import HadamardBlocks
from optimus_cc.low_rank import ErrorFeedback, LowRank, Memory, require_dtype
from optimus_cc.settings import Settings
from optimus_cc.sizes import BLOCK_NUMEL, saves
from optimus_cc.traffic import Kind, Traffic


def compressor(settings: Settings, group: dist.ProcessGroup, traffic: Traffic) -> Compressor:
    """Return what reduces gradients over ``group`` in the way that the settings ask for."""
    kinds: dict[str, type[Compressor]] = {"4bit": FourBit, "torch-power-sgd": TorchPowerSgd}
    return kinds.get(settings.grad_comp_method, PowerSgd)(settings, group, traffic)


class Compressor(ABC):
    """Averages gradients over ranks approximately, for fewer bytes."""

    def __init__(self, settings: Settings, group: dist.ProcessGroup, traffic: Traffic) -> None:
        """Keep the settings.

        Args:
            settings: rank and error feedback.
            group: the data-parallel ranks.
            traffic: where what is sent is counted.
        """
        self.memory = Memory()
        self._settings, self._group, self._traffic = settings, group, traffic
        self._feedback = ErrorFeedback(settings.use_error_feedback, self.memory)

    @property
    def _num_ranks(self) -> int:
        return dist.get_world_size(self._group)

    def takes(self, gradient: Tensor) -> bool:
        """Return whether a gradient is a matrix of which P and Q are smaller."""
        return gradient.dim() == 2 and saves(gradient.shape, self._settings.grad_comp_rank)

    @torch.no_grad()
    def average(self, gradients: Sequence[Tensor]) -> None:
        """Average gradients over the ranks, in place and approximately.

        Args:
            gradients: those that :meth:`takes` accepts, (rows, columns) fp32 or bf16; the same
                ones in the same order in every call and on every rank.

        Raises:
            TypeError: a gradient is of another type.
        """
        for gradient in gradients:
            require_dtype(gradient)
        self._average(gradients)

    @abstractmethod
    def _average(self, gradients: Sequence[Tensor]) -> None: ...


class PowerSgd(Compressor):
    """Averages matrices as low-rank pairs with error feedback, those of equal shapes at once."""

    def __init__(self, settings: Settings, group: dist.ProcessGroup, traffic: Traffic) -> None:
        """Keep the settings; all ranks, tensor-parallel ones included, have the same queries."""
        super().__init__(settings, group, traffic)
        self._low_rank = LowRank(settings.grad_comp_rank, memory=self.memory)

    def _average(self, gradients: Sequence[Tensor]) -> None:
        alike: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}
        for gradient in gradients:
            rows, columns = gradient.shape
            alike.setdefault((rows, columns, gradient.dtype), []).append(gradient)
        for (rows, columns, dtype), members in alike.items():
            key = (rows, columns, str(dtype))
            given = self._feedback.add(key, torch.stack(members))
            p, q = self._low_rank.factorise(key, given, functools.partial(self._mean, dtype))
            product = p @ q.mT
            self._feedback.keep(key, given, product)
            for member, approximation in zip(members, product, strict=True):
                member.copy_(approximation)

    def _mean(self, dtype: torch.dtype, factors: Tensor) -> Tensor:
        # P and Q travel in the gradients' own type.
        wire = factors.to(dtype)
        with self._traffic.timed(Kind.GRADIENTS):
            dist.all_reduce(wire, group=self._group)
        self._traffic.all_reduce(Kind.GRADIENTS, wire, self._num_ranks, compressed=True)
        return wire.float() / self._num_ranks


class TorchPowerSgd(Compressor):
    """Averages matrices by torch's ``powerSGD_hook``, in the gradients' own type throughout.

    The hook expects a bucket of ``DistributedDataParallel``. It gets one that holds all gradients
    of a type, so that it reduces all P at once, and all Q. What it takes is compression to
    :class:`Traffic`, its reductions included, which lie inside the hook.
    """

    def __init__(self, settings: Settings, group: dist.ProcessGroup, traffic: Traffic) -> None:
        """Make the hook's state, which is kept in our memory."""
        super().__init__(settings, group, traffic)
        self._state = state = torch_power_sgd.PowerSGDState(
            process_group=group,
            matrix_approximation_rank=settings.grad_comp_rank,
            start_powerSGD_iter=2,
            min_compression_rate=1,
            use_error_feedback=settings.use_error_feedback,
            batch_tensors_with_same_shape=True,
        )
        # The warm-up is over before the first call.
        state.iter = state.start_powerSGD_iter
        self._kept: list[Any] = [self.memory.of(name) for name in ("p", "q", "errors")]
        state.p_memory_dict, state.q_memory_dict, state.error_dict = self._kept

    def _average(self, gradients: Sequence[Tensor]) -> None:
        for index, (flat, members) in enumerate(by_type(gradients)):
            if index not in self._state.p_memory_dict:
                # First queries do not depend on what was drawn before.
                self._state.rng.seed(index)
            bucket = _bucket(index, flat, members)
            # No deadline: torch ends it at the process group's own.
            averaged = torch_power_sgd.powerSGD_hook(self._state, bucket).wait()
            for factors in (self._state.p_memory_dict[index], self._state.q_memory_dict[index]):
                self._traffic.all_reduce(Kind.GRADIENTS, factors, self._num_ranks, compressed=True)
            copy_back(averaged, members)
            if not averaged.isfinite().all():
                # Begin anew, or one overflow would spoil all that follows; all ranks see it alike.
                for kept in self._kept:
                    kept.pop(index, None)


def _bucket(index: int, flat: Tensor, members: Sequence[Tensor]) -> Any:
    """Return all that the hook asks a bucket for; it changes the flat tensor in place."""
    return SimpleNamespace(
        index=lambda: index,
        is_last=lambda: True,
        buffer=lambda: flat,
        gradients=lambda: views(flat, members),
    )


class FourBit(Compressor):
    """Averages gradients in four bits: owners add up what is scattered, and means are gathered.

    Each rank owns one part of all gradients. Every rank sends every owner its part in four bits,
    the owner adds them up in fp32, and sends the mean of its part to all, in four bits again. Both
    roundings are fed back, if errors are: a rank's own to what it sends next, the mean's to the
    owner's next mean.
    """

    def __init__(self, settings: Settings, group: dist.ProcessGroup, traffic: Traffic) -> None:
        """Keep the settings; all ranks rotate blocks in the same way."""
        super().__init__(settings, group, traffic)
        self._blocks = HadamardBlocks()

    def takes(self, gradient: Tensor) -> bool:
        """Return whether a gradient is a matrix: vectors are worth more than their few bytes."""
        return gradient.dim() == 2

    def _average(self, gradients: Sequence[Tensor]) -> None:
        for flat, members in by_type(gradients):
            # Parts are whole blocks.
            filling = -flat.numel() % (BLOCK_NUMEL * self._num_ranks)
            mean = self._mean(
                torch.nn.functional.pad(flat.float(), (0, filling)), str(members[0].dtype)
            )
            copy_back(mean[: flat.numel()], members)

    def _mean(self, flat: Tensor, key: str) -> Tensor:
        num_ranks = self._num_ranks
        packed = self._pack(("own", key), flat)
        received = torch.empty_like(packed)
        with self._traffic.timed(Kind.GRADIENTS):
            dist.all_to_all_single(received, packed, group=self._group)
        part = self._blocks.unpack(received, flat.shape).view(num_ranks, -1).mean(0)
        packed_part = self._pack(("mean", key), part)
        parts = [torch.empty_like(packed_part) for _ in range(num_ranks)]
        with self._traffic.timed(Kind.GRADIENTS):
            dist.all_gather(parts, packed_part, group=self._group)
        # Scattered and gathered, each rank sends what an all-reduce of these bytes sends in a ring.
        self._traffic.all_reduce(Kind.GRADIENTS, packed, num_ranks, compressed=True)
        return self._blocks.unpack(torch.cat(parts), flat.shape)

    def _pack(self, key: tuple[str, str], numbers: Tensor) -> Tensor:
        given = self._feedback.add(key, numbers)
        packed = self._blocks.pack(given, torch.uint8)
        if self._feedback.enabled:
            self._feedback.keep(key, given, self._blocks.unpack(packed, numbers.shape))
        return packed


def by_type(gradients: Sequence[Tensor]) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield the gradients of each type, as one flat copy and as they are."""
    for dtype in sorted({gradient.dtype for gradient in gradients}, key=str):
        members = [gradient for gradient in gradients if gradient.dtype == dtype]
        yield torch.cat([member.flatten() for member in members]), members


def views(flat: Tensor, members: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a flat tensor in the members' shapes."""
    parts = torch.split(flat, [member.numel() for member in members])
    return [part.view(member.shape) for part, member in zip(parts, members, strict=True)]


def copy_back(flat: Tensor, members: Sequence[Tensor]) -> None:
    """Put what was made of a flat copy where its members are."""
    for member, view in zip(members, views(flat, members), strict=True):
        member.copy_(view)
