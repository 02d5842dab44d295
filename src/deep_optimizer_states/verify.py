"""Repeat a sample of an update on the host, and compare the bits.

A copy that came too late, or a slot filled too early, shows in no loss for a long time. Adam steps
each element by itself, so any part of a tile can be repeated alone: here its first and last ones,
which a race reaches first and last. It costs a copy of the sample before the update and one after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from deep_optimizer_states.errors import UpdateError
from deep_optimizer_states.executor import Work
from deep_optimizer_states.kernels.host import HostAdam
from deep_optimizer_states.kernels.tensors import AdamTensors, differing
from deep_optimizer_states.kernels.torch_adam import TorchAdam

PART_NUMEL = 2048
"""Elements from each end of a tile."""
FIRST_UPDATES = 2
"""Always repeated: the first meets everything new, the second everything that is used again."""


def is_due(update: int, every: int) -> bool:
    """Whether an update is to be repeated.

    Args:
        update: Its number, from 1.
        every: One in so many; 0 for none at all.
    """
    return bool(every) and (update <= FIRST_UPDATES or update % every == 0)


@dataclass(frozen=True)
class _Part:
    """Some elements of a tile: where they live, and a copy of them on the host."""

    work: Work
    start: int
    copy: AdamTensors


class Sample:
    """What an update works on, kept from before it.

    Args:
        work: Every tile; gradients have arrived and nothing is in flight.
    """

    def __init__(self, work: Sequence[Work]) -> None:
        self._parts = [
            _Part(tile, start, _copy_to_host(tile.tensors.narrow(start, numel)))
            for tile in work
            for start, numel in _ends(tile.tensors.numel)
        ]

    def compare(self, host_adam: HostAdam | TorchAdam, update: int) -> None:
        """Repeat the update, which is over, and look for differences.

        Args:
            host_adam: The CPU lane's kernel.
            update: Its number, for the message.

        Raises:
            UpdateError: A number differs; names tile, element and both values.
        """
        for part in self._parts:
            copy, work = part.copy, part.work
            tail_start = min(max(work.tail_start - part.start, 0), copy.numel)
            host_adam.step(copy, work.scalars, tail_start, num_threads=1)
            live = work.tensors.narrow(part.start, copy.numel)
            for name in ("master", "exp_avg", "exp_avg_sq", "weights"):
                found, expected = getattr(live, name).cpu(), getattr(copy, name)
                differs = differing(found, expected)
                if differs.any():
                    first = int(differs.nonzero()[0])
                    raise UpdateError(
                        f"update {update} of {work.name} went wrong: {name} of its element "
                        f"{part.start + first} is {found[first].item()!r}, repeated on the CPU "
                        f"{expected[first].item()!r}. Go back to the last checkpoint; until this "
                        'is understood, use policy "all-host"'
                    )


def _ends(numel: int) -> Iterator[tuple[int, int]]:
    """First element and length of each part."""
    if numel <= 2 * PART_NUMEL:
        yield 0, numel
    else:
        yield 0, PART_NUMEL
        yield numel - PART_NUMEL, PART_NUMEL


def _copy_to_host(tensors: AdamTensors) -> AdamTensors:
    return AdamTensors(*(_host_copy(tensor) for tensor in vars(tensors).values()))


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)
