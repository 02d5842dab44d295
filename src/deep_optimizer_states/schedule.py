"""Which tiles go where: a policy applied to one rank's subgroups. Needs no torch."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from deep_optimizer_states.plan import (
    DEVICE_CHAIN,
    HOST_CHAIN,
    RESIDENT_CHAIN,
    WITH_WEIGHTS_ON_HOST,
    Action,
    Tile,
    choose_device_subgroups,
    choose_resident_subgroups,
    cut_into_tiles,
)
from deep_optimizer_states.split import TINY, Chains, Share

NUM_AHEAD = 16
"""Tiles that the device may have in flight under a fixed policy. A CUDA stream takes about a
thousand entries before it blocks whoever adds to it, which is the CPU lane's own thread, and a tile
is six or seven entries of a lane."""


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
        apart: Iterable[Tile] = (),
    ) -> Schedule:
        """Apply a policy.

        Args:
            numels: Elements of each subgroup of this rank.
            policy: ``all-host``, ``ratio``, ``stride``, ``all-device`` or ``dynamic``.
            stride: For ``stride``.
            ratio: Share of the state in host memory, from 0 to 1; the rest is resident.
            tile_numel: Largest tile.
            apart: Runs of elements that get tiles of their own.

        Raises:
            PlanError: A value is out of range.
        """
        tiles = cut_into_tiles(numels, tile_numel, apart)
        resident = choose_resident_subgroups(numels, ratio)
        dynamic = policy == "dynamic"
        fixed = "all-host" if dynamic else policy
        chosen = choose_device_subgroups(len(numels), fixed, stride) - resident
        movable = [tile.numel for tile in tiles if tile.subgroup not in resident]
        # What lies below costs the device a launch each and the CPU next to nothing.
        least = TINY * max(movable, default=0)
        through_slots = {
            idx for idx, tile in enumerate(tiles) if tile.subgroup in chosen and tile.numel >= least
        }
        return cls(tiles, resident, frozenset(through_slots), dynamic)

    @property
    def resident_tiles(self) -> frozenset[int]:
        """Tiles of resident subgroups."""
        return frozenset(
            idx for idx, tile in enumerate(self.tiles) if tile.subgroup in self.resident_subgroups
        )

    @property
    def slot_subgroups(self) -> list[int]:
        """Subgroups of which tiles may pass through a slot, in order."""
        candidates = self._movable_tiles if self.dynamic else self.device_tiles
        return sorted({self.tiles[idx].subgroup for idx in candidates})

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
        """Tiles that hold any of a run of elements."""
        first = bisect.bisect_right(self.tiles, (run.subgroup, run.start), key=_place) - 1
        end = bisect.bisect_left(self.tiles, (run.subgroup, run.start + run.numel), key=_place)
        return range(first, end) if run.numel else range(0)

    def order_of_use(self, runs: Iterable[Tile]) -> tuple[int, ...]:
        """All tiles, those first that are needed first.

        Args:
            runs: Elements in the order in which they are used; tiles without any come last.
        """
        used = dict.fromkeys(tile for run in runs for tile in self.tiles_of(run))
        return (*used, *(tile for tile in range(len(self.tiles)) if tile not in used))

    def actions(
        self,
        host_subgroups: frozenset[int],
        share: Share,
        has_room: Callable[[bool], bool],
        order: Sequence[int] | None = None,
    ) -> Iterator[Action]:
        """The actions of one step, in issue order.

        Everything for the device is issued as early as it has room: issuing takes no time, and its
        lanes order themselves by events. The CPU's steps run while the device works::

            H2D  |-1-|-3-|        |-5-|
            GPU      |1|  |3|          |5|
            D2H         |-1-| |-3-|       |-5-|
            CPU  |---0---|---2---|---4---|
            WTS          |0|     |2|     |4|

        Where weights live in host memory, WTS is missing and every GPU step is followed by a D2H.

        Args:
            host_subgroups: Subgroups that must be stepped where they live in this step.
            share: Splits tiles between device and CPU as they run; asked by the dynamic policy.
            has_room: Whether the device takes one more tile now; told to wait until it does where
                nothing else is left to do.
            order: All tiles, those first that are needed first; as they are numbered if None.
        """
        for tile, chain in self._chains(host_subgroups, share, has_room, order):
            kinds = WITH_WEIGHTS_ON_HOST[chain] if self.weights_on_host else chain
            yield from (Action(tile, kind) for kind in kinds)

    def _chains(
        self,
        host_subgroups: frozenset[int],
        share: Share,
        has_room: Callable[[bool], bool],
        order: Sequence[int] | None,
    ) -> Chains:
        """Tiles in issue order, each with its chain as if weights lived on the device."""
        forced = {idx for idx, tile in enumerate(self.tiles) if tile.subgroup in host_subgroups}
        resident = self.resident_tiles
        ordered = range(len(self.tiles)) if order is None else order
        for tile in filter(resident.__contains__, ordered):
            yield tile, RESIDENT_CHAIN
        if self.dynamic:
            for tile in filter((forced - resident).__contains__, ordered):
                yield tile, HOST_CHAIN
            movable = [tile for tile in ordered if tile not in forced | resident]
            yield from share(movable, [tile.numel for tile in self.tiles])
        else:
            device = self.device_tiles - forced - resident
            movable = [tile for tile in ordered if tile not in resident]
            yield from _take_turns(movable, device, has_room)


def _take_turns(
    tiles: Sequence[int], device: Collection[int], has_room: Callable[[bool], bool]
) -> Chains:
    """Tiles of a fixed policy: the device's while it has room, between the CPU's."""
    through_slots = deque(tile for tile in tiles if tile in device)
    for tile in tiles:
        while through_slots and has_room(False):
            yield through_slots.popleft(), DEVICE_CHAIN
        if tile not in device:
            yield tile, HOST_CHAIN
    while through_slots:
        has_room(True)
        yield through_slots.popleft(), DEVICE_CHAIN


def _place(tile: Tile) -> tuple[int, int]:
    return tile.subgroup, tile.start
