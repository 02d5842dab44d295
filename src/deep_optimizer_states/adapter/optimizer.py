"""What our optimizers of all ZeRO stages have in common."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from deep_optimizer_states.adapter.autograd_runs import stop_listening
from deep_optimizer_states.adapter.checkpoint import Checkpoints
from deep_optimizer_states.adapter.homes import StateHomes
from deep_optimizer_states.adapter.launcher import Chosen, Gradients, UpdateLauncher
from deep_optimizer_states.adapter.steppers import Steppers
from deep_optimizer_states.config import BLOCK, DEVICE_MEMORY, Settings
from deep_optimizer_states.core.cache import TileCache, Types
from deep_optimizer_states.core.kernels.adam import AdamTensors
from deep_optimizer_states.core.schedule import Schedule
from deep_optimizer_states.core.update_worker import UpdateWorker
from deep_optimizer_states.errors import ConfigError, UpdateError

_NO_BACKWARD = -1
"""The number that torch gives while no backward runs on this thread."""


class InterleavedOptimizer:
    """What our optimizers of all ZeRO stages have in common, to stand before stock's class.

    It owns the lanes and the thread of updates. Whoever looks at state, stock's own methods too,
    sees the finished update.
    """

    optimizer: Any
    _launcher: UpdateLauncher
    _backward_active_depth: int
    reset_cpu_buffers: Callable[[], None]
    exit_backward: Callable[[], None]
    checkpoints: Checkpoints | None = None
    """Saves in the background, where the settings ask for them."""

    @property
    def chosen_policies(self) -> Sequence[Chosen]:
        """Policies in the order in which they were chosen, see :class:`UpdateLauncher`."""
        return tuple(self._launcher.chosen)

    _is_closed = False
    _is_reading = False
    _had_backward_cut_short = False
    """Whether an error came out of a backward of this window."""
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

    def _make_launcher(
        self, schedule: Schedule, homes: StateHomes, gradients: Gradients, cache: TileCache
    ) -> UpdateLauncher:
        stock: Any = self
        launcher = UpdateLauncher(
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
                self._settings, homes.state_on_host, lambda: launcher.order
            )
            launcher.cache.before_overwrite = self.checkpoints.release
        return launcher

    def stepping(self, engine: Any) -> contextlib.AbstractContextManager[None]:
        """Make a step of ``engine`` fail for good that is cut short after its update has begun.

        The update, the engine's counters and the learning rate go together.
        """
        launcher, steps, micro_steps = self._launcher, engine.global_steps, engine.micro_steps
        before = launcher.num_updates, launcher.is_begun

        def is_half_done() -> bool:
            # Of what comes after the counters nothing depends but the next window's end.
            is_counted = engine.global_steps > steps and (
                engine.micro_steps > micro_steps or engine.gradient_accumulation_steps() == 1
            )
            return (launcher.num_updates, launcher.is_begun) != before and not is_counted

        return self.background.changing("engine.step()", is_half_done)

    @property
    def is_cut_short(self) -> bool:
        """Return whether a step, or a backward of whoever's, was cut short in this window.

        DeepSpeed's own optimizer collects and counts on then, and after a load too.
        """
        return self.background.has_failed or self._is_window_lost

    @property
    def _is_window_lost(self) -> bool:
        launcher: UpdateLauncher | None = self.__dict__.get("_launcher")
        is_lost = launcher is not None and launcher.has_lost_gradients
        return is_lost or self._is_backward_cut_short

    @property
    def _is_backward_cut_short(self) -> bool:
        # The depth alone says little: DeepSpeed leaves one behind where a backward of another
        # engine, or torch.autograd.grad, comes through this engine's weights.
        return self._had_backward_cut_short and self._backward_active_depth > 0

    def before_autograd(self) -> int:
        """Hear that autograd begins a run; return how many backwards of this engine are open."""
        return self._backward_active_depth

    def after_failed_autograd(self, before: int) -> None:
        """Hear that an error came out of a run, or of what DeepSpeed does after one."""
        if self._backward_active_depth > before:
            self._had_backward_cut_short = True

    def hear_of_lost_gradients(self) -> None:
        """Wait for gradients on their way; the window is lost if one of them does not arrive."""
        launcher: UpdateLauncher | None = self.__dict__.get("_launcher")
        if launcher is not None:
            with contextlib.suppress(UpdateError):
                launcher.drain()

    def _refuse_half_a_backward(self) -> None:
        """Refuse to add gradients of a backward that was cut short to others, or to step by them.

        Raises:
            UpdateError: An error came out of the backward before.
        """
        if self._is_backward_cut_short and torch.is_grad_enabled() and not is_in_backward():
            raise UpdateError(
                "the backward before was cut short by an error, so that the gradients of this "
                "window are not whole: go back to a checkpoint (engine.load_checkpoint), or give "
                "the window up (engine.optimizer.zero_grad())"
            )

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Drop gradients as stock does; of a window that is not whole, all that it left."""
        if not (is_in_backward() or self.background.is_running):  # an update hears of it itself
            self.hear_of_lost_gradients()
        if self._is_window_lost and not is_in_backward():
            self._forget_window()
        stock: Any = super()
        stock.zero_grad(*args, **kwargs)

    def _forget_window(self) -> None:
        """Let the next backward be the first of a window, as it is after a step."""
        launcher: UpdateLauncher | None = self.__dict__.get("_launcher")
        if launcher is not None:  # else the engine is destroyed
            launcher.forget_flushes()
        self.reset_cpu_buffers()
        while self._backward_active_depth > 0:
            self.exit_backward()
        self._had_backward_cut_short = False

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
        launcher: UpdateLauncher | None = self.__dict__.get("_launcher")
        if launcher is None or self.background.is_under_way or self.background.has_failed:
            return
        if self._is_reading:
            launcher.cache.flush()
        else:
            launcher.cache.release()

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
        launcher, taken = self._launcher, 0
        with contextlib.suppress(UpdateError):  # it is raised by whatever is called next
            if not launcher.is_begun:
                self.background.wait()
            with self.background.changing("giving device memory back"):
                taken = launcher.cache.run_out()
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
        launcher: UpdateLauncher | None = self.__dict__.get("_launcher")
        is_begun = launcher is not None and launcher.is_begun
        is_known = self._is_closed or self.background.has_failed or is_begun
        if self.checkpoints is not None:
            self.checkpoints.wait()
        try:
            with self.background.overlooking_failure():
                if launcher is not None:
                    launcher.cache.close()
                yield
            if not is_known:
                self.background.check()
        finally:
            self._close()
            self.__dict__.pop("_launcher", None)

    def _close(self) -> None:
        """End the threads. What was cut short goes on when it is called again."""
        if self._is_closed:
            return
        stop_listening(self)
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
