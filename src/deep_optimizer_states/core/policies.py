"""Policies: who steps which tile.

A fixed policy is a line of :data:`POLICIES`, and its name stands among those that
``config.Settings`` takes. The split of ``dynamic`` is found while the update runs, by
:class:`RunTimeSplit`; ``predict`` asks the same code as the executor.

Policy ``dynamic`` lets the device and the CPU take the next tile of one list, so what the next
forward needs first is updated first. To hand the device a tile whenever a slot is free is not
enough:

- The split is decided between steps of the CPU, and during a long step slots would stay empty. So
  the device gets as many elements in advance as it finishes during one step of the CPU.
- The last tiles decide when the update ends. The CPU leaves them to the device if the device would
  finish all of them first, and the other way round.
- Beside a fast CPU the link is full of 16-bit weights, and each tile for the device delays several
  of the CPU's. If the CPU had to wait until its weights were sent, one update is tried without the
  device, and the faster way is kept.

Policy ``auto`` splits tiles as ``dynamic`` does, but judges by whole iterations: copies for the
device also delay forward and backward, which no timing of an update shows. So it runs a few
iterations with the split and a few without the device, keeps the faster way, and tries the other
again more and more seldom.

Needs no torch. The speeds of the lanes are measured in every update and used for the next.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from deep_optimizer_states.core.plan import DEVICE_CHAIN, HOST_CHAIN, Kind
from deep_optimizer_states.errors import PlanError

AUTO = "auto"
DYNAMIC = "dynamic"
SHARED = (DYNAMIC, AUTO)
"""Policies that find the split between device and CPU while an update runs."""
PIPELINE_DEPTH = 2
"""Time of a tile on an idle device, in tiles: one for its copy there, one for its copy back."""
MIN_TILE_FRACTION = 2**-10
"""Tiles below this share of the largest are the CPU's: they cost the device a launch each."""
FIRST_STEPS = 3
"""Steps of the CPU during which its weights may wait for the backward's last kernels instead."""
STALL_FRACTION = 0.1
"""The CPU counts as stalled if it waits longer than this share for its weights to be sent."""
WORTH_A_TRY = 0.5
"""A way whose speed was below this share of the other's is not tried again."""
LONGEST_WAIT = 64
"""Turns after which the slower way, or updates after which a lane that got nothing, is tried
again."""
ITERATIONS_A_TURN = 3
"""Iterations of which ``auto`` takes the median: one of them may have saved a checkpoint."""
MIN_GAIN = 0.03
"""A way must be faster than the present one by this share to take its place."""

CPU_ALONE = "all-host"
BOTH = DYNAMIC
"""The two ways of ``auto``, by the names of the policies that always take them."""

POLICIES: Mapping[str, Callable[[int, int], bool]] = {
    "all-host": lambda subgroup, stride: False,
    "ratio": lambda subgroup, stride: False,
    "stride": lambda subgroup, stride: (subgroup + 1) % stride == 0,
    "all-device": lambda subgroup, stride: True,
    DYNAMIC: lambda subgroup, stride: False,
    AUTO: lambda subgroup, stride: False,
}
"""Name in a config -> does the device update a subgroup's tiles through a slot? ``ratio`` differs
from ``all-host`` by its resident subgroups."""


def takes(policy: str, stride: int) -> Callable[[int], bool]:
    """Return the rule by which the device takes subgroups under a fixed policy.

    Raises:
        PlanError: There is no such policy, or ``stride`` is below 1.
    """
    if policy not in POLICIES:
        raise PlanError(f"policy '{policy}' is not one of {', '.join(POLICIES)}")
    if stride < 1:
        raise PlanError(f"stride {stride} must be at least 1")
    return lambda subgroup: POLICIES[policy](subgroup, stride)


PlaceTile = Callable[[int], tuple[Kind, ...]]
"""The chain of actions of a tile, chosen when it is to be issued."""
SplitFn = Callable[[Sequence[int], Sequence[int]], PlaceTile]
"""Begins to share tiles (first argument; the second has the elements of every tile, by number)."""


@dataclass(frozen=True)
class HostStep:
    """A tile that the CPU stepped.

    Attributes:
        numel: Its elements.
        stalled_s: What the CPU waited before it for a staging buffer, in seconds.
        seconds: What it took.
    """

    numel: int
    stalled_s: float
    seconds: float


@dataclass(frozen=True)
class Flight:
    """A tile that passed through a slot.

    Attributes:
        numel: Its elements.
        begin_s: When its prefetch began, in seconds.
        end_s: When its state was back.
    """

    numel: int
    begin_s: float
    end_s: float


class ABSelector:
    """Choose the faster of two ways to do a repeated task; the other is tried again at times.

    Attributes:
        best: Whether the second way was faster so far; None until both were tried.

    Args:
        turn: Times that a way is taken before it is judged, by the median of its speeds.
    """

    def __init__(self, turn: int = 1) -> None:
        self.best: bool | None = None
        self._turn = turn
        self._speeds: list[float] = []
        self._rates: dict[bool, float] = {}
        self._patience = 1
        self._since = 0

    def next(self, was_second: bool, rate: float, may_try: bool) -> bool:
        """Return whether to take the second way next.

        Args:
            was_second: Whether the second way was taken this time.
            rate: Its speed; more is faster.
            may_try: Whether a try of the second way may pay off.
        """
        self._speeds.append(rate)
        if len(self._speeds) < self._turn:
            return was_second
        self._rates[was_second] = statistics.median(self._speeds)
        self._speeds.clear()
        if True not in self._rates:
            return may_try
        first, second, before = self._rates[False], self._rates[True], bool(self.best)
        self.best = best = second > (1 - MIN_GAIN if before else 1 + MIN_GAIN) * first
        if was_second != before:
            self._patience = 1 if best == was_second else min(2 * self._patience, LONGEST_WAIT)
            self._since = 0
        self._since += 1
        if self._since <= self._patience:
            return best
        if best:
            return False
        return may_try and second > WORTH_A_TRY * first


class RunTimeSplit:
    """Splits tiles between device and CPU by the rates of the last update.

    Attributes:
        pace: Elements that the device finishes while the CPU steps one.
        cpu_only: Whether the CPU gets all tiles of the next update.

    Args:
        by_iteration: Judge by whole iterations, see :meth:`note_iteration`, whether it does.
    """

    def __init__(self, by_iteration: bool = False) -> None:
        self.pace = 1.0
        self.cpu_only = False
        self._is_measured = False
        self._by_iteration = by_iteration
        self._ways = ABSelector(ITERATIONS_A_TURN if by_iteration else 1)
        self._unused: dict[tuple[Kind, ...], int] = {DEVICE_CHAIN: 0, HOST_CHAIN: 0}

    def start_split(
        self,
        tiles: Sequence[int],
        numels: Sequence[int] | Mapping[int, int],
        in_flight: Callable[[], int],
    ) -> PlaceTile:
        """Begin to split the tiles of one update between device and CPU.

        Args:
            tiles: Those needed first come first.
            numels: Elements of every tile, by its number.
            in_flight: Elements given to the device whose state is not back yet.

        Returns:
            A function to call per tile, after the previous CPU step. Its answer is undefined for
            tiles that are not in ``tiles``.
        """
        largest = max((numels[tile] for tile in tiles), default=0)
        worth = [tile for tile in tiles if numels[tile] >= MIN_TILE_FRACTION * largest]
        left = sum(numels[tile] for tile in worth)
        # A lane that got nothing for long may be another by now.
        forced: dict[int, tuple[Kind, ...]] = {}
        if worth and self._unused[HOST_CHAIN] >= LONGEST_WAIT:
            forced[worth[-1]] = HOST_CHAIN
        if worth and self._unused[DEVICE_CHAIN] >= LONGEST_WAIT:
            forced[worth[0]] = DEVICE_CHAIN
        shared = frozenset(tiles)

        def choose(tile: int) -> tuple[Kind, ...]:
            nonlocal left
            numel = numels[tile]
            if tile not in shared or numel < MIN_TILE_FRACTION * largest:
                return HOST_CHAIN
            chain = HOST_CHAIN if self.cpu_only else self._choose(numel, in_flight(), left)
            left -= numel
            return forced.get(tile, chain)

        return choose

    def _choose(self, numel: int, in_flight: int, left: int) -> tuple[Kind, ...]:
        if in_flight + left <= self.pace * numel:
            return DEVICE_CHAIN  # it ends all that is left before the CPU would end this tile
        is_busy = in_flight >= self.pace * numel + PIPELINE_DEPTH * numel
        # The CPU would be through with all that is left before the device with one tile more.
        is_late = left * self.pace < in_flight + PIPELINE_DEPTH * numel
        return HOST_CHAIN if is_busy or is_late else DEVICE_CHAIN

    def learn(self, steps: Sequence[HostStep], flights: Sequence[Flight], seconds: float) -> None:
        """Update the rates with the timings of an update."""
        numel = sum(step.numel for step in steps) + sum(flight.numel for flight in flights)
        if not numel or seconds <= 0:
            return
        was_alone = self.cpu_only
        self._unused[HOST_CHAIN] = 0 if steps else self._unused[HOST_CHAIN] + 1
        if not was_alone:
            self._unused[DEVICE_CHAIN] = 0 if flights else self._unused[DEVICE_CHAIN] + 1
        if steps and flights:
            pace = _device_rate(flights) / _host_rate(steps)
            self.pace = math.sqrt(self.pace * pace) if self._is_measured else pace
            self._is_measured = True
        is_held_up = bool(flights) and _is_stalled(steps)
        if not self._by_iteration:
            self.cpu_only = self._ways.next(was_alone, numel / seconds, is_held_up)

    def note_iteration(self, seconds: float) -> str:
        """Judge the last update by its iteration, under policy ``auto``.

        Args:
            seconds: From the beginning of that update to the one that is about to begin.

        Returns:
            Which way was found to be the faster one, in words; empty while that is as before.
        """
        if not self._by_iteration or seconds <= 0:
            return ""
        before = self._ways.best
        self.cpu_only = self._ways.next(self.cpu_only, 1 / seconds, may_try=True)
        if self._ways.best in (None, before):
            return ""
        return CPU_ALONE if self._ways.best else BOTH


def _device_rate(flights: Sequence[Flight]) -> float:
    """Return elements a second of a device that always has the next tile."""
    numel, busy_s, end_s = 0, 0.0, -math.inf
    for flight in flights:
        was_idle = flight.begin_s >= end_s
        numel += (PIPELINE_DEPTH if was_idle else 1) * flight.numel
        busy_s += flight.end_s - (flight.begin_s if was_idle else end_s)
        end_s = flight.end_s
    return numel / max(busy_s, 1e-9)


def _host_rate(steps: Sequence[HostStep]) -> float:
    """Return elements a second of the CPU lane."""
    seconds = sum(step.seconds for step in steps)
    seconds += sum(step.stalled_s for step in steps[FIRST_STEPS:])
    return sum(step.numel for step in steps) / max(seconds, 1e-9)


def _is_stalled(steps: Sequence[HostStep]) -> bool:
    counted = steps[FIRST_STEPS:]
    stalled_s = sum(step.stalled_s for step in counted)
    return stalled_s > STALL_FRACTION * (stalled_s + sum(step.seconds for step in counted))
