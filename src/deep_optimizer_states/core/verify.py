"""Compare bits with the CPU's Adam: the device's before training, and a sample of an update.

*Before training.* That both Adams have the same bits follows from how the kernels are written, but
it also depends on what a compiler and a driver make of them. So it is seen on the machine itself,
in the types of the run.

*While it runs.* A copy that came too late, or a slot filled too early, shows in no loss for a long
time. Adam steps each element by itself, so any part of a tile can be repeated alone: here its first
and last ones, which a race reaches first and last. It costs a copy of the sample before the update
and one after. What is seen is the update: it started from the state that was there, went by the
gradients that are at home when it is over, and arrived. Not seen are gradients that came wrong out
of backward, and whoever reads weights too early: ``step()`` waits for an update that is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deep_optimizer_states.core.device.base import Device, Wait
from deep_optimizer_states.core.kernels.adam import (
    AdamScalars,
    AdamTensors,
    BetaPowers,
    adam_scalars,
    first_difference,
    tail_within,
)
from deep_optimizer_states.core.kernels.host import HostAdam, Tail
from deep_optimizer_states.core.update import TileArgs
from deep_optimizer_states.errors import KernelError, UpdateError

PART_NUMEL = 2048
"""Elements from each end of a tile."""
FIRST_UPDATES = 2
"""Always repeated: the first meets everything new, the second everything that is used again."""


def is_due(update: int, every: int) -> bool:
    """Return whether an update is to be repeated.

    Args:
        update: Its number, from 1.
        every: One in so many; 0 for none at all.
    """
    return bool(every) and (update <= FIRST_UPDATES or update % every == 0)


@dataclass(frozen=True)
class _Part:
    """Some elements of a tile, and their state before the update, on the host."""

    work: TileArgs
    start: int
    state: tuple[Tensor, Tensor, Tensor]


class Sample:
    """A sample of an update's state, kept from before it.

    Args:
        work: Every tile; no update is in flight. Gradients may be: waiting for them here would hide
            an update that does not.
    """

    def __init__(self, work: Sequence[TileArgs]) -> None:
        self._parts = [
            _Part(tile, start, _state_on_host(tile.live.narrow(start, numel)))
            for tile in work
            for start, numel in _ends(tile.tensors.numel)
        ]

    def compare(self, host_adam: HostAdam, update: int) -> None:
        """Repeat the update, and look for differences. It is over, and gradients have arrived.

        Raises:
            UpdateError: A number differs; names tile, element and both values.
        """
        for part in self._parts:
            work, numel = part.work, part.state[0].numel()
            live = work.live.narrow(part.start, numel)
            weights = torch.empty(numel, dtype=live.weights.dtype, device="cpu")
            again = AdamTensors(*part.state, live.grad.cpu(), weights)
            tail_start = tail_within(work.tail_start, part.start, numel)
            host_adam.step(again, work.scalars, tail_start, num_threads=1)
            found = first_difference(live, again)
            if found is not None:
                raise UpdateError(
                    f"update {update} since the start, {work.name}, went wrong: {found.name} of "
                    f"its element {part.start + found.index} is {found.value!r}, repeated on the "
                    f'CPU {found.expected!r}; until this is understood, use policy "all-host" and '
                    '"device_memory_bytes" 0'
                )


def _ends(numel: int) -> Iterator[tuple[int, int]]:
    """Yield first element and length of each part."""
    if numel <= 2 * PART_NUMEL:
        yield 0, numel
    else:
        yield 0, PART_NUMEL
        yield numel - PART_NUMEL, PART_NUMEL


def _state_on_host(tensors: AdamTensors) -> tuple[Tensor, Tensor, Tensor]:
    master, exp_avg, exp_avg_sq = [tensor.to("cpu", copy=True) for tensor in tensors.state]
    return master, exp_avg, exp_avg_sq


_PIECES = ((0, 2**16), (2**16, 15))
"""First element and length of what is stepped at once: a multiple of 16 and the rest take different
kernels of the device, see [Note: variants]. All that updates launch are compiled here, and not in
the first update. The last piece holds the tail of every vector width up to 16."""
_NUMEL = 2**16 + 15
_STEPS = 3
_BETAS = (0.9, 0.95)
_WAY_OUT = 'use policy "all-host" and "device_memory_bytes" 0, which need no Adam on the device'
_FLUSHES = (
    "this thread flushes subnormal numbers to zero, perhaps by a library built with -ffast-math, "
    "and a GPU does not: call torch.set_flush_denormal(False) before deepspeed.initialize, or "
)


def check_device_adam(
    device: Device,
    host_adam: HostAdam,
    tail: Tail,
    decoupled: bool,
    dtypes: tuple[torch.dtype, torch.dtype],
    state_dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
) -> None:
    """Compare some steps of the device with the host's, with weight decay and without.

    Args:
        device: Whose Adam is looked at.
        host_adam: Whose bits it has to give.
        tail: How the last elements are rounded.
        decoupled: Whether the optimizer is AdamW.
        dtypes: Of gradients, and of the weights that the model computes with.
        state_dtypes: Of master weights, and of moments.

    Raises:
        KernelError: The device cannot step, or its bits are others; says what to do.
    """
    for decay in (0.1, 0.0):
        group = {"lr": 3e-3, "betas": _BETAS, "eps": 1e-8, "weight_decay": decay}
        group["bias_correction"] = True
        powers, draw = BetaPowers(_BETAS), _Draw(torch.float16 in state_dtypes)
        master_dtype, moment_dtype = state_dtypes
        numbers = (draw(), draw(), draw() ** 2, draw(), draw())
        types = (master_dtype, moment_dtype, moment_dtype, *dtypes)
        host = AdamTensors(*(n.to(dtype) for n, dtype in zip(numbers, types, strict=True)))
        away = AdamTensors(
            **{name: _copy_to(device, tensor) for name, tensor in vars(host).items()}
        )
        for step in range(1, _STEPS + 1):
            host.grad.copy_(draw())
            away.grad.copy_(host.grad)
            scalars = adam_scalars(group, powers.at(step, _BETAS), 0.37, decoupled)
            start = tail.start(_NUMEL)
            host_adam.step(host, scalars, start, num_threads=1)
            for first, numel in _PIECES:
                piece = away.narrow(first, numel)
                _step_away(device, piece, scalars, tail_within(start, first, numel))
        _compare(host, away)


class _Draw:
    """Finite numbers of every size that a type has, subnormal ones too; each place has its size.

    Numbers of one size meet there, or the larger would hide how the smaller was rounded. Those of
    the tail, which are few, are of size 1.

    Args:
        is_half: Draw what fp16 has; fp32 and bf16 have larger and smaller numbers.
    """

    def __init__(self, is_half: bool) -> None:
        self._generator = torch.Generator("cpu").manual_seed(20241)
        # Squares of the largest are below fp16's end.
        lowest, end = (-26, 6) if is_half else (-150, 11)
        powers = torch.randint(lowest, end, (_NUMEL,), generator=self._generator, device="cpu")
        powers[_PIECES[1][0] :] = 0
        self._sizes = powers.double().exp2()

    def __call__(self) -> Tensor:
        # The caller may have set another default type or device.
        normal = torch.empty_like(self._sizes).normal_(generator=self._generator)
        return (normal * self._sizes).float()


def _copy_to(device: Device, source: Tensor) -> Tensor:
    return device.empty_device(source.numel(), source.dtype).copy_(source)


def _step_away(device: Device, tensors: AdamTensors, scalars: AdamScalars, start: int) -> None:
    lane = device.compute
    lane.wait(device.record_caller(), Wait.WEIGHTS_IDLE)
    try:
        lane.submit("self-check of Adam", lambda: device.adam(tensors, scalars, start))
        lane.record().synchronize()
    except Exception as error:  # whatever a compiler of kernels raises
        raise KernelError(f"the device cannot step: {error}; {_WAY_OUT}") from error


def _compare(host: AdamTensors, away: AdamTensors) -> None:
    found = first_difference(away, host)
    if found is not None:
        raise KernelError(
            f"Adam on the device has not the bits of Adam on the host: of {_NUMEL} numbers of "
            f"{found.name} {found.count} differ, first {found.value!r} instead of "
            f"{found.expected!r}; {_FLUSHES if _flushes() else ''}{_WAY_OUT}"
        )


def _flushes() -> bool:
    """Return whether this thread takes subnormal numbers for zero."""
    smallest_normal = torch.full((1,), 2.0**-126, dtype=torch.float32, device="cpu")
    return not bool(smallest_normal.div(2).view(torch.int32).any())
