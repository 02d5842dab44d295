"""The launch of each step's update, with what its tiles need, wherever state and gradients are."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import log_dist, logger
from torch import Tensor

from deep_optimizer_states.adapter.guard import installed_version
from deep_optimizer_states.adapter.homes import AnyStock, StateHomes
from deep_optimizer_states.adapter.steppers import Steppers
from deep_optimizer_states.auto import settle_policy
from deep_optimizer_states.config import STEP_BEFORE_NORM, Settings
from deep_optimizer_states.core.cache import TileCache
from deep_optimizer_states.core.executor import Executor
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
from deep_optimizer_states.core.update import TileArgs, Update
from deep_optimizer_states.core.update_worker import UpdateWorker
from deep_optimizer_states.core.verify import Sample, is_due
from deep_optimizer_states.errors import KernelError, UpdateError

_NEUTRAL = 1.0
"""Factor of gradients without clipping and loss scale, as tiles stepped before ``step()`` have."""
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


class UpdateLauncher:
    """Settles what each tile's step needs, and launches one update a step.

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
        self._begun: Update | None = None
        self._begun_s = 0.0
        self._scalars: list[AdamScalars] = []
        self._promised: list[dict[str, Any]] = []
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
        return self._begun is not None and tile in self._begun.work

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

    def drain(self) -> None:
        """Wait until every gradient has arrived.

        Raises:
            UpdateError: One has not.
        """
        self._gradients.drain()

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
        update, is_new = self._begun, self._begun is None
        if update is None:
            every_tile = range(len(self._schedule.tiles))
            update = self._begin(every_tile if order is None else order, grad_scale)
        else:
            self._check_promise(grad_scale)
        self._begun = None
        rest = [tile for tile in update.order if tile not in update.work]
        on_host = self._schedule.tiles_of_subgroups(stale_grads_upcast)
        self.cache.release(tile for tile in rest if tile in on_host)
        self.cache.grow(tile for tile in rest if tile not in on_host)
        work = self._args_of(rest, stale_grads_upcast)
        is_repeated = is_due(self.num_updates, self._settings.verify_every)
        sample = Sample(list(work.values())) if is_repeated else None
        update.give_rest(work, self.executor.caller_events(), on_host)
        if is_new:
            self._start(update, sample)
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
        update, is_new = self._begun, self._begun is None
        if update is None:
            update = self._begun = self._begin(order, _NEUTRAL)
            self._promised = self._hyperparameters()
        update.give(self._args_of(tiles, {}), self.executor.caller_events())
        if is_new:
            self._start(update, None)

    def _begin(self, order: Sequence[int], grad_scale: float) -> Update:
        """Count an update and settle what it goes by."""
        self._judge_iteration()
        self.num_updates += 1
        self.order = order
        subgroups = range(self._homes.num_subgroups)
        self._scalars = [self._next_scalars(idx, grad_scale) for idx in subgroups]
        return Update(order, self.cache.chain_of, self.executor.follow)

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

    def _start(self, update: Update, sample: Sample | None) -> None:
        """Run an update on the background's thread, with what it was handed and what will be."""
        executor, number = self.executor, self.num_updates

        def run() -> None:
            actions = self._schedule.actions(update, executor.start_split, executor.has_room)
            executor.run(update, actions)
            if sample is not None:
                self._gradients.drain()
                sample.compare(self._steppers.host_adam, number)

        self._background.launch(update, run)

    def _hyperparameters(self) -> list[dict[str, Any]]:
        groups = self._stock.optimizer.param_groups
        # A rate may be a tensor that is written to.
        return [{key: copy.deepcopy(group[key]) for key in _HYPERPARAMETERS} for group in groups]

    def _check_promise(self, grad_scale: float) -> None:
        """See that tiles stepped before ``step()`` were stepped as it would have.

        Raises:
            UpdateError: They were not, or the update failed.
        """
        self._background.check()
        for before, after in zip(self._promised, self._hyperparameters(), strict=True):
            for key, value in before.items():
                if after[key] != value:
                    what = f"{key} changed from {value} to {after[key]}"
                    self._refuse(what, "change it after engine.step()")
        if grad_scale != _NEUTRAL:
            what = f"it turned out that gradients are to be multiplied by {grad_scale}"
            self._refuse(what, "leave clip_grad and the loss scale as they are")

    def _refuse(self, what: str, way_out: str) -> None:
        self._background.fail(
            UpdateError(
                f"between backward and engine.step() {what}, after backward had updated a part: "
                f'{way_out}, or set "{STEP_BEFORE_NORM}" to false'
            )
        )

    def _args_of(
        self, tiles: Sequence[int], stale_grads_upcast: dict[int, Tensor]
    ) -> dict[int, TileArgs]:
        """Return what the steps of tiles need.

        Args:
            tiles: Their numbers.
            stale_grads_upcast: Gradients of subgroups that are stepped where their state lives, in
                the type of master weights.
        """
        tensors, work = dict[int, AdamTensors](), dict[int, TileArgs]()
        for number in tiles:
            tile = self._schedule.tiles[number]
            idx = tile.subgroup
            if idx not in tensors:
                stale = stale_grads_upcast.get(idx)
                grad = self._gradients.beside_state(idx) if stale is None else stale
                tensors[idx] = self._homes.tensors_of(idx, grad)
            tail_start = self._homes.tail_start(idx, self._steppers.tail)
            work[number] = TileArgs(
                name=f"tile {number} (subgroup {idx})",
                tensors=tensors[idx].narrow(tile.start, tile.numel),
                scalars=self._scalars[idx],
                tail_start=tail_within(tail_start, tile.start, tile.numel),
                place=self.cache.claim(number),
            )
        return work

    def _next_scalars(self, subgroup: int, grad_scale: float) -> AdamScalars:
        adam, step = self._stock.optimizer, self._homes.count_step(subgroup)
        group = adam.param_groups[self._homes.group_of(subgroup)]
        powers = self._beta_powers.at(step, group["betas"])
        return adam_scalars(group, powers, grad_scale, bool(adam.adam_w_mode))


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
