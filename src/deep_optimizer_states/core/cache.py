"""Tiles that stay in device memory as long as there is room; their home is always host memory.

A tile is *home* if the device has nothing of it, *clean* if its state there is that at home, and
*dirty* once the device has stepped it there. Clean and dirty tiles have a :class:`Place`, which has
room for master weights, moments and the gradient.

- A tile is fetched into its place by the update that steps it, or during backward. It is stepped in
  place, and its flush is left out. From then on its gradient is kept there too, so that an update
  moves nothing of it.
- Whoever looks at state has dirty tiles flushed, and they stay as clean ones. Whoever writes state
  has them flushed and dropped.
- Homes stay reserved, so that giving memory back takes none. A gradient goes home with its tile.
- What an update was handed is the update's until it ends: its tiles are *claimed*. All else is done
  on the caller's thread.

[Note: how much] A number of bytes is kept to. With "auto" places may stay in the memory that
forward and backward have not needed lately, less a tenth of the device and what they take between
two looks at the memory. There are more from step to step. Somebody else's need shows as free memory
below that margin: then half of the memory is given back, and what is left grows again later, after
twice as many windows as the time before. While backward runs, state may also be prefetched into the
memory that activations leave. What of it may not stay is flushed by the update.

[Note: one thing at a time] The moves wait on the host until homes are whole. They are rare, and
whoever asks for one reads or writes homes next.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deep_optimizer_states.core.device.base import Device, Event, Stamp, Wait
from deep_optimizer_states.core.kernels.adam import AdamTensors
from deep_optimizer_states.core.plan import (
    AHEAD_CHAIN,
    FETCHED_CHAIN,
    RESIDENT_CHAIN,
    SENT_CHAIN,
    Kind,
    Tile,
)
from deep_optimizer_states.core.policies import LONGEST_WAIT, MIN_TILE_FRACTION
from deep_optimizer_states.core.schedule import MOST_UNDER_WAY, Schedule
from deep_optimizer_states.errors import UpdateError

LOOK_S = 0.02
"""Least time between two looks at the memory of a GPU, in seconds: one takes some tenths of a
millisecond, and backward comes past here for every parameter."""
FIRST_WINDOWS = 2
"""Windows that "auto" looks at before it takes anything."""
LATEST_WINDOWS = 8
"""Windows whose need of memory counts."""
GROWTH = 0.1
"""Share by which "auto" takes more in a window once memory was short; before, it doubles."""


@dataclass(frozen=True)
class Types:
    """Types of what a tile's buffers hold; of master weights and moments the widest.

    ``weights`` are those that the model computes with.
    """

    grad: torch.dtype
    weights: torch.dtype
    master: torch.dtype = torch.float32
    moments: torch.dtype = torch.float32

    def of_tile(self, weights_on_host: bool) -> list[torch.dtype]:
        """Return those of a slot or a place: state, gradient and weights that are sent home."""
        own = [self.master, self.moments, self.moments, self.grad]
        return [*own, self.weights] if weights_on_host else own


class Buffers:
    """Buffers of one kind, and the events that say what may be done with them."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors
        self.filled: Event | None = None
        self.stepped: Event | None = None
        self.free: Event | None = None
        self.begin: Stamp | None = None

    def views(self, numel: int) -> list[Tensor]:
        """Return the first elements of each."""
        return [tensor.narrow(0, 0, numel) for tensor in self.tensors]

    def views_like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return room for each of ``tensors`` in its type, perhaps narrower than the buffer's."""
        pairs = zip(self.tensors, tensors, strict=False)
        return [mine.view(like.dtype).narrow(0, 0, like.numel()) for mine, like in pairs]


class Content(enum.Enum):
    """What a place holds of its tile's state."""

    NOTHING = "nothing yet"
    CLEAN = "the same as its home"
    DIRTY = "newer than its home"


class Place(Buffers):
    """Device memory of one tile.

    Attributes:
        content: What it holds of master weights and moments.
        keeps_grad: Whether the gradient is here, and its home is not kept up to date.
        stays: Whether it is there after the update that is about to step it.
        is_claimed: Whether an update has it.
        came_ahead: Whether its state came during backward, since the last update.
    """

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        super().__init__(tensors)
        self.content = Content.NOTHING
        self.keeps_grad = self.stays = self.is_claimed = self.came_ahead = False

    @property
    def nbytes(self) -> int:
        """Device memory that it takes, in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def grad(self) -> Tensor:
        """The tile's gradient, 1-D."""
        return self.tensors[3]

    @property
    def chain(self) -> tuple[Kind, ...]:
        """What an update does to its tile."""
        if not self.stays:
            return AHEAD_CHAIN
        if self.content is Content.NOTHING:
            return FETCHED_CHAIN
        if self.keeps_grad:
            return RESIDENT_CHAIN
        return SENT_CHAIN if self.came_ahead else FETCHED_CHAIN

    def live(self, home: AdamTensors) -> AdamTensors:
        """Return a tile's tensors where the newest of each is, before an update and after it.

        State that is the same at home is read there: what came ahead may still be on its way.
        """
        is_newer = self.stays and self.content is Content.DIRTY
        master, exp_avg, exp_avg_sq = self.views_like(home.state) if is_newer else home.state
        grad = self.grad if self.keeps_grad else home.grad
        return AdamTensors(master, exp_avg, exp_avg_sq, grad, home.weights)


class TileCache:
    """Owns the places of one rank and the rules by which there are more or fewer of them.

    Attributes:
        element_bytes: Device memory of a place, bytes an element.
        before_overwrite: Called with each tile whose state at home is about to be overwritten, by
            whatever thread does it.

    Args:
        schedule: The tiles. Where a fixed policy gives some to the device, only they get a place.
        types: Of their tensors.
        device: Whose memory it is.
        limit: Device memory that places may take, in bytes, or "auto".
        home_of: Gives a tile's tensors where it is at home, see ``AdamTensors``.
    """

    def __init__(
        self,
        schedule: Schedule,
        types: Types,
        device: Device,
        limit: int | str,
        home_of: Callable[[int], AdamTensors],
    ) -> None:
        self.schedule = schedule
        self.types = types
        self.device = device
        self._home_of = home_of
        self._dtypes = types.of_tile(schedule.weights_on_host)
        self.element_bytes = sum(dtype.itemsize for dtype in self._dtypes)
        self._sizes = [tile.numel for tile in schedule.tiles]
        movable = {*range(len(self._sizes))} - schedule.resident_tiles
        largest = max((self._sizes[tile] for tile in movable), default=0)
        least = MIN_TILE_FRACTION * largest
        chosen = schedule.device_tiles or movable
        self._candidates = {tile for tile in chosen if self._sizes[tile] >= least}
        self._budget = Budget(device, limit, self.element_bytes * largest)
        self._places: dict[int, Place] = {}
        self._leaving: dict[int, tuple[Event, int]] = {}
        self._order: Sequence[int] = ()
        self._num_looked_at = 0
        self.before_overwrite: Callable[[int], None] = lambda tile: None

    # What there is.

    @property
    def is_on(self) -> bool:
        """Return whether there may ever be a place."""
        return self._budget.is_on and bool(self._candidates)

    def switch_off(self) -> None:
        """Have no place from now on; there is none yet."""
        self._budget.is_on = False

    def place(self, tile: int) -> Place | None:
        """Return a tile's place, if it has one."""
        return self._places.get(tile)

    @property
    def tiles(self) -> Collection[int]:
        """Tiles that have a place by now."""
        return list(self._places)

    @property
    def taken_bytes(self) -> int:
        """Device memory of all places, and of those that an update is still flushing, in bytes."""
        for tile, (flushed, _) in list(self._leaving.items()):
            if flushed.reached():
                self._leaving.pop(tile, None)
        places = [place.nbytes for place in list(self._places.values())]
        return sum(places) + sum(size for _, size in list(self._leaving.values()))

    def chain_of(self, tile: int) -> tuple[Kind, ...]:
        """Return what an update does to a tile whose place it has claimed; nothing for others."""
        place = self._places.get(tile)
        return place.chain if place is not None and place.is_claimed else ()

    def grads_of(self, run: Tile, home: Tensor) -> list[Tensor]:
        """Return where the gradient of a run of elements is kept, in pieces, each 1-D.

        Args:
            run: Elements of a subgroup.
            home: The subgroup's gradients at home.
        """
        found, done = list[Tensor](), 0
        for number in self.schedule.tiles_of(run):
            tile, place = self.schedule.tiles[number], self.place(number)
            if place is None or not place.keeps_grad:
                continue
            start = max(0, tile.start - run.start)
            end = min(run.numel, tile.start + tile.numel - run.start)
            if start > done:
                found.append(home.narrow(0, run.start + done, start - done))
            found.append(place.grad.narrow(0, run.start + start - tile.start, end - start))
            done = end
        if done < run.numel:
            found.append(home.narrow(0, run.start + done, run.numel - done))
        return found

    # Filling; on the caller's thread.

    def begin_window(self) -> None:
        """Begin a window of micro-batches: the step before it is over."""
        self._budget.next_window(self.taken_bytes)
        self._num_looked_at = 0

    def look(self) -> bool:
        """See how much memory others use; at gathers and where backward comes past.

        Returns:
            Whether they need what places take.
        """
        return self._budget.look(self.taken_bytes) and bool(self._places)

    def send_ahead(self, order: Sequence[int], is_given: Callable[[int], bool]) -> None:
        """Prefetch state of the tiles that are needed first while backward runs.

        Args:
            order: All tiles, those first that are needed first.
            is_given: Whether an update that has begun has a tile already.
        """
        while self._num_looked_at < len(order) and not self._budget.is_paused:
            tile = order[self._num_looked_at]
            if tile in self._candidates and tile not in self._places and not is_given(tile):
                if self._num_under_way >= MOST_UNDER_WAY:
                    return
                if not self._budget.may_take(self.taken_bytes, self._bytes_of(tile)):
                    return
                place = self._take(tile)
                if place is None:
                    return
                self._fetch(tile, place)
            self._num_looked_at += 1

    def grow(self, order: Iterable[int]) -> None:
        """Settle which tiles of the update that is about to begin have a place after it.

        Args:
            order: Its tiles, those first that are needed first.
        """
        passing = {tile: p for tile, p in self._places.items() if not (p.stays or p.is_claimed)}
        staying = sum(place.nbytes for place in self._places.values() if place.stays)
        leaving = sum(place.nbytes for place in passing.values())
        room = self._budget.room(staying, leaving)
        for tile in order:
            if tile not in self._candidates or (tile in self._places and tile not in passing):
                continue
            room -= self._bytes_of(tile)
            if room < 0:
                return
            place = passing.get(tile) or self._take(tile)
            if place is None:
                return
            place.stays = True

    def _bytes_of(self, tile: int) -> int:
        return self.element_bytes * self._sizes[tile]

    @property
    def _num_under_way(self) -> int:
        places = list(self._places.values())
        return sum(bool(it.came_ahead and it.filled and not it.filled.reached()) for it in places)

    def _take(self, tile: int) -> Place | None:
        try:
            tensors = [self.device.empty_device(self._sizes[tile], of) for of in self._dtypes]
        except torch.OutOfMemoryError:
            self.give_back(self._budget.was_short(self.taken_bytes))
            return None
        # The allocator may hand out memory that work of the caller's stream still uses.
        self.device.h2d.wait(self.device.record_caller(), Wait.MEMORY_IDLE)
        place = self._places[tile] = Place(tuple(tensors))
        return place

    def _fetch(self, tile: int, place: Place) -> None:
        lane, home = self.device.h2d, self._home_of(tile).state
        targets = place.views_like(home)
        lane.submit(f"state of tile {tile} ahead", lambda: copy_all(targets, home), place.tensors)
        place.filled = lane.record()
        place.content, place.came_ahead = Content.CLEAN, True

    # While an update runs.

    def claim(self, tile: int) -> Place | None:
        """Give a tile's place, if it has one, to an update; on the caller's thread."""
        place = self._places.get(tile)
        if place is not None:
            place.is_claimed = True
        return place

    def leave(self, tile: int, flushed: Event) -> None:
        """Note on the update's thread that a tile's place is free once ``flushed`` is reached."""
        place = self._places.pop(tile)
        self._leaving[tile] = flushed, place.nbytes
        place.tensors = ()

    def end_update(self) -> None:
        """Note on the update's thread that the lanes are idle and all state is in its place."""
        for place in list(self._places.values()):
            place.is_claimed = place.came_ahead = False

    # Emptying; on the caller's thread, of tiles that no update has.

    def flush(self, tiles: Iterable[int] | None = None) -> None:
        """Bring state at home up to date; the tiles stay.

        Args:
            tiles: Which; None for all.

        Raises:
            UpdateError: A lane failed or did not end in time.
        """
        mine = self._free_tiles(tiles)
        dirty = [tile for tile in mine if self._places[tile].content is Content.DIRTY]
        for tile in dirty:
            self.before_overwrite(tile)
            home = self._home_of(tile).state
            self._send_home(tile, "state", self._places[tile].views_like(home), home)
        if dirty:
            self.device.host_waits(self.device.d2h.record(), Wait.HOME_WHOLE)
        for tile in dirty:
            self._places[tile].content = Content.CLEAN

    def copy_grads_home(self, tiles: Iterable[int] | None = None) -> None:
        """Bring gradients at home up to date, of tiles that an update has as well.

        Args:
            tiles: Which; None for all.

        Raises:
            UpdateError: A lane failed or did not end in time.
        """
        lane, found = self.device.d2h, list(self._places) if tiles is None else tiles
        kept = [tile for tile in found if (it := self.place(tile)) is not None and it.keeps_grad]
        if not kept:
            return
        # Where a flush has failed, this lane is not to fail with it.
        self.device.host_waits(self.device.grads.record(), Wait.GRADS_FLUSHED)
        for tile in kept:
            place = self._places[tile]
            assert place.filled is not None, tile
            lane.wait(place.filled, Wait.PREFETCHED)  # by an update that may be in flight
            self._send_home(tile, "gradient", [place.grad], [self._home_of(tile).grad])
        self.device.host_waits(lane.record(), Wait.HOME_WHOLE)

    def bring_grads_home(self, tiles: Iterable[int] | None = None) -> None:
        """Bring gradients home, where they are kept until the next update; None for all tiles.

        Raises:
            UpdateError: A lane failed or did not end in time.
        """
        mine = self._free_tiles(tiles)
        self.copy_grads_home(mine)
        for tile in mine:
            self._places[tile].keeps_grad = False

    def _send_home(
        self, tile: int, what: str, sources: Sequence[Tensor], home: Sequence[Tensor]
    ) -> None:
        self.device.d2h.submit(f"{what} of tile {tile} home", lambda: copy_all(home, sources))

    def release(self, tiles: Iterable[int] | None = None) -> None:
        """Bring tiles home and give their memory back; None for all.

        Raises:
            UpdateError: A lane failed or did not end in time.
        """
        mine = self._free_tiles(tiles)
        self.flush(mine)
        self.copy_grads_home(mine)
        for tile in mine:
            self._drop(tile)
        if mine:  # whoever needs the memory is next
            self.device.host_waits(self.device.d2h.record(), Wait.HOME_WHOLE)

    def drop_passing(self) -> None:
        """Give back the memory of state that came ahead and may not stay."""
        for tile in self._free_tiles(None):
            if not self._places[tile].stays:
                self._drop(tile)

    def give_back(self, keep_bytes: int) -> None:
        """Give memory back until places take no more than ``keep_bytes``, if no update has them."""
        self.drop_passing()
        excess, mine = self.taken_bytes - keep_bytes, list[int]()
        # What came last is needed last by the next forward.
        for tile in reversed(self._free_tiles(None)):
            if excess <= 0:
                break
            excess -= self._places[tile].nbytes
            mine.append(tile)
        self.release(mine)

    def relieve(self) -> None:
        """Give half of the memory back, since others need it."""
        self.give_back(self._budget.was_short(self.taken_bytes))

    def run_out(self) -> int:
        """Give everything back, since an allocation of somebody else's has failed.

        Returns:
            The bytes that were taken.
        """
        taken = self.taken_bytes
        self._budget.was_short(0)
        self.release()
        return taken

    def reset(self) -> None:
        """Forget all state after an update that failed. The lanes work again.

        Gradients go home, which a later update may go by again.
        """
        for tile, place in list(self._places.items()):
            assert place.filled is not None or not place.keeps_grad, tile
            with contextlib.suppress(UpdateError):  # it never left its home
                if place.keeps_grad and place.filled is not None:
                    place.filled.synchronize()
                    self._home_of(tile).grad.copy_(place.grad)
        self.close()

    def close(self) -> None:
        """Forget every place. No update runs."""
        self._places.clear()
        self._leaving.clear()

    def _free_tiles(self, tiles: Iterable[int] | None) -> list[int]:
        found = list(self._places) if tiles is None else [t for t in tiles if t in self._places]
        return [tile for tile in found if not self._places[tile].is_claimed]

    def _drop(self, tile: int) -> None:
        place = self._places.pop(tile)
        self.device.release_slot(place.tensors)
        place.tensors = ()


class Budget:
    """How much device memory places may take, see [Note: how much].

    Args:
        device: Whose memory it is.
        limit: Bytes, or "auto".
        tile_bytes: What the largest tile takes.
    """

    def __init__(self, device: Device, limit: int | str, tile_bytes: int) -> None:
        self._device = device
        self._learns = limit == "auto"
        self._limit = 0.0 if self._learns else float(limit)
        self.is_on = device.tells_memory if self._learns else bool(limit)
        self._tile_bytes = tile_bytes
        self._looked_s = -math.inf
        self._highest = self._others = 0
        self._peaks: collections.deque[int] = collections.deque(maxlen=LATEST_WINDOWS)
        self._num_windows = self._pause = 0
        self._patience = 0

    @property
    def is_paused(self) -> bool:
        """Return whether nothing more is taken for a while, since memory was short."""
        return not self.is_on or self._pause > 0

    def look(self, taken: int) -> bool:
        """See how much memory others use, where the last look is some time ago.

        Args:
            taken: Bytes that are ours.

        Returns:
            Whether the margin is touched.
        """
        now_s = time.perf_counter()
        if not (self._learns and self.is_on) or now_s - self._looked_s < LOOK_S:
            return False
        self._looked_s = now_s
        now, _ = self._device.peak_bytes()
        self._highest = max(self._highest, now)
        self._others = max(self._others, now - taken)
        return self._device.free_bytes() < 0

    def may_take(self, taken: int, more: int) -> bool:
        """Return whether ``more`` bytes may be taken for a while beside those that are."""
        if self.is_paused or taken + more > self._limit:
            return False
        return not self._learns or self._device.free_bytes() - self._between >= more

    def room(self, staying: int, leaving: int) -> float:
        """Return the bytes that may be taken for good, or less than 0.

        Args:
            staying: Bytes of places that stay.
            leaving: Bytes of places that do not.
        """
        if self.is_paused:
            return -1.0
        room = self._limit - staying
        if not self._learns:
            return room
        now, _ = self._device.peak_bytes()
        need = max(*self._peaks, self._others) + self._between if self._peaks else math.inf
        rise = max(0.0, need - (now - staying - leaving))
        return min(room, self._device.free_bytes() + leaving - rise)

    @property
    def _between(self) -> int:
        """Bytes that are taken and given back between two looks."""
        return max(0, self._device.peak_bytes()[1] - self._highest)

    def was_short(self, taken: int) -> int:
        """Note that memory ran out; return the bytes that may be kept."""
        self._patience = min(max(1, 2 * self._patience), LONGEST_WAIT)
        self._pause = self._patience
        if self._learns:
            self._limit = taken // 2
        return taken // 2

    def next_window(self, taken: int) -> None:
        """Begin a window of micro-batches; ``taken`` bytes are ours."""
        self._num_windows += 1
        self._peaks.append(self._others)
        self._others = 0
        if self._pause:
            self._pause -= 1
        elif self._learns and self._num_windows >= FIRST_WINDOWS:
            growth = GROWTH if self._patience else 1.0
            self._limit = taken + max(growth * taken, self._tile_bytes)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensor by tensor, without blocking where the device can."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
