"""Work of an update before ``step()``: whole tiles, or the way of their state to the device.

The global norm is a barrier: until it is known no gradient can be clipped, and an overflow would
skip the step. Two things need not wait for it.

*Steps before the norm* (``step_before_norm``): without clipping and loss scale the norm changes
nothing. A tile is handed to the update once the gradients of all its parameters are final and their
weights are released. What is stepped cannot be undone. So whatever would make ``step()`` do
something else (a gradient that is not finite, a changed learning rate, a second backward) is an
error that stays until a checkpoint is loaded.

*State ahead*: master weights and moments do not depend on gradients. While backward runs, the
cache (``core/cache.py``) is asked to prefetch those of the tiles that the next forward needs first.

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
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils import z3_leaf_module
from typing_extensions import override

from deep_optimizer_states.adapter.launcher import UpdateLauncher
from deep_optimizer_states.adapter.optimizer import is_in_backward
from deep_optimizer_states.adapter.residency import Residency
from deep_optimizer_states.adapter.zero3.gathers import GatherBarrier
from deep_optimizer_states.adapter.zero3.stock import Layout, Stock
from deep_optimizer_states.config import STEP_BEFORE_NORM, Settings
from deep_optimizer_states.core.schedule import Schedule
from deep_optimizer_states.errors import ConfigError, UpdateError


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


class WorkInBackward(Residency):
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
        launcher: UpdateLauncher,
        is_managed: bool,
    ) -> None:
        super().__init__(launcher, barrier.background)
        self._stock = stock
        self._settings = settings
        self._layout = layout
        self._schedule = schedule
        self._barrier = barrier
        self._is_managed = is_managed
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
        self.uses = Uses(stock.module)

    @override
    def begin_forward(self) -> None:
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

    @override
    def begin_window(self) -> None:
        self.forget()
        super().begin_window()
        self._disabled_this_window = not self._knows_order or (
            self._settings.step_before_norm and self._launcher.is_next_repeated
        )

    def forget(self) -> None:
        """Forget what was seen of this window; an update that has begun goes on."""
        self.drop()
        self._missing.clear()
        self._unreleased.clear()

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
        self.look()
        if self._disabled_this_window or not self._stock.is_gradient_accumulation_boundary():
            return
        if self._background.is_running and not self._launcher.is_begun:
            return  # the last update still flushes
        with self._background.changing("backward"):
            if self._settings.step_before_norm:
                self._hand_over()
            if self._is_managed:  # or no backward knows whether the window ends
                self.send_ahead(self._order())

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
            if not self._launcher.is_begun:
                self._background.wait()
            self._launcher.give(self._order(), tiles)

    def check_step(self, is_skipped: bool) -> None:
        """Check that stock's ``step()`` has not skipped an update that had begun.

        Raises:
            UpdateError: It has skipped an update that had begun.
        """
        if is_skipped:
            self.drop()
        if self._launcher.is_begun:
            self._background.fail(
                UpdateError(
                    "a gradient is not finite, for which DeepSpeed skips the update, of which "
                    "backward had done a part: load the last checkpoint and set "
                    f'"{STEP_BEFORE_NORM}" to false where gradients may overflow'
                )
            )


def refuse_unmanaged(settings: Settings, is_managed: bool) -> None:
    """Refuse steps in backward where nobody knows then whether the window ends.

    Raises:
        ConfigError: Names the setting.
    """
    if settings.step_before_norm and not is_managed:
        raise ConfigError(
            f"{STEP_BEFORE_NORM} = true needs managed_gradient_accumulation: without it no "
            "backward knows whether the accumulation window ends with it; take one of them out"
        )
