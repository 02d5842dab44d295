"""The update phase as data: which lane does what to which tile, in issue order.

Needs neither torch nor DeepSpeed. A *tile* is a run of elements of one subgroup: Adam works element
by element, so subgroups, which DeepSpeed makes uneven, are cut into tiles of bounded size without
touching how state is stored or saved. A plan has a text form, so that a schedule can be read,
compared and reviewed::

    0GPU 2H2D 2GPU 2D2H 1CPU 1WTS 3CPU 3WTS

The state of tile 0 lives on the device and is stepped there. Tile 2 goes to the device and back
(prefetch of its state, step, flush of its state). Tiles 1 and 3 are stepped on the CPU and their
16-bit weights sent after. Where 16-bit weights live in host memory, the same is::

    0GPU 0D2H 2H2D 2GPU 2D2H 1CPU 3CPU

A tile whose state is to stay on the device is fetched and not flushed: ``4H2D 4GPU``, and ``4GPU``
alone in later updates.

What runs before the gradients' norm is known stands before a bar. Here backward steps tile 3 and
prefetches master weights and moments of tile 0 into memory of its own (AHD), of which the gradient
alone is left to be fetched::

    3CPU 3WTS 0AHD | 0H2D 0GPU 0D2H 1CPU 1WTS 2CPU 2WTS
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deep_optimizer_states.errors import PlanError

BAR = "|"
"""Stands between what runs before the norm is known and what runs after it."""
TILE_ALIGNMENT = 16
"""Tiles begin at multiples of this: a full vector of DeepSpeed's kernel never spans two tiles."""


class Kind(enum.StrEnum):
    """Kinds of work."""

    AHEAD = "AHD"
    """Copy master weights and moments to the device while backward runs, into memory of the tile's
    own."""
    PREFETCH = "H2D"
    """Copy master weights, moments and gradient into a device slot or memory of the tile's own, or
    what of them is not there yet."""
    DEVICE_STEP = "GPU"
    """Adam on the device; writes the tile's 16-bit weights there, to stay or to be sent back."""
    STATE_FLUSH = "D2H"
    """Copy master weights and moments back to host memory; frees the slot. Where 16-bit weights
    live in host memory too, they go there first."""
    HOST_STEP = "CPU"
    """Adam in host memory; writes 16-bit weights into a staging buffer, or to where they live."""
    WEIGHTS = "WTS"
    """Send the staged 16-bit weights to the device."""


DEVICE_CHAIN = (Kind.PREFETCH, Kind.DEVICE_STEP, Kind.STATE_FLUSH)
AHEAD_CHAIN = (Kind.AHEAD, *DEVICE_CHAIN)
FETCHED_CHAIN = (Kind.PREFETCH, Kind.DEVICE_STEP)
"""Of a tile whose state stays on the device from then on, or is there without its gradient."""
SENT_CHAIN = (Kind.AHEAD, *FETCHED_CHAIN)
HOST_CHAIN = (Kind.HOST_STEP, Kind.WEIGHTS)
RESIDENT_CHAIN = (Kind.DEVICE_STEP,)
WITH_WEIGHTS_ON_HOST = {
    DEVICE_CHAIN: DEVICE_CHAIN,
    AHEAD_CHAIN: AHEAD_CHAIN,
    FETCHED_CHAIN: DEVICE_CHAIN,
    SENT_CHAIN: AHEAD_CHAIN,
    HOST_CHAIN: (Kind.HOST_STEP,),
    RESIDENT_CHAIN: (Kind.DEVICE_STEP, Kind.STATE_FLUSH),
}
"""Chain -> the chain where 16-bit weights live in host memory (``offload_param``): the CPU
writes them where they live, and the device sends its own back."""


@dataclass(frozen=True)
class Tile:
    """Elements ``start`` to ``start + numel`` of one subgroup."""

    subgroup: int
    start: int
    numel: int


@dataclass(frozen=True)
class Action:
    """One piece of work on one tile."""

    tile: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.tile}{self.kind.value}"


@dataclass(frozen=True)
class Plan:
    """Actions in issue order; those of one lane run in that order.

    Args:
        num_tiles: Tiles this rank owns.
        actions: The work, in issue order.
        before_norm: How many of them were issued before the gradients' norm was known.

    Raises:
        PlanError: A tile is stepped never or twice, its chain is incomplete or out of order, an
            action names a tile that is not there, state is prefetched ahead of a norm that is known
            already, or chains of both homes of the 16-bit weights, device and host memory, are
            mixed.
    """

    num_tiles: int
    actions: tuple[Action, ...]
    before_norm: int = 0

    def __post_init__(self) -> None:
        chains: dict[int, list[Kind]] = {idx: [] for idx in range(self.num_tiles)}
        for action in self.actions:
            if action.tile not in chains:
                raise PlanError(f"{action}: there are only {self.num_tiles} tiles")
            chains[action.tile].append(action.kind)
        for action in self.actions[self.before_norm :]:
            if action.kind is Kind.AHEAD:
                raise PlanError(f"{action}: it runs before the norm is known; put it before the |")
        # An update sends no tile's weights to the device, or those of all that the CPU steps.
        on_host = (Kind.HOST_STEP,) in map(tuple, chains.values())
        on_host |= WITH_WEIGHTS_ON_HOST[RESIDENT_CHAIN] in map(tuple, chains.values())
        allowed = WITH_WEIGHTS_ON_HOST.values() if on_host else WITH_WEIGHTS_ON_HOST.keys()
        for tile, kinds in chains.items():
            if tuple(kinds) not in allowed:
                got = " ".join(f"{tile}{kind.value}" for kind in kinds) or "nothing"
                raise PlanError(
                    f"tile {tile} gets '{got}': every tile needs H2D GPU D2H, H2D GPU, CPU WTS or "
                    "GPU alone, once and in that order; or, where 16-bit weights live in host "
                    "memory, H2D GPU D2H, CPU alone or GPU D2H. AHD may stand before H2D"
                )

    @property
    def device_tiles(self) -> tuple[int, ...]:
        """Tiles of which something is fetched to the device, in that order."""
        return tuple(a.tile for a in self.actions if a.kind is Kind.PREFETCH)

    @property
    def host_tiles(self) -> tuple[int, ...]:
        """Tiles stepped on the CPU, in that order."""
        return tuple(a.tile for a in self.actions if a.kind is Kind.HOST_STEP)

    @property
    def resident_tiles(self) -> tuple[int, ...]:
        """Tiles whose state and gradient are on the device already."""
        through_slots = set(self.device_tiles)
        return tuple(
            a.tile
            for a in self.actions
            if a.kind is Kind.DEVICE_STEP and a.tile not in through_slots
        )

    def __str__(self) -> str:
        words = list(map(str, self.actions))
        if self.before_norm:
            words.insert(self.before_norm, BAR)
        return " ".join(words)


def cut_into_tiles(
    numels: Sequence[int], tile_numel: int, separate: Iterable[Tile] = ()
) -> tuple[Tile, ...]:
    """Cut every subgroup into tiles of at most ``tile_numel`` elements, in order.

    Args:
        numels: Elements of each subgroup; an empty one gets no tile.
        tile_numel: Largest tile, a positive multiple of ``TILE_ALIGNMENT``.
        separate: Ranges of elements that are needed at another time than their neighbours: they get
            tiles of their own, widened to the alignment.

    Raises:
        PlanError: ``tile_numel`` is not such a multiple.
    """
    if tile_numel < TILE_ALIGNMENT or tile_numel % TILE_ALIGNMENT:
        raise PlanError(f"tile_numel {tile_numel} must be a positive multiple of {TILE_ALIGNMENT}")
    borders = [{0, numel} for numel in numels]
    for part in separate:
        end = -(-(part.start + part.numel) // TILE_ALIGNMENT) * TILE_ALIGNMENT
        start = part.start - part.start % TILE_ALIGNMENT
        borders[part.subgroup] |= {start, min(end, numels[part.subgroup])}
    return tuple(
        Tile(subgroup, start, min(tile_numel, end - start))
        for subgroup, cuts in enumerate(borders)
        for begin, end in itertools.pairwise(sorted(cuts))
        for start in range(begin, end, tile_numel)
    )


def cut_flat_state(numel: int, subgroup_numel: int) -> list[tuple[int, int]]:
    """Cut one flat tensor into subgroups, where the optimizer itself has none.

    Args:
        numel: Its elements.
        subgroup_numel: Elements of a subgroup; rounded down to ``TILE_ALIGNMENT``, at least that.

    Returns:
        First element and number of each, in order.
    """
    length = max(TILE_ALIGNMENT, subgroup_numel - subgroup_numel % TILE_ALIGNMENT)
    return [(start, min(length, numel - start)) for start in range(0, numel, length)]


def choose_resident_subgroups(numels: Sequence[int], ratio: float) -> frozenset[int]:
    """Return the leading subgroups whose state stays on the device.

    Args:
        numels: Elements of each subgroup.
        ratio: Share of the optimizer state in host memory, from 0 to 1; the resident subgroups are
            as many of the first as fit into the rest.

    Raises:
        PlanError: ``ratio`` is not between 0 and 1.
    """
    if not 0.0 <= ratio <= 1.0:
        raise PlanError(f"ratio {ratio} must be between 0 and 1")
    room = (1.0 - ratio) * sum(numels) + 0.5  # half an element: rounding must not cost a subgroup
    chosen = set()
    for subgroup, numel in enumerate(numels):
        room -= numel
        if room < 0:
            break
        chosen.add(subgroup)
    return frozenset(chosen)


def subgroup_offsets(numels: Sequence[int]) -> list[int]:
    """Return where each subgroup begins in a flat buffer that holds them all."""
    offsets = [0]
    for numel in numels:
        offsets.append(offsets[-1] + numel)
    return offsets[:-1]
