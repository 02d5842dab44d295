"""A policy applied to the subgroups of one rank: its tiles, and their order. Needs no torch.

[Note: arrivals] ``step()`` hands over all tiles at once. An update that begins before it gets those
that backward is done with, as they come. What has arrived is issued in the order in which the next
forward needs it, which is not the order of arrival: backward ends with the first layers last.
"""

from __future__ import annotations

import bisect
import functools
import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from deep_optimizer_states.core.plan import (
    AHEAD_CHAIN,
    DEVICE_CHAIN,
    FETCHED_CHAIN,
    HOST_CHAIN,
    RESIDENT_CHAIN,
    SENT_CHAIN,
    WITH_WEIGHTS_ON_HOST,
    Action,
    Kind,
    Tile,
    choose_resident_subgroups,
    cut_into_tiles,
)
from deep_optimizer_states.core.policies import MIN_TILE_FRACTION, SHARED, SplitFn, takes

NUM_SLOTS = 3
"""Tiles that have a place on the device at once, see [Note: slots] in ``executor``."""
NUM_STAGING_BUFFERS = 4
"""Tiles of the CPU whose 16-bit weights are on their way, see [Note: staging] in ``executor``."""
NUM_OUTBOXES = 2
"""Resident tiles whose 16-bit weights are on their way to host memory at once."""
MAX_SEPARATE_SHARE = 1 / 8
"""Share of a rank's elements above which persistent parameters get no tiles of their own."""
NUM_AHEAD = 2 * NUM_SLOTS
"""Tiles that the device may have in flight under a fixed policy: twice its slots, so that it does
not run dry while the CPU steps a tile. What is issued goes before the CPU's weights on the link."""
MOST_UNDER_WAY = 4
"""Tiles on their way to the device ahead of an update at one time: enough that the link has the
next one when a hook of backward comes late, and few enough that ``step()`` waits for few."""
Chains = Iterator[tuple[int, tuple[Kind, ...]]]
"""Tiles, each with its chain of actions."""


class Arrivals(Protocol):
    """Tiles that an update may step by now, see [Note: arrivals]."""

    @property
    def order(self) -> Sequence[int]:
        """All tiles, those first that are needed first."""

    @property
    def host_tiles(self) -> Collection[int]:
        """Tiles that must be stepped where their state lives; complete once all have arrived."""

    def chain_of(self, tile: int) -> tuple[Kind, ...]:
        """Return the chain of a tile that has device memory of its own; nothing for others."""

    def take(self, wait: bool) -> Iterable[int]:
        """Return those that have arrived since the last call.

        Args:
            wait: Block until there is one; none then means that all have arrived.
        """


@dataclass
class AllAtOnce:
    """Tiles of an update that begins when all may be stepped."""

    order: Sequence[int]
    host_tiles: Collection[int] = frozenset()
    chain_of: Callable[[int], tuple[Kind, ...]] = lambda tile: ()
    has_come: bool = False

    def take(self, wait: bool) -> Iterable[int]:
        """Return all of them, once."""
        came, self.has_come = () if self.has_come else self.order, True
        return came


@dataclass(frozen=True)
class Schedule:
    """One rank's tiles and where each may be updated.

    Attributes:
        tiles: Every tile, subgroup by subgroup.
        resident_subgroups: Subgroups whose state lives on the device.
        device_tiles: Tiles that a fixed policy sends through a slot.
        dynamic: Whether the split between device and CPU is found while they run.
        weights_on_host: Whether 16-bit weights live in host memory, and not on the device.
    """

    tiles: tuple[Tile, ...]
    resident_subgroups: frozenset[int]
    device_tiles: frozenset[int]
    dynamic: bool
    weights_on_host: bool = False

    @classmethod
    def make(
        cls,
        numels: Sequence[int],
        policy: str,
        stride: int,
        ratio: float,
        tile_numel: int,
        separate: Iterable[Tile] = (),
    ) -> Schedule:
        """Apply a policy.

        Args:
            numels: Elements of each subgroup of this rank.
            policy: One of ``POLICIES``.
            stride: For ``stride``.
            ratio: Share of the state in host memory, from 0 to 1; the rest is resident.
            tile_numel: Largest tile.
            separate: Ranges of elements that get tiles of their own.

        Raises:
            PlanError: A value is out of range.
        """
        tiles = cut_into_tiles(numels, tile_numel, separate)
        resident = choose_resident_subgroups(numels, ratio)
        is_taken = takes(policy, stride)
        movable = [tile.numel for tile in tiles if tile.subgroup not in resident]
        # What lies below costs the device a launch each and the CPU next to nothing.
        least = MIN_TILE_FRACTION * max(movable, default=0)
        through_slots = {
            idx
            for idx, tile in enumerate(tiles)
            if tile.subgroup not in resident and is_taken(tile.subgroup) and tile.numel >= least
        }
        return cls(tiles, resident, frozenset(through_slots), policy in SHARED)

    @property
    def resident_tiles(self) -> frozenset[int]:
        """Tiles of resident subgroups."""
        return frozenset(
            idx for idx, tile in enumerate(self.tiles) if tile.subgroup in self.resident_subgroups
        )

    @property
    def slot_numel(self) -> int:
        """Largest tile that may pass through a slot, in elements; 0 when none does."""
        candidates = self._movable_tiles if self.dynamic else self.device_tiles
        return max((self.tiles[idx].numel for idx in candidates), default=0)

    @property
    def staging_numel(self) -> int:
        """Largest tile of which the CPU stages 16-bit weights, in elements; 0 when it stages none.

        Where weights live in host memory, the CPU writes them there itself.
        """
        if self.weights_on_host:
            return 0
        return max((self.tiles[idx].numel for idx in self._movable_tiles), default=0)

    @property
    def staged_numel(self) -> int:
        """Elements of all staging buffers together."""
        return NUM_STAGING_BUFFERS * self.staging_numel

    @property
    def outbox_numel(self) -> int:
        """Largest resident tile whose 16-bit weights are sent to host memory; 0 for none."""
        if not self.weights_on_host:
            return 0
        return max((self.tiles[idx].numel for idx in self.resident_tiles), default=0)

    @property
    def _movable_tiles(self) -> list[int]:
        resident = self.resident_tiles
        return [idx for idx in range(len(self.tiles)) if idx not in resident]

    def tiles_of(self, run: Tile) -> range:
        """Return the tiles that hold any of a run of elements."""
        first = bisect.bisect_right(self.tiles, (run.subgroup, run.start), key=_place) - 1
        end = bisect.bisect_left(self.tiles, (run.subgroup, run.start + run.numel), key=_place)
        return range(first, end) if run.numel else range(0)

    def order_of_use(self, runs: Iterable[Tile]) -> tuple[int, ...]:
        """Return all tiles, those first that are needed first.

        Args:
            runs: Elements in the order in which they are used; tiles without any come last.
        """
        used = dict.fromkeys(tile for run in runs for tile in self.tiles_of(run))
        return (*used, *(tile for tile in range(len(self.tiles)) if tile not in used))

    def tiles_of_subgroups(self, subgroups: Collection[int]) -> frozenset[int]:
        """Return all tiles of some subgroups."""
        tiles = enumerate(self.tiles)
        return frozenset(number for number, tile in tiles if tile.subgroup in subgroups)

    def actions(
        self, arrivals: Arrivals, share: SplitFn, has_room: Callable[[bool], bool]
    ) -> Iterator[Action]:
        """Yield the actions of one step, in issue order.

        Everything for the device is issued as early as it has room: issuing takes no time, and its
        lanes order themselves by events. The CPU's steps run while the device works::

            H2D  |-1-|-3-|        |-5-|
            GPU      |1|  |3|          |5|
            D2H         |-1-| |-3-|       |-5-|
            CPU  |---0---|---2---|---4---|
            WTS          |0|     |2|     |4|

        Where weights live in host memory, WTS is missing and every GPU step is followed by a D2H.

        Args:
            arrivals: Which tiles may be stepped. Those that have memory on the device are the
                device's, whatever the policy.
            share: Splits tiles between device and CPU as they run; asked by the dynamic policy.
            has_room: Whether the device takes one more tile now; told to wait until it does where
                nothing else is left to do.
        """
        for tile, chain in self._chains(arrivals, share, has_room):
            kinds = WITH_WEIGHTS_ON_HOST[chain] if self.weights_on_host else chain
            # What is ahead was sent there before.
            yield from (Action(tile, kind) for kind in kinds if kind is not Kind.AHEAD)

    def _chains(
        self, arrivals: Arrivals, share: SplitFn, has_room: Callable[[bool], bool]
    ) -> Chains:
        """Yield tiles in issue order, each with its chain as if weights lived on the device."""
        settled = functools.partial(self._settled, arrivals, self.resident_tiles)
        shared = [tile for tile in arrivals.order if not settled(tile)]
        numels = [tile.numel for tile in self.tiles]
        choose = share(shared, numels) if self.dynamic else _none
        places = {tile: place for place, tile in enumerate(arrivals.order)}
        # The first number of an entry is its urgency: what is on the device waits for no slot.
        for_device: list[tuple[int, int]] = []
        others: list[tuple[int, int, int]] = []
        while True:
            for tile in arrivals.take(wait=not for_device and not others):
                chain = settled(tile)
                if chain in (DEVICE_CHAIN, FETCHED_CHAIN):
                    heapq.heappush(for_device, (places[tile], tile))
                else:
                    is_there = chain in (RESIDENT_CHAIN, AHEAD_CHAIN, SENT_CHAIN)
                    urgency = 0 if is_there else 1 if self.dynamic and chain else 2
                    heapq.heappush(others, (urgency, places[tile], tile))
            if not for_device and not others:
                return
            if for_device and not (others and not others[0][0]) and has_room(not others):
                *_, tile = heapq.heappop(for_device)
            else:
                *_, tile = heapq.heappop(others)
            # Asked of tiles that turn out to be settled too, since it counts what is left.
            chosen = choose(tile)
            yield tile, settled(tile) or chosen

    def _settled(
        self, arrivals: Arrivals, resident: Collection[int], tile: int
    ) -> tuple[Kind, ...]:
        """Return the chain of a tile; none where it is found while it runs."""
        if tile in resident:
            return RESIDENT_CHAIN
        if tile in arrivals.host_tiles:
            return HOST_CHAIN
        if chain := arrivals.chain_of(tile):
            return chain
        if self.dynamic:
            return ()
        return DEVICE_CHAIN if tile in self.device_tiles else HOST_CHAIN


def separate_ranges(persistent: Sequence[Tile], numel: int) -> Sequence[Tile]:
    """Return the ranges that get tiles of their own: what ``step()`` itself waits for.

    Args:
        persistent: This rank's slices of the parameters that ``step()`` gathers.
        numel: Elements of this rank's parameters.
    """
    few = sum(tile.numel for tile in persistent) <= MAX_SEPARATE_SHARE * numel
    return persistent if few else ()


def _none(_tile: int) -> tuple[Kind, ...]:
    return ()


def _place(tile: Tile) -> tuple[int, int]:
    return tile.subgroup, tile.start
