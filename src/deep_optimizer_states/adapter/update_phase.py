"""The update phase of one step: what each tile needs, who steps it, and its launch."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.utils import log_dist, logger
from torch import Tensor

from deep_optimizer_states.adapter.checkpoint import Checkpoints
from deep_optimizer_states.adapter.guard import installed_version
from deep_optimizer_states.adapter.homes import AnyStock, StateHomes
from deep_optimizer_states.adapter.steppers import Steppers
from deep_optimizer_states.auto import settle_policy
from deep_optimizer_states.config import BLOCK, DEVICE_MEMORY, STEP_BEFORE_NORM, Settings
from deep_optimizer_states.core.cache import TileCache, Types
from deep_optimizer_states.core.executor import Executor, TileArgs
from deep_optimizer_states.core.kernels.adam import (
    AdamScalars,
    AdamTensors,
    BetaPowers,
    adam_scalars,
    tail_within,
)
from deep_optimizer_states.core.plan import Tile
from deep_optimizer_states.core.policies import AUTO
from deep_optimizer_states.core.schedule import Schedule
from deep_optimizer_states.core.update_worker import TileQueue, Update, UpdateWorker
from deep_optimizer_states.core.verify import Sample, is_due
from deep_optimizer_states.errors import ConfigError, KernelError, UpdateError

_NO_BACKWARD = -1
"""The number that torch gives while no backward runs on this thread."""
_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "bias_correction")
"""Fields of a parameter group that Adam reads."""


class Gradients:
    """Gradients as an update asks for them, wherever they are."""

    dtype: torch.dtype
    """Type of those that no parameter was left out of."""

    def beside_state(self, subgroup: int) -> Tensor:
        """Return a subgroup's gradients in the memory that its state lives in, 1-D."""
        raise NotImplementedError

    def stepped(self, factor: float) -> None:
        """Note that the update is launched, which multiplies every gradient by ``factor``."""
        raise NotImplementedError

    def stale_grads_upcast(self) -> dict[int, Tensor]:
        """Return gradients of the subgroups that must be stepped where their state lives.

        They are 1-D, in the type of master weights, before this step's factor, and in the memory
        that the subgroup's state lives in.
        """
        return {}

    @property
    def have_failed(self) -> bool:
        """Return whether somebody heard that a gradient of this window has not arrived."""
        return False

    def drain(self) -> None:
        """Wait until every gradient is at home."""
        return

    def forget_flushes(self) -> None:
        """Forget those of a window that is given up, and that one of them failed."""
        return


class Chosen(NamedTuple):
    """A policy that updates tiles from some update on, until another is chosen."""

    update: int
    policy: str
    why: str


@dataclass
class _Begun:
    """An update, from its first tile until ``step()`` has launched the rest.

    Attributes:
        tile_queue: Through which it gets its tiles.
        update: Who waits for which tile.
        scalars: Adam's, by subgroup.
        grad_scale: Factor of the gradients.
        groups: Hyperparameters that it goes by, of every parameter group.
        work: What the tiles handed over need.
    """

    tile_queue: TileQueue
    update: Update
    scalars: list[AdamScalars]
    grad_scale: float
    groups: list[dict[str, Any]]
    work: dict[int, TileArgs] = field(default_factory=dict)


class UpdatePhase:
    """Adam on every tile of this rank, in one launch a step.

    It owns the executor with its buffers, and the count of updates. Of stock it reads Adam's
    hyperparameters, and steps its counters as stock's own update would.

    Attributes:
        order: Tiles in the order of the last update.
        chosen: Policies that update tiles, each with the number of the first update under it and
            with why; ``auto`` adds to it when it has found a faster way.

    Raises:
        KernelError: The device cannot step, or its bits are others.
    """

    def __init__(  # noqa: PLR0913 - each is a thing of its own
        self,
        stock: AnyStock,
        settings: Settings,
        steppers: Steppers,
        schedule: Schedule,
        homes: StateHomes,
        gradients: Gradients,
        background: UpdateWorker,
        cache: TileCache,
    ) -> None:
        self.num_updates = 0
        self._stock = stock
        self._settings = settings
        self._steppers = steppers
        self._schedule = schedule
        self._homes = homes
        self._gradients = gradients
        self._background = background
        self.cache = cache
        self._begun: _Begun | None = None
        self._begun_s = 0.0
        self.order: Sequence[int] = range(len(schedule.tiles))
        self.chosen: list[Chosen] = []
        betas = stock.optimizer.defaults["betas"]
        self._beta_powers = BetaPowers(betas, steppers.pow_on_repeat)
        grad_dtype, weights_dtype = gradients.dtype, stock.dtype
        read = {grad_dtype} if schedule.slot_numel or cache.is_on else set()
        if schedule.resident_tiles:
            # The second is that of gradients of parameters that took no part.
            read |= {grad_dtype, stock.master_weights_and_grads_dtype}
        try:
            for dtype in read:
                steppers.check(bool(stock.optimizer.adam_w_mode), dtype, weights_dtype)
        except KernelError as error:
            is_asked_for = settings.device_memory_bytes != "auto"
            if schedule.slot_numel or schedule.resident_tiles or is_asked_for:
                raise
            cache.switch_off()
            logger.warning(f"deep_optimizer_states: no state stays on the device: {error}")
        self.executor = Executor(
            cache,
            steppers.host_adam,
            steppers.lanes.cpu_affinity.num_threads,
            settings.policy == AUTO,
        )

    def announce(self, stage: int, why: str) -> None:
        """Say on rank 0, in one line, that this engine has the plugin and what will be done.

        Nothing else that a program prints shows it. So it is a warning, which is what DeepSpeed's
        logger lets through unless it is told otherwise.

        Args:
            stage: ZeRO's.
            why: Why the policy is what it is; empty where it was given.
        """
        settings, schedule = self._settings, self._schedule
        number = {"stride": f" {settings.stride}", "ratio": f" {settings.ratio:g}"}
        name = f"{settings.policy}{number.get(settings.policy, '')}"
        policy = f"policy {name}{f': {why}' if why else ''}"
        self.chosen.append(Chosen(1, name, why))
        resident, through = len(schedule.resident_tiles), len(schedule.device_tiles)
        on_host = len(schedule.tiles) - resident - through
        shares = f"{on_host} updated on the CPU and {through} on the device"
        if schedule.dynamic:
            shares = f"{on_host + through} shared out while the update runs"
        emulated = "" if get_accelerator().device_name() == "cuda" else " (emulated, without a GPU)"
        log_dist(
            f"deep_optimizer_states: this engine uses the plugin (DeepSpeed {installed_version()}, "
            f"ZeRO stage {stage}): {policy}; {self._homes.num_subgroups} subgroups in "
            f"{len(schedule.tiles)} tiles, {shares}, {resident} resident on the device{emulated}; "
            f"step_before_norm {'on' if settings.step_before_norm else 'off'}, "
            f"device_memory_bytes {settings.device_memory_bytes if self.cache.is_on else 0}; "
            f"CPU lane of "
            f"{self._steppers.lanes.cpu_affinity}",
            ranks=[0],
            level=logging.WARNING,
        )

    @property
    def is_begun(self) -> bool:
        """Return whether an update has begun before ``step()``."""
        return self._begun is not None

    @property
    def is_next_repeated(self) -> bool:
        """Return whether the next update is repeated, so that all state is kept from before it."""
        return is_due(self.num_updates + 1, self._settings.verify_every)

    def has_given(self, tile: int) -> bool:
        """Return whether an update that has begun was given a tile."""
        return self._begun is not None and tile in self._begun.tile_queue.handed_over

    @contextlib.contextmanager
    def loading(self, is_whole: bool) -> Iterator[None]:
        """Replace the state, after an update that failed too; loaded moments return home.

        Args:
            is_whole: Whether moments are loaded as well, so that nothing is left of the failure.
        """
        what, background = "loading a checkpoint", self._background
        with background.overlooking_failure():
            if (failure := background.untold_failure) is not None:
                logger.warning(
                    f"deep_optimizer_states: the update before failed: {failure}; what is loaded "
                    "takes its place"
                )
            if background.has_failed:
                self._begun = None
                self._steppers.lanes.forget_failure()
                self.executor.reset()
                self._gradients.forget_flushes()
            else:
                self.cache.release()
            with background.under_way(what), background.changing(what):
                yield
                self._homes.return_home()
            if is_whole:
                background.forget_failure()

    @property
    def has_lost_gradients(self) -> bool:
        """Return whether somebody heard that a gradient of this window has not arrived."""
        return self._gradients.have_failed

    def forget_flushes(self) -> None:
        """Forget the flushes of a window that is given up, and that one of them failed."""
        self._gradients.forget_flushes()

    def launch(self, order: Sequence[int] | None, grad_scale: float) -> None:
        """Step every tile, or those that are left, on the background's thread.

        Args:
            order: All tiles in the order in which they are needed, where somebody else waits for
                each; None to wait for all of them here.
            grad_scale: What stock would multiply gradients with.

        Raises:
            UpdateError: The update has been waited for, and failed.
        """
        stale_grads_upcast = self._gradients.stale_grads_upcast()
        begun, is_new = self._begun, self._begun is None
        if begun is None:
            begun = self._begin(
                range(len(self._schedule.tiles)) if order is None else order, grad_scale
            )
        else:
            self._check_promise(begun, grad_scale)
        self._begun = None
        rest = [tile for tile in begun.tile_queue.order if tile not in begun.tile_queue.handed_over]
        on_host = self._schedule.tiles_of_subgroups(stale_grads_upcast)
        self.cache.release(tile for tile in rest if tile in on_host)
        self.cache.grow(tile for tile in rest if tile not in on_host)
        self._add_work(begun, rest, stale_grads_upcast)
        is_repeated = is_due(self.num_updates, self._settings.verify_every)
        sample = Sample([begun.work[tile] for tile in rest]) if is_repeated else None
        after = self.executor.caller_events()
        begun.tile_queue.give_rest(after, on_host)
        if is_new:
            self._start(begun, sample)
        if is_repeated or order is None:
            self._background.wait()
        self._gradients.stepped(grad_scale)

    def give(self, order: Sequence[int], tiles: Sequence[int]) -> None:
        """Step tiles before ``step()``, in an update that begins with the first of them.

        Args:
            order: All tiles in the order in which they are needed.
            tiles: Their gradients are final and go home, and nobody reads their weights any more.
                Gradients of the whole subgroup need not be.
        """
        begun, is_new = self._begun, self._begun is None
        if begun is None:  # without clipping and loss scale
            begun = self._begun = self._begin(order, grad_scale=1.0)
        self._add_work(begun, tiles, {})
        begun.tile_queue.give(tiles, self.executor.caller_events())
        if is_new:
            self._start(begun, None)

    def _begin(self, order: Sequence[int], grad_scale: float) -> _Begun:
        """Count an update and settle what it goes by."""
        self._judge_iteration()
        self.num_updates += 1
        self.order = order
        tile_queue = TileQueue(order, self.cache.chain_of, self.executor.follow)
        subgroups = range(self._homes.num_subgroups)
        scalars = [self._next_scalars(idx, grad_scale) for idx in subgroups]
        update = Update(len(self._schedule.tiles), tile_queue)
        return _Begun(tile_queue, update, scalars, grad_scale, self._hyperparameters())

    def _judge_iteration(self) -> None:
        """Let policy ``auto`` learn how long it took from the last update's beginning to here."""
        now, before, number = time.perf_counter(), self._begun_s, self.num_updates
        self._begun_s = now
        if not before or is_due(number, self._settings.verify_every):
            return  # an update that is repeated takes longer whoever makes it
        policy = self.executor.split.note_iteration(now - before)
        if policy:
            why = "measured: it makes the shorter iterations"
            self.chosen.append(Chosen(number + 1, policy, why))
            log_dist(
                f"deep_optimizer_states: policy auto is as {policy} from update {number + 1} on; "
                f"{why}",
                ranks=[0],
                level=logging.WARNING,
            )

    def _start(self, begun: _Begun, sample: Sample | None) -> None:
        """Run an update on the background's thread, with what it was handed and what will be."""
        executor, tile_queue, update = self.executor, begun.tile_queue, begun.update
        number = self.num_updates

        def run() -> None:
            actions = self._schedule.actions(tile_queue, executor.start_split, executor.has_room)
            executor.run(begun.work, actions, update.issued, lambda: not tile_queue.is_open)
            if sample is not None:
                self._gradients.drain()
                sample.compare(self._steppers.host_adam, number)

        self._background.launch(update, run)

    def _hyperparameters(self) -> list[dict[str, Any]]:
        groups = self._stock.optimizer.param_groups
        # A rate may be a tensor that is written to.
        return [{key: copy.deepcopy(group[key]) for key in _HYPERPARAMETERS} for group in groups]

    def _check_promise(self, begun: _Begun, grad_scale: float) -> None:
        """See that tiles stepped before ``step()`` were stepped as it would have.

        Raises:
            UpdateError: They were not, or the update failed.
        """
        self._background.check()
        for before, after in zip(begun.groups, self._hyperparameters(), strict=True):
            for key, value in before.items():
                if after[key] != value:
                    what = f"{key} changed from {value} to {after[key]}"
                    self._refuse(what, "change it after engine.step()")
        if grad_scale != begun.grad_scale:
            what = f"it turned out that gradients are to be multiplied by {grad_scale}"
            self._refuse(what, "leave clip_grad and the loss scale as they are")

    def _refuse(self, what: str, way_out: str) -> None:
        self._background.fail(
            UpdateError(
                f"between backward and engine.step() {what}, after backward had updated a part: "
                f'{way_out}, or set "{STEP_BEFORE_NORM}" to false'
            )
        )

    def _name(self, tile: int) -> str:
        return f"tile {tile} (subgroup {self._schedule.tiles[tile].subgroup})"

    def _add_work(
        self, begun: _Begun, tiles: Sequence[int], stale_grads_upcast: dict[int, Tensor]
    ) -> None:
        """Settle what tiles need.

        Args:
            begun: Their update.
            tiles: Their numbers.
            stale_grads_upcast: Gradients of subgroups that are stepped where their state lives, in
                the type of master weights.
        """
        grads, tensors = self._gradients, dict[int, AdamTensors]()
        for number in tiles:
            tile = self._schedule.tiles[number]
            idx = tile.subgroup
            if idx not in tensors:
                grad = (
                    stale_grads_upcast[idx]
                    if idx in stale_grads_upcast
                    else grads.beside_state(idx)
                )
                tensors[idx] = self._homes.tensors_of(idx, grad)
            tail_start = self._homes.tail_start(idx, self._steppers.tail)
            begun.work[number] = TileArgs(
                name=self._name(number),
                tensors=tensors[idx].narrow(tile.start, tile.numel),
                scalars=begun.scalars[idx],
                tail_start=tail_within(tail_start, tile.start, tile.numel),
                place=self.cache.claim(number),
            )

    def _next_scalars(self, subgroup: int, grad_scale: float) -> AdamScalars:
        adam, step = self._stock.optimizer, self._homes.count_step(subgroup)
        group = adam.param_groups[self._homes.group_of(subgroup)]
        powers = self._beta_powers.at(step, group["betas"])
        return adam_scalars(group, powers, grad_scale, bool(adam.adam_w_mode))


class InterleavedOptimizer:
    """What our optimizers of all ZeRO stages have in common, to stand before stock's class.

    It owns the lanes and the thread of updates. Whoever looks at state, stock's own methods too,
    sees the finished update.
    """

    optimizer: Any
    _update: UpdatePhase
    _backward_active_depth: int
    reset_cpu_buffers: Callable[[], None]
    exit_backward: Callable[[], None]
    checkpoints: Checkpoints | None = None
    """Saves in the background, where the settings ask for them."""

    @property
    def chosen_policies(self) -> Sequence[Chosen]:
        """Policies in the order in which they were chosen, see :class:`UpdatePhase`."""
        return tuple(self._update.chosen)

    _is_closed = False
    _is_reading = False
    is_being_loaded = False
    """Whether something was replaced in the load that is under way, or in the last one."""

    def _open(
        self, adam: DeepSpeedCPUAdam, settings: Settings, master_dtype: torch.dtype = torch.float32
    ) -> None:
        """Start the lanes that repeat the bits of ``adam``; to be called before stock's part."""
        self._settings = settings
        self._grad_scale = 1.0
        self._steppers = Steppers.open(adam, master_dtype)
        self._lanes = self._steppers.lanes
        self._lanes.has_own_pages = settings.checkpoint == "background"
        self.background = UpdateWorker(self._lanes)

    def _close_after_failure(self) -> None:
        """Close what there is of an optimizer that could not be made."""
        with contextlib.suppress(UpdateError):  # it says less than what happened first
            self._close()

    def _make_cache(self, schedule: Schedule, grad_dtype: torch.dtype) -> TileCache:
        """Return the cache of this rank's tiles, which knows their homes once they are made."""
        own: Any = self

        def home_of(number: int) -> AdamTensors:
            tile, homes = schedule.tiles[number], cast("StateHomes", own._homes)
            grad = own._gradients.beside_state(tile.subgroup)
            return homes.tensors_of(tile.subgroup, grad).narrow(tile.start, tile.numel)

        types = Types(grad_dtype, own.dtype, *self._steppers.state_dtypes)
        return TileCache(schedule, types, self._lanes, self._settings.device_memory_bytes, home_of)

    def _make_update(
        self, schedule: Schedule, homes: StateHomes, gradients: Gradients, cache: TileCache
    ) -> UpdatePhase:
        stock: Any = self
        update = UpdatePhase(
            stock,
            self._settings,
            self._steppers,
            schedule,
            homes,
            gradients,
            self.background,
            cache,
        )
        if self._settings.checkpoint == "background":
            self.checkpoints = Checkpoints(
                self._settings, homes.state_on_host, lambda: update.order
            )
            update.cache.before_overwrite = self.checkpoints.release
        return update

    def stepping(self, engine: Any) -> contextlib.AbstractContextManager[None]:
        """Make a step of ``engine`` fail for good that is cut short after its update has begun.

        The update, the engine's counters and the learning rate go together.
        """
        update, steps, micro_steps = self._update, engine.global_steps, engine.micro_steps
        before = update.num_updates, update.is_begun

        def is_half_done() -> bool:
            # Of what comes after the counters nothing depends but the next window's end.
            is_counted = engine.global_steps > steps and (
                engine.micro_steps > micro_steps or engine.gradient_accumulation_steps() == 1
            )
            return (update.num_updates, update.is_begun) != before and not is_counted

        return self.background.changing("engine.step()", is_half_done)

    @property
    def is_cut_short(self) -> bool:
        """Return whether a step, or a backward of whoever's, was cut short in this window.

        DeepSpeed's own optimizer collects and counts on then, and after a load too.
        """
        return self.background.has_failed or self._is_window_lost

    @property
    def _is_window_lost(self) -> bool:
        update: UpdatePhase | None = self.__dict__.get("_update")
        is_lost = update is not None and update.has_lost_gradients
        return is_lost or self._backward_active_depth > 0

    def _refuse_half_a_backward(self) -> None:
        """Refuse to add gradients of a backward that was cut short to others, or to step by them.

        Raises:
            UpdateError: An error came out of the backward before.
        """
        if self._backward_active_depth > 0 and torch.is_grad_enabled() and not is_in_backward():
            raise UpdateError(
                "the backward before was cut short by an error, so that the gradients of this "
                "window are not whole: go back to a checkpoint (engine.load_checkpoint), or give "
                "the window up (engine.optimizer.zero_grad())"
            )

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Drop gradients as stock does; of a window that is not whole, all that it left."""
        if self._is_window_lost and not is_in_backward():
            self._forget_window()
        stock: Any = super()
        stock.zero_grad(*args, **kwargs)

    def _forget_window(self) -> None:
        """Let the next backward be the first of a window, as it is after a step."""
        update: UpdatePhase | None = self.__dict__.get("_update")
        if update is not None:  # else the engine is destroyed
            update.forget_flushes()
        self.reset_cpu_buffers()
        while self._backward_active_depth > 0:
            self.exit_backward()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Load a checkpoint; state of which a part alone was replaced is not to be trusted."""
        self.is_being_loaded = False
        with self.background.changing("loading a checkpoint", lambda: self.is_being_loaded):
            yield

    def _wait(self) -> None:
        """Wait for the update in flight, after which all weights may be read."""
        self.background.wait()

    def _settle(self) -> None:
        """Wait for the update, and bring state home, which whoever asked may write."""
        self._wait()
        if not self._is_reading:
            self._release_state()
        update: UpdatePhase | None = self.__dict__.get("_update")
        if update is None or self.background.is_under_way or self.background.has_failed:
            return
        if self._is_reading:
            update.cache.flush()
        else:
            update.cache.release()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Let somebody look at state who does not write it."""
        before, self._is_reading = self._is_reading, True
        try:
            yield
        finally:
            self._is_reading = before

    def give_memory_back(self, error: torch.OutOfMemoryError) -> None:
        """Give all device memory back that state is kept in, and say so in a note of ``error``."""
        update, taken = self._update, 0
        with contextlib.suppress(UpdateError):  # it is raised by whatever is called next
            if not update.is_begun:
                self.background.wait()
            with self.background.changing("giving device memory back"):
                taken = update.cache.run_out()
        if taken:
            error.add_note(
                f"deep_optimizer_states kept optimizer state in {taken} bytes of device memory and "
                f'has given them back, so that the next attempt has them; "{DEVICE_MEMORY}" says '
                "how many it may take"
            )

    def _release_state(self) -> None:
        """Let whoever asked write state that is still to be saved; stock's step only reads it."""
        if self.checkpoints is not None and not self.background.is_under_way:
            self.checkpoints.release_all()

    @property
    def state(self) -> Any:
        """Moments by master weight."""
        self._settle()
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def _prepare_to_save(self) -> None:
        if not self.background.overlooks_failure:
            self.background.refuse_to_save()
        with self._reading():
            self._settle()

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """End the lanes after the block, in which stock ends its part.

        Raises:
            UpdateError: The update in flight failed, which nobody was told before.
        """
        update: UpdatePhase | None = self.__dict__.get("_update")
        is_begun = update is not None and update.is_begun
        is_known = self._is_closed or self.background.has_failed or is_begun
        if self.checkpoints is not None:
            self.checkpoints.wait()
        try:
            with self.background.overlooking_failure():
                if update is not None:
                    update.cache.close()
                yield
            if not is_known:
                self.background.check()
        finally:
            self._close()
            self.__dict__.pop("_update", None)

    def _close(self) -> None:
        """End the threads. What was cut short goes on when it is called again."""
        if self._is_closed:
            return
        with contextlib.ExitStack() as parts:
            for name in ("_lanes", "background"):  # closed the other way round
                if (part := self.__dict__.get(name)) is not None:
                    parts.callback(part.close)
        self._is_closed = True


def is_in_backward() -> bool:
    """Return whether autograd runs a backward on this thread."""
    return bool(torch._C._current_graph_task_id() != _NO_BACKWARD)


def stand_in_for_step(adam: DeepSpeedCPUAdam) -> None:
    """Do what others expect of ``DeepSpeedCPUAdam.step``, which is never called.

    Raises:
        ConfigError: A hook was registered on it.
    """
    if adam._optimizer_step_pre_hooks or adam._optimizer_step_post_hooks:
        raise ConfigError(
            "the optimizer has hooks (register_step_pre_hook, register_step_post_hook), which "
            "would not be called: its step is replaced; remove them and do their work before "
            "or after engine.step()"
        )
    adam._opt_called = True  # or torch's lr_scheduler warns that no step was made


def refuse_autocast(stock: Any) -> None:
    """Refuse a scaler of gradients that is not DeepSpeed's own.

    Raises:
        ConfigError: ``torch_autocast`` in fp16 has one.
    """
    if stock.torch_autocast_gradscaler is not None:
        raise ConfigError(
            f'torch_autocast in fp16 scales gradients by itself, which "{BLOCK}" does not repeat; '
            'use torch_autocast in bfloat16, or the "fp16" or "bf16" block'
        )


def refuse_native_pins(offload: Any) -> None:
    """Refuse DeepSpeed's own allocator of page-locked memory, which would not be used.

    Args:
        offload: The config's ``offload_optimizer``.

    Raises:
        ConfigError: It is to be page-locked by that allocator.
    """
    backend = os.environ.get("DS_PIN_MEMORY_BACKEND", "").strip().lower()
    if offload is not None and offload.pin_memory and backend == "native":
        raise ConfigError(
            f'DS_PIN_MEMORY_BACKEND = native: "{BLOCK}" locks pages itself, without rounding '
            "sizes up; take the variable out, or set offload_optimizer.pin_memory to false"
        )


def settle_schedule(
    settings: Settings,
    numels: Sequence[int],
    separate: Sequence[Tile] = (),
    weights_on_host: bool = False,
) -> tuple[Schedule, Settings, str]:
    """Cut this rank's subgroups into tiles under the policy of the settings.

    Args:
        settings: The checked block of the config.
        numels: Elements of each subgroup.
        separate: Ranges of elements that get tiles of their own where single tiles are waited for.
        weights_on_host: Whether 16-bit weights live in host memory.

    Returns:
        The tiles, the settings with the policy that is run, and why it is that one.
    """
    has_gpu = get_accelerator().device_name() == "cuda"
    chosen, why = settle_policy(settings, len(numels), has_gpu)
    schedule = Schedule.make(
        numels,
        chosen.policy,
        chosen.stride,
        chosen.ratio,
        chosen.tile_numel,
        separate if chosen.just_in_time_forward else (),
    )
    return dataclasses.replace(schedule, weights_on_host=weights_on_host), chosen, why
