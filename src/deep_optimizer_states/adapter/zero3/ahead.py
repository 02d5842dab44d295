"""Work of an update before ``step()``: whole tiles, or the way of their state to the device.

The global norm is a barrier: until it is known no gradient can be clipped, and an overflow would
skip the step. Two things need not wait for it.

*Steps before the norm* (``step_before_norm``): without clipping and loss scale the norm changes
nothing. A tile is handed to the update once the gradients of all its parameters are final and their
weights are released. What is stepped cannot be undone. So whatever would make ``step()`` do
something else (a gradient that is not finite, a changed learning rate, a second backward) is an
error that stays until a checkpoint is loaded.

*State ahead* (``prefetch_memory_bytes``): master weights and moments do not depend on gradients.
While backward runs they are sent into memory that its activations leave, what the next forward
needs first at the front, and those tiles are stepped on the device. What was sent is a copy: it is
dropped whenever state might be written, memory is short, or another forward comes first.

[Note: several gradients] Autograd adds up what all uses of a parameter contribute, so that a
backward yields one gradient for each parameter. There are two exceptions. Reentrant checkpointing
runs a backward of its own for every segment, and DeepSpeed reduces the gradients of a leaf module
after each use of the module. If a parameter gets several gradients, stock goes by the last of them
in the first micro-batch of a window, and by their sum in the others. Nobody knows of a gradient
whether it is the last one. So a parameter that may get several in this backward is left to
``step()``. The forward before it shows which ones these are: it runs such a segment without a
graph, and it uses the parameter more than once.

[Note: one stream] Gradients are flushed on DeepSpeed's own stream, while weights are read and
memory is taken on the stream of backward. So neither of both is done where gradients are flushed,
but after DeepSpeed's hook has returned to backward's stream.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils import z3_leaf_module

from deep_optimizer_states.adapter.update_phase import UpdatePhase, is_in_backward
from deep_optimizer_states.adapter.zero3.gathers import GatherBarrier
from deep_optimizer_states.adapter.zero3.stock import Layout, Stock
from deep_optimizer_states.config import PREFETCH_MEMORY, STEP_BEFORE_NORM, Settings
from deep_optimizer_states.core.device.base import Device
from deep_optimizer_states.core.policies import MIN_TILE_FRACTION
from deep_optimizer_states.core.schedule import MOST_UNDER_WAY, Schedule
from deep_optimizer_states.errors import ConfigError, UpdateError

LOOK_S = 0.02
"""Least time between two looks at the memory of a GPU, in seconds: one takes some tenths of a
millisecond, and backward comes past here for every parameter."""
GROWTH = 0.1
"""Share by which the limit of "auto" grows after a window that was not short of memory."""


class MemoryBudget:
    """Device memory for state ahead.

    With "auto" it is what is free now, less what backward was seen to take between two looks, and
    never more than went well before.

    Args:
        lanes: Whose memory it is.
        limit: Bytes, or "auto".
        tile_bytes: What the largest tile takes.
    """

    def __init__(self, lanes: Device, limit: int | str, tile_bytes: int) -> None:
        self._tile_bytes = tile_bytes
        self._lanes = lanes
        self._limit: float = math.inf if limit == "auto" else int(limit)
        self._learns = limit == "auto"
        self._looked_s = -math.inf
        self._highest = 0
        self._is_short = False

    def may_look(self) -> bool:
        """Return whether what follows may ask the device, which costs time; see ``LOOK_S``."""
        if not self._learns:
            return True
        now_s = time.perf_counter()
        if now_s - self._looked_s < LOOK_S:
            return False
        self._looked_s = now_s
        return True

    def look(self) -> None:
        """See how much is in use, in a window in which nothing is ahead."""
        if self._learns and self.may_look():
            self._highest = max(self._highest, self._lanes.peak_bytes()[0])

    def allows(self, taken: int, more: int) -> bool:
        """Return whether ``more`` bytes may be taken beside those that are."""
        if taken + more > self._limit or self._is_short:
            return False
        if not self._learns:
            return True
        # Between two looks a layer takes more, and gives it back.
        between = max(0, self._lanes.peak_bytes()[1] - self._highest)
        return self._lanes.free_bytes() - between >= more

    @property
    def is_short(self) -> bool:
        """Return whether others need what is taken."""
        return self._learns and self._lanes.free_bytes() < 0

    def was_short(self, taken: int) -> None:
        """Take no more in this window, and less in the next: memory ran out."""
        self._is_short = True
        if self._learns:
            self._limit = taken // 2

    def next_window(self) -> None:
        """Begin a window of micro-batches."""
        if self._learns and not self._is_short:
            self._limit += max(GROWTH * self._limit, self._tile_bytes)
        self._is_short = False


class Uses:
    """Count how often forward uses each parameter, see [Note: several gradients].

    Args:
        root: The whole model. A forward of it that builds no graph, as an evaluation, is followed
            by no backward and is not counted.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._has_graph = True
        self._num_uses = collections.Counter[int]()
        self._with_own_backward: set[int] = set()
        self._backward_has_come = False

    def begin_forward(self) -> None:
        """Begin to count anew, unless no backward has come since the last forward."""
        if self._backward_has_come:
            self._backward_has_come = False
            self._num_uses.clear()
            self._with_own_backward.clear()

    def count(self, module: Any) -> None:
        """Count the parameters of a module that is about to run."""
        if is_in_backward():
            return  # It is recomputed, and was counted when it ran first.
        if module is self._root:
            self._has_graph = torch.is_grad_enabled()
        if not self._has_graph:
            return
        is_leaf = z3_leaf_module(module)
        ids = {param.ds_id for param in iter_params(module, recurse=is_leaf)}
        self._num_uses.update(ids)
        if is_leaf or not torch.is_grad_enabled():
            self._with_own_backward |= ids

    def begin_backward(self) -> None:
        """Note that backward has come, to which the uses so far belong."""
        self._backward_has_come = True

    def give_several(self, ds_id: int) -> bool:
        """Return whether a parameter may get several gradients in this backward."""
        return ds_id in self._with_own_backward and self._num_uses[ds_id] > 1


class WorkInBackward:
    """Begins an update before ``step()``, see above.

    It owns what it has seen of the window: whose gradients are final. Of stock it reads parameters,
    by subgroup, whether they are released, and what gradients are to be multiplied with.

    Attributes:
        uses: What it is to be told of every forward.
    """

    def __init__(  # noqa: PLR0913 - each is a thing of its own
        self,
        stock: Stock,
        settings: Settings,
        layout: Layout,
        schedule: Schedule,
        barrier: GatherBarrier,
        update: UpdatePhase,
        lanes: Device,
    ) -> None:
        self._stock = stock
        self._settings = settings
        self._layout = layout
        self._schedule = schedule
        self._barrier = barrier
        self._background = barrier.background
        self._update = update
        self._executor = update.executor
        self._lanes = lanes
        self._sizes = [tile.numel for tile in self._schedule.tiles]
        largest = max(self._sizes, default=0)
        self._least_numel = MIN_TILE_FRACTION * largest
        tile_bytes = self._executor.element_bytes * largest
        self._room = MemoryBudget(lanes, settings.prefetch_memory_bytes, tile_bytes)
        self._disabled_this_window = True
        self._params = {param.ds_id: param for group in stock.fp16_groups for param in group}
        slices, tiles_of = self._layout.slices, self._schedule.tiles_of
        self._tiles_of = {ds_id: tiles_of(slices[ds_id]) for ds_id in self._layout.owned}
        self._params_of: dict[int, set[int]] = {}
        for ds_id, tiles in self._tiles_of.items():
            for tile in tiles:
                self._params_of.setdefault(tile, set()).add(ds_id)
        self._missing: dict[int, set[int]] = {}
        self._unreleased: dict[int, None] = {}
        self._num_looked_at = 0
        self.uses = Uses(stock.module)

    def begin_forward(self) -> None:
        """Give back the memory of state ahead of the update, which a forward needs."""
        self.forget()
        self.uses.begin_forward()

    def begin_backward(self) -> None:
        """Refuse a backward with which the update could not begin.

        Raises:
            ConfigError: Gradients are to be multiplied by what is known only after backward.
        """
        self.uses.begin_backward()
        if not self._settings.step_before_norm:
            return
        clip_grad, loss_scale = self._stock.clip_grad, self._stock.loss_scale
        for name, value, neutral, is_wrong in (
            ("clip_grad", clip_grad, 0, clip_grad > 0),
            ("loss_scale", loss_scale, 1, loss_scale != 1),
        ):
            if is_wrong:
                raise ConfigError(
                    f'engine.optimizer.{name} = {value} does not work with "{STEP_BEFORE_NORM}", '
                    "where backward updates weights with gradients that nothing multiplies. No "
                    f'weight was updated; set {name} to {neutral}, or "{STEP_BEFORE_NORM}" to false'
                )

    def begin_window(self, may_work: bool) -> None:
        """Begin a window: ``step()`` is over, or nothing was trained yet.

        Args:
            may_work: Whether where gradients are kept is settled, on which tiles depend.
        """
        self.forget()
        self._room.next_window()
        self._disabled_this_window = (
            not may_work
            or not self._knows_order
            or (self._settings.step_before_norm and self._update.is_next_repeated)
        )

    def forget(self) -> None:
        """Forget what was seen of this window; an update that has begun goes on."""
        self.drop()
        self._missing.clear()
        self._unreleased.clear()
        self._num_looked_at = 0

    @property
    def _knows_order(self) -> bool:
        return not self._settings.just_in_time_forward or self._barrier.knows_order

    def _order(self) -> Sequence[int]:
        if self._settings.just_in_time_forward:
            return self._barrier.next_order()
        return range(len(self._schedule.tiles))

    def gradient_is_final(self, ds_id: int) -> None:
        """Note that the last gradient of a parameter in this window is on its way home."""
        if not self.uses.give_several(ds_id):
            self._unreleased[ds_id] = None

    def after_hook(self) -> None:
        """Hand over what can be, see [Note: one stream]."""
        if not self._stock.is_gradient_accumulation_boundary():
            return
        if self._disabled_this_window:
            self._room.look()
            return
        if self._background.is_running and not self._update.is_begun:
            return  # the last update still flushes
        with self._background.changing("backward"):
            if self._settings.step_before_norm:
                self._hand_over()
            self._send_ahead()

    def _hand_over(self) -> None:
        tiles = []
        for ds_id in list(self._unreleased):
            if self._params[ds_id].ds_status != ZeroParamStatus.NOT_AVAILABLE:
                continue
            del self._unreleased[ds_id]
            for tile in self._tiles_of[ds_id]:
                missing = self._missing.get(tile)
                if missing is None:
                    missing = self._missing[tile] = set(self._params_of[tile])
                missing.discard(ds_id)
                if not missing:
                    tiles.append(tile)
        if tiles:
            if not self._update.is_begun:
                self._background.wait()
            self._update.give(self._order(), tiles)

    def _send_ahead(self) -> None:
        executor, room = self._executor, self._room
        if not self._settings.prefetch_memory_bytes or not room.may_look():
            return
        if room.is_short:
            self._give_back()
        order = self._order()
        while self._num_looked_at < len(order):
            tile = order[self._num_looked_at]
            if self._may_be_ahead(tile):
                more = executor.element_bytes * self._sizes[tile]
                is_busy = executor.num_under_way_ahead >= MOST_UNDER_WAY
                if is_busy or not room.allows(self._taken_bytes, more):
                    return
                try:
                    self._update.send_ahead(tile)
                except torch.OutOfMemoryError:
                    self._give_back()
                    return
            self._num_looked_at += 1

    def _may_be_ahead(self, tile: int) -> bool:
        """Return whether a tile is the device's, its state elsewhere, and no update has it yet."""
        schedule = self._schedule
        if schedule.device_tiles and tile not in schedule.device_tiles:
            return False  # a policy that gives tiles to the device has chosen them
        is_worth_it = self._sizes[tile] >= self._least_numel
        is_here = schedule.tiles[tile].subgroup in schedule.resident_subgroups
        return is_worth_it and not is_here and not self._update.has_given(tile)

    @property
    def _taken_bytes(self) -> int:
        return sum(self._executor.element_bytes * self._sizes[tile] for tile in self._executor.away)

    def _give_back(self) -> None:
        """Give memory to others who need it."""
        self._room.was_short(self._taken_bytes)
        self._executor.drop_ahead()

    def on_gather(self) -> None:
        """See that the memory is there that a gather takes."""
        if not self._settings.prefetch_memory_bytes or not self._executor.away:
            return
        if self._room.may_look() and self._room.is_short:
            self._give_back()
            if self._background.is_running and not self._update.is_begun:
                self._background.wait()  # what the update has taken is free once it is flushed

    def drop(self) -> None:
        """Forget what was sent ahead: state may be written, or nobody is about to step."""
        self._executor.drop_ahead()

    def check_step(self, is_skipped: bool) -> None:
        """Check that stock's ``step()`` has not skipped an update that had begun.

        Raises:
            UpdateError: It has skipped an update that had begun.
        """
        if is_skipped:
            self.drop()
        if self._update.is_begun:
            self._background.fail(
                UpdateError(
                    "a gradient is not finite, for which DeepSpeed skips the update, of which "
                    "backward had done a part: load the last checkpoint and set "
                    f'"{STEP_BEFORE_NORM}" to false where gradients may overflow'
                )
            )


def refuse_unmanaged(settings: Settings, is_managed: bool) -> None:
    """Refuse work in backward where nobody knows then whether the window ends.

    Raises:
        ConfigError: Names the setting.
    """
    if settings.works_in_backward and not is_managed:
        name = STEP_BEFORE_NORM if settings.step_before_norm else PREFETCH_MEMORY
        value = "true" if settings.step_before_norm else repr(settings.prefetch_memory_bytes)
        raise ConfigError(
            f"{name} = {value} needs managed_gradient_accumulation: without it no backward knows "
            "whether the accumulation window ends with it; take one of them out"
        )
