"""The split between device and CPU that policy ``dynamic`` finds while the update runs.

Both take the next tile of one list, so what the next forward needs first is updated first. To hand
the device a tile whenever a slot is free is not enough; three things are measured:

- The CPU steps a whole tile before anybody looks again, and a slow one lets slots lie idle
  meanwhile. The device gets as many elements ahead as it ends during one step of the CPU; its lanes
  order them.
- The last tiles end where they fall. The CPU leaves them to a device that would be through with all
  of them first, and the device to such a CPU.
- Beside a fast CPU the link is full of 16-bit weights, and a tile for the device displaces several
  of the CPU's. It gets none while the CPU has to wait for its weights to leave.

Needs no torch. What is learned is kept for the next update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from deep_optimizer_states.plan import DEVICE_CHAIN, HOST_CHAIN, Kind

NEW_WEIGHT = 0.2
"""Of a measurement beside what is known."""
PIPELINE = 2
"""Tiles on the device beside the one that ends: one on its way there, one on its way back."""
HELD_UP = 0.1
"""Share of its time from which on a CPU that waits for its weights to leave counts as held up."""
FIRST_STEPS = 3
"""Steps of the CPU during which its weights may wait for the backward's last kernels instead."""
FEW_STEPS = 3
"""Steps after those from which a share of its time can be told."""
LONGEST_PAUSE = 64
"""Updates without the device before it is tried again."""

Chains = Iterator[tuple[int, tuple[Kind, ...]]]
"""Tiles, each with its chain of actions."""
Share = Callable[[Sequence[int], Sequence[int]], Chains]
"""Hands out tiles (first argument; the second has the elements of every tile, by its number)."""


class Progress(Protocol):
    """What the split asks whoever executes it."""

    def now_s(self) -> float:
        """A clock, in seconds."""

    def stalled_s(self) -> float:
        """What the CPU lane has waited for its weights to leave, in seconds, ever growing."""

    def in_flight(self) -> int:
        """Elements given to the device whose state is not back yet."""


class RunTimeSplit:
    """Shares tiles out, and learns how fast the device is beside the CPU.

    Attributes:
        pace: Elements that the device ends while the CPU steps one.
        pause: Updates for which the device gets nothing.
    """

    def __init__(self) -> None:
        self.pace = 1.0
        self.pause = 0
        self._next_pause = 1

    def share(self, tiles: Sequence[int], numels: Sequence[int], progress: Progress) -> Chains:
        """Hand out the tiles of one update.

        Args:
            tiles: Those needed first come first.
            numels: Elements of every tile, by its number.
            progress: Of their execution.

        Yields:
            A tile and its chain of actions. The CPU's step has run when the next item is asked for.
        """
        paused, self.pause = self.pause > 0, max(0, self.pause - 1)
        held_up, steps, given, stepped = False, 0, 0, 0
        began_s, stalled_s = progress.now_s(), progress.stalled_s()
        left = sum(numels[tile] for tile in tiles)
        largest = max((numels[tile] for tile in tiles), default=0)
        for tile in tiles:
            numel, before = numels[tile], progress.in_flight()
            ahead = self._ahead(numel, largest)
            closed = paused or held_up
            for_device = not closed and self._is_for_device(numel, before, left, ahead)
            left -= numel
            if for_device:
                given += numel
                yield tile, DEVICE_CHAIN
                continue
            stepped, steps = stepped + numel, steps + 1
            yield tile, HOST_CHAIN
            after = progress.in_flight()
            seen = (before - after) / numel
            if not after and before >= ahead:
                self.pace = seen + 1  # with more to do it would have ended more
            elif 0 < after < given:
                self.pace += NEW_WEIGHT * (seen - self.pace)
            elif not after:  # the device was idle for a while: it can do this much at least
                self.pace += NEW_WEIGHT * max(0.0, given / stepped - self.pace)
            else:
                # Until the first tile is back, all that is known is how long it takes at least.
                self.pace = min(self.pace, PIPELINE * largest / stepped)
            if steps == FIRST_STEPS:
                began_s, stalled_s = progress.now_s(), progress.stalled_s()
            waited_s, passed_s = progress.stalled_s() - stalled_s, progress.now_s() - began_s
            enough = given > 0 and steps >= FIRST_STEPS + FEW_STEPS
            held_up |= enough and waited_s > HELD_UP * passed_s
        if held_up:
            self.pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
        elif given:
            self._next_pause = 1
        elif not paused:
            self.pace *= 1 + NEW_WEIGHT  # or a device that was slow once would never be tried again

    def _is_for_device(self, numel: int, in_flight: int, left: int, ahead: float) -> bool:
        """Whether the device takes the next tile, one of ``left`` elements that are left."""
        if in_flight + left + numel <= self.pace * numel:
            return True  # the device ends all of them before the CPU ends one
        if in_flight >= ahead:
            return False
        # Else the CPU would be through with all that is left before the device with one more.
        return left * self.pace >= in_flight + PIPELINE * numel

    def _ahead(self, numel: int, largest: int) -> float:
        """Elements that keep the device busy while the CPU steps ``numel`` of them."""
        return self.pace * numel + PIPELINE * largest
