"""The update phase of one step: what each tile needs, who steps it, and its launch."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from deepspeed import comm as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.utils import log_dist
from torch import Tensor

from deep_optimizer_states.config import Settings
from deep_optimizer_states.errors import ConfigError
from deep_optimizer_states.executor import Executor, OnSpans, Sizes, Work
from deep_optimizer_states.gate import Background, Update
from deep_optimizer_states.kernels.scalars import AdamScalars, BetaPowers, adam_scalars
from deep_optimizer_states.kernels.tensors import tail_within
from deep_optimizer_states.plan import Plan
from deep_optimizer_states.schedule import Schedule
from deep_optimizer_states.timeline import Recorder, Span, TimelineFile
from deep_optimizer_states.verify import FIRST_UPDATES, Sample, is_due
from deep_optimizer_states.zero.homes import StateHomes
from deep_optimizer_states.zero.steppers import Steppers
from deep_optimizer_states.zero.stock import AnyStock


class Gradients(Protocol):
    """What an update asks about gradients, wherever they are."""

    dtype: torch.dtype
    """Type of those that no parameter was left out of."""

    def beside_state(self, subgroup: int) -> Tensor:
        """A subgroup's gradients in the memory that its state lives in, 1-D."""

    def widened(self) -> dict[int, Tensor]:
        """fp32 gradients of the subgroups that must be stepped where their state lives."""

    def on_device(self, number: int) -> Tensor | None:
        """The gradient on the device of a tile that may pass through a slot; None for no such."""

    def drain(self) -> None:
        """Wait until every gradient is at home."""

    def stepped(self, factor: float) -> None:
        """The update is launched, which multiplies every gradient by ``factor``."""

    def forget_flushes(self) -> None:
        """Forget those of before an update that failed; the lanes are idle."""


class UpdatePhase:
    """Adam on every tile of this rank, in one launch a step.

    It owns the executor with its buffers, and the count of updates. Of stock it reads Adam's
    hyperparameters, and steps its counters as stock's own update would.

    Args:
        stock: DeepSpeed's optimizer.
        settings: The checked block of the config.
        steppers: Both Adams; the device is compared with the host's here.
        schedule: This rank's tiles.
        homes: Where state lives.
        gradients: Where gradients are.

    Raises:
        KernelError: The device cannot step, or its bits are others.
    """

    def __init__(
        self,
        stock: AnyStock,
        settings: Settings,
        steppers: Steppers,
        schedule: Schedule,
        homes: StateHomes,
        gradients: Gradients,
    ) -> None:
        self.num_updates = 0
        self._stock = stock
        self._settings = settings
        self._steppers = steppers
        self._schedule = schedule
        self._homes = homes
        self._gradients = gradients
        betas = stock.optimizer.defaults["betas"]
        self._beta_powers = BetaPowers(betas, steppers.pow_on_repeat)
        grad_dtype, weights_dtype = gradients.dtype, stock.dtype
        read = {grad_dtype} if schedule.slot_numel else set()
        if schedule.resident_tiles:
            # The second is that of gradients of parameters that took no part.
            read |= {grad_dtype, stock.master_weights_and_grads_dtype}
        for dtype in read:
            steppers.check(bool(stock.optimizer.adam_w_mode), dtype, weights_dtype)
        sizes = Sizes.of(schedule, grad_dtype, weights_dtype, steppers.state_dtypes)
        lanes, host_adam = steppers.lanes, steppers.host_adam
        num_threads = lanes.near.num_threads
        self._executor = Executor(sizes, lanes, host_adam, num_threads, self._open_timeline())

    def _open_timeline(self) -> tuple[Recorder, OnSpans] | None:
        if self._steppers.recorder is None:
            return None
        file = TimelineFile(Path(self._settings.timeline), dist.get_rank())

        def on_spans(spans: list[Span], begin_s: float, end_s: float) -> None:
            log_dist(f"deep_optimizer_states: {file.write(spans, begin_s, end_s)}", ranks=[0])

        return self._steppers.recorder, on_spans

    def __str__(self) -> str:
        schedule = self._schedule
        return (
            f"policy {self._settings.policy}, {self._homes.num_subgroups} subgroups in "
            f"{len(schedule.tiles)} tiles, {len(schedule.device_tiles)} of them updated on the "
            f"device, {len(schedule.resident_tiles)} resident there, "
            f"{self._executor.slot_bytes} bytes of slots, CPU lane of {self._steppers.lanes.near}"
        )

    @property
    def last_plan(self) -> Plan:
        """What the last update did, in order."""
        return self._executor.last_plan

    @property
    def device_share(self) -> float:
        """Share of the parameters that the last update stepped on the device, from 0 to 1."""
        plan, tiles = self.last_plan, self._schedule.tiles
        on_device = sum(tiles[idx].numel for idx in {*plan.device_tiles, *plan.resident_tiles})
        return on_device / sum(tile.numel for tile in tiles)

    def forget_failure(self) -> None:
        """Make lanes and buffers ready again after an update that failed."""
        self._steppers.lanes.forget_failure()
        self._executor.reset()
        self._gradients.forget_flushes()

    @property
    def has_shown_needs(self) -> bool:
        """Whether enough updates were made to know what the device has to spare."""
        return self.num_updates >= FIRST_UPDATES

    def launch(
        self, background: Background, order: tuple[int, ...] | None, grad_scale: float
    ) -> None:
        """Step every tile, on the background's thread.

        Args:
            background: Nothing is in flight there.
            order: All tiles in the order in which they are needed, where somebody else waits for
                each; None to wait for all of them here.
            grad_scale: What stock would multiply gradients with.

        Raises:
            UpdateError: The update has been waited for, and failed.
        """
        widened = self._gradients.widened()
        work = self._work(widened, grad_scale)
        executor, update = self._executor, Update(len(work))
        actions = self._schedule.actions(
            frozenset(widened), executor.share, executor.has_room, order
        )
        self.num_updates += 1
        is_repeated = is_due(self.num_updates, self._settings.verify_every)
        sample = Sample(work) if is_repeated else None
        after = executor.caller_events()

        def run() -> None:
            executor.run(work, actions, after, update.issued)
            if sample is not None:
                self._gradients.drain()
                sample.compare(self._steppers.host_adam, self.num_updates)

        background.launch(update, run)
        if is_repeated or order is None:
            background.wait()
        self._gradients.stepped(grad_scale)

    def _work(self, widened: dict[int, Tensor], grad_scale: float) -> list[Work]:
        """What each tile needs.

        Args:
            widened: Gradients of subgroups that are stepped where their state lives, in the type of
                master weights.
            grad_scale: What stock would multiply gradients with.
        """
        grads, tensors, scalars = self._gradients, [], []
        for idx in range(self._homes.num_subgroups):
            grad = widened[idx] if idx in widened else grads.beside_state(idx)
            tensors.append(self._homes.tensors_of(idx, grad))
            scalars.append(self._next_scalars(idx, grad_scale))
        work = []
        for number, tile in enumerate(self._schedule.tiles):
            idx = tile.subgroup
            tail_start = self._homes.tail_start(idx, self._steppers.tail)
            work.append(
                Work(
                    name=f"tile {number} (subgroup {idx})",
                    tensors=tensors[idx].narrow(tile.start, tile.numel),
                    scalars=scalars[idx],
                    tail_start=tail_within(tail_start, tile.start, tile.numel),
                    device_grad=None if idx in widened else grads.on_device(number),
                )
            )
        return work

    def _next_scalars(self, subgroup: int, grad_scale: float) -> AdamScalars:
        adam, step = self._stock.optimizer, self._homes.count_step(subgroup)
        group = adam.param_groups[self._homes.group_of(subgroup)]
        powers = self._beta_powers.at(step, group["betas"])
        return adam_scalars(group, powers, grad_scale, bool(adam.adam_w_mode))


def stand_in_for_step(adam: DeepSpeedCPUAdam) -> None:
    """What others expect of ``DeepSpeedCPUAdam.step``, which is never called.

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
