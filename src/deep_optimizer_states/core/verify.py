"""Repeat a sample of an update on the host, and compare the bits.

A copy that came too late, or a slot filled too early, shows in no loss for a long time. Adam steps
each element by itself, so any part of a tile can be repeated alone: here its first and last ones,
which a race reaches first and last. It costs a copy of the sample before the update and one after.

What is seen is the update: it started from the state that was there, went by the gradients that are
at home when it is over, and arrived. Not seen are gradients that came wrong out of backward, and
whoever reads weights too early: ``step()`` waits for an update that is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deep_optimizer_states.core.executor import Work
from deep_optimizer_states.core.kernels.adam import AdamTensors, first_difference, tail_within
from deep_optimizer_states.core.kernels.host import HostAdam
from deep_optimizer_states.errors import UpdateError

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
    """Some elements of a tile, and their state before the update, on the host."""

    work: Work
    start: int
    state: tuple[Tensor, Tensor, Tensor]


class Sample:
    """What an update works on, kept from before it.

    Args:
        work: Every tile; no update is in flight. Gradients may be: waiting for them here would hide
            an update that does not.
    """

    def __init__(self, work: Sequence[Work]) -> None:
        self._parts = [
            _Part(tile, start, _state_on_host(tile.tensors.narrow(start, numel)))
            for tile in work
            for start, numel in _ends(tile.tensors.numel)
        ]

    def compare(self, host_adam: HostAdam, update: int) -> None:
        """Repeat the update, and look for differences. It is over, and gradients have arrived.

        Args:
            host_adam: The CPU lane's kernel.
            update: Its number, for the message.

        Raises:
            UpdateError: A number differs; names tile, element and both values.
        """
        for part in self._parts:
            work, numel = part.work, part.state[0].numel()
            live = work.tensors.narrow(part.start, numel)
            weights = torch.empty(numel, dtype=live.weights.dtype, device="cpu")
            grad = work.grad.narrow(0, part.start, numel).cpu()
            again = AdamTensors(*part.state, grad, weights)
            tail_start = tail_within(work.tail_start, part.start, numel)
            host_adam.step(again, work.scalars, tail_start, num_threads=1)
            found = first_difference(live, again)
            if found is not None:
                raise UpdateError(
                    f"update {update} since the start, {work.name}, went wrong: {found.name} of "
                    f"its element {part.start + found.index} is {found.value!r}, repeated on the "
                    f'CPU {found.expected!r}; until this is understood, use policy "all-host"'
                )


def _ends(numel: int) -> Iterator[tuple[int, int]]:
    """First element and length of each part."""
    if numel <= 2 * PART_NUMEL:
        yield 0, numel
    else:
        yield 0, PART_NUMEL
        yield numel - PART_NUMEL, PART_NUMEL


def _state_on_host(tensors: AdamTensors) -> tuple[Tensor, Tensor, Tensor]:
    master, exp_avg, exp_avg_sq = [tensor.to("cpu", copy=True) for tensor in tensors.state]
    return master, exp_avg, exp_avg_sq
