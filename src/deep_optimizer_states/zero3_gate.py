"""Who waits for which tile of an update in flight: our half of ZeRO-3's gathers. See ``gate``."""

from __future__ import annotations

import abc
import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from deepspeed.runtime.zero.partition_parameters import Init

from deep_optimizer_states.device.base import Device, Wait
from deep_optimizer_states.engine_calls import own_stream_alone
from deep_optimizer_states.gate import Background, Update
from deep_optimizer_states.plan import Tile
from deep_optimizer_states.schedule import Schedule
from deep_optimizer_states.zero3_gradients import GradientFlush

MOST_APART = 1 / 8
"""Share of persistent parameters, in elements, above which they get no tiles of their own."""


class GatedGathers(GradientFlush):
    """ZeRO-3 whose every gather of a parameter waits for that parameter's tiles, and no others.

    [Note: first use] ``step()`` gathers persistent parameters (norms, biases) before it returns.
    They lie between all others, so they get tiles of their own, which are updated first. Which tile
    is needed when is seen in the first iteration after an update: the order of its gathers.

    Args:
        lanes: Where the update runs.
        args, kwargs: As DeepSpeed passes them to its own class.
    """

    persistent_parameters: list[Any]

    def __init__(self, lanes: Device, *args: Any, **kwargs: Any) -> None:
        self._update: Update | None = None
        self._background = Background(lanes)
        self._overlooks_failure = False
        self._uses: dict[int, None] | None = None
        self._order: tuple[int, ...] | None = None
        super().__init__(lanes, *args, **kwargs)

    @property
    @abc.abstractmethod
    def _schedule(self) -> Schedule:
        """This rank's tiles."""

    @functools.cached_property
    def _runs(self) -> dict[int, Tile]:
        """Where each parameter's partition lies, by its id."""
        runs = {}
        for subgroup, group in enumerate(self.fp16_groups):
            start = 0
            for param in group:
                runs[param.ds_id] = Tile(subgroup, start, param.partition_numel())
                start += param.partition_numel()
        return runs

    @property
    def _runs_apart(self) -> list[Tile]:
        """Runs of elements that ``step()`` itself waits for, see [Note: first use]."""
        ids = [param.ds_id for param in self.persistent_parameters]
        runs = [self._runs[ds_id] for ds_id in ids if ds_id in self._runs]
        few = sum(run.numel for run in runs) <= MOST_APART * sum(self._subgroup_numels)
        return runs if few else []

    def _gate_parameters(self) -> None:
        """Make every gather of a parameter wait for its own tiles."""
        self._tiles_of = {ds_id: self._schedule.tiles_of(run) for ds_id, run in self._runs.items()}
        _gate_all_gathers()
        _gated.add(self)

    def _before_gather(self, params: Iterable[Any]) -> None:
        """Wait for tiles of ``params``, some of which may belong to other engines."""
        own = [param for param in params if param.ds_id in self._tiles_of]
        if own and not self._overlooks_failure:
            self._background.check()
        for param in own:
            if self._uses is not None:
                self._uses.setdefault(param.ds_id)
            self._wait_for(param, Wait.WEIGHTS_READY)

    def _wait_for(self, param: Any, why: Wait) -> None:
        tiles, update = self._tiles_of.get(param.ds_id), self._update
        # Looked at once: a signal handler that saves ends the update in the middle of this.
        if update is not None and tiles is not None:
            update.wait(tiles, self._lanes, why)

    def _learn_order(self) -> None:
        """At an update: what ``step()`` waits for first; from the second on, in order of use."""
        if self._order is None:
            self._order, self._uses = self._schedule.order_of_use(self._runs_apart), {}
        elif self._uses is not None:
            runs = [self._runs[ds_id] for ds_id in self._uses if ds_id in self._runs]
            self._order, self._uses = self._schedule.order_of_use(runs), None

    def _finish_update(self) -> None:
        """Wait until all state is where it lives.

        Raises:
            UpdateError: The update failed, or one before did and nothing has been loaded since.
        """
        self._background.wait_for_end()
        if not self._overlooks_failure:
            self._background.check()
        self._update = None

    @property
    def has_failed(self) -> bool:
        """Whether the state is not to be trusted, and nothing has been loaded since; it waits."""
        self._background.wait_for_end()
        return self._background.has_failed

    @contextlib.contextmanager
    def overlooking_failure(self) -> Iterator[None]:
        """Wait for the update in flight, and look at state whatever became of it: to replace it."""
        self._background.wait_for_end()
        before, self._overlooks_failure = self._overlooks_failure, True
        try:
            yield
        finally:
            self._overlooks_failure = before

    def _open_gates(self) -> None:
        """Let gathers through, and end the update's thread."""
        _gated.discard(self)
        self._background.close()


_gated: weakref.WeakSet[GatedGathers] = weakref.WeakSet()
"""Whose tiles gathers wait for."""


@functools.cache
def _gate_all_gathers() -> None:
    """Put the gates below DeepSpeed's own gathers, where every way to gather comes past.

    A parameter's own method would be too high: one gather may name parameters of several models,
    and goes through the method of the first.
    """
    find, gather = Init._ensure_availability_of_partitioned_params, Init._all_gather

    @functools.wraps(find)
    def find_after_update(init: Any, params: list[Any]) -> Any:
        for optimizer in list(_gated):
            optimizer._before_gather(params)
        return find(init, params)

    @functools.wraps(gather)
    def gather_beside_update(init: Any, *args: Any, **kwargs: Any) -> Any:
        if all(optimizer._update is None for optimizer in _gated):
            return gather(init, *args, **kwargs)
        with own_stream_alone():  # DeepSpeed synchronises after a gather
            return gather(init, *args, **kwargs)

    Init._ensure_availability_of_partitioned_params = find_after_update
    Init._all_gather = gather_beside_update
