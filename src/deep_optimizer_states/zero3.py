"""Our ZeRO-3 optimizer: DeepSpeed's own, with the update phase and the gradient flush replaced.

With ``zero3_state``, ``zero3_gate``, ``zero3_gradients`` and ``install`` the only file that knows
DeepSpeed's internals. What is not overridden (partitioning, reduction, clipping, loss scale,
checkpoints) is stock code.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import log_dist, logger
from torch import Tensor

from deep_optimizer_states.auto import settle_policy
from deep_optimizer_states.config import Settings
from deep_optimizer_states.device.base import Device
from deep_optimizer_states.device.emulated import EmulatedDevice, Faults
from deep_optimizer_states.device.self_check import check_device_adam
from deep_optimizer_states.errors import ConfigError, UpdateError
from deep_optimizer_states.executor import Executor, OnSpans, Sizes, Work, copy_all
from deep_optimizer_states.gate import Update
from deep_optimizer_states.kernels.calibrate_tail import find_tail
from deep_optimizer_states.kernels.scalars import AdamScalars, BetaPowers, adam_scalars
from deep_optimizer_states.kernels.tensors import AdamTensors, tail_within
from deep_optimizer_states.kernels.torch_adam import make_host_adam
from deep_optimizer_states.memory import local_ranks
from deep_optimizer_states.plan import Plan, Tile
from deep_optimizer_states.schedule import Schedule
from deep_optimizer_states.timeline import Recorder, Span, TimelineFile
from deep_optimizer_states.verify import FIRST_UPDATES, Sample, is_due
from deep_optimizer_states.zero3_state import StateHomes

faults_for_tests: Faults | None = None
"""What the emulated device breaks on purpose; set by tests alone."""


def open_device(tail_mode: int, recorder: Recorder | None = None) -> Device:
    """The device that DeepSpeed's accelerator names; spans of its work go to ``recorder``.

    Raises:
        ConfigError: It is neither CUDA nor the CPU.
    """
    name = get_accelerator().device_name()
    if name == "cuda":
        from deep_optimizer_states.device.cuda import CudaDevice

        return CudaDevice(tail_mode, recorder)
    if name == "cpu":
        return EmulatedDevice(make_host_adam(tail_mode), faults_for_tests, recorder)
    raise ConfigError(f"accelerator '{name}': deep_optimizer_states runs on cuda and cpu")


class InterleavedZeroOptimizer(StateHomes):
    """ZeRO-3 offload whose update is spread over CPU and device, with stock's bits.

    Host memory holds master weights and moments (fp32) and one gradient in the accumulation type,
    14 bytes a parameter. There is no fp32 gradient: both kernels read the 16-bit one and widen it
    themselves. Resident subgroups have all of that on the device instead.

    Args:
        module, init_optimizer, args, kwargs: As DeepSpeed passes them to its own class.
        settings: The checked block of the config.
        is_managed: Whether DeepSpeed knows, in a backward, if the accumulation window ends with it.
    """

    def __init__(
        self,
        module: Any,
        init_optimizer: Any,
        *args: Any,
        settings: Settings,
        is_managed: bool,
        **kwargs: Any,
    ) -> None:
        self._settings = settings
        self._tail = find_tail(init_optimizer)
        self._host_adam = make_host_adam(self._tail.mode)
        self._recorder = Recorder() if settings.timeline else None
        lanes = open_device(self._tail.mode, self._recorder)
        self._beta_powers = BetaPowers(init_optimizer.defaults["betas"])
        self._closed = False
        self._num_updates = 0
        self._may_keep_grads = settings.keep_grads_on_device
        self._change = contextlib.ExitStack()
        try:
            super().__init__(lanes, is_managed, module, init_optimizer, *args, **kwargs)
            if self.torch_autocast_gradscaler is not None:
                raise ConfigError(
                    "torch_autocast in fp16 scales gradients by itself, which "
                    '"deep_optimizer_states" does not repeat; use torch_autocast in bfloat16, or '
                    'the "fp16" or "bf16" block'
                )
            self._executor = self._build_executor()
            self._gate_parameters()
        except BaseException:
            with contextlib.suppress(UpdateError):  # it says less than what happened first
                self._close_lanes()
            raise

    def _build_executor(self) -> Executor:
        schedule, grad_dtype = self._schedule, self.grad_partitions_flat_buffer.dtype
        self._check_device(grad_dtype)
        sizes = Sizes(schedule.slot_numel, schedule.staging_numel, grad_dtype, self.dtype)
        self._background.prepare(self._cores.bind_this_thread)
        executor = Executor(
            sizes, self._lanes, self._host_adam, self._cores.num_threads, self._open_timeline()
        )
        log_dist(
            f"deep_optimizer_states: policy {self._settings.policy}, "
            f"{len(self._subgroup_numels)} subgroups in {len(schedule.tiles)} tiles, "
            f"{len(schedule.device_tiles)} of them updated on the device, "
            f"{len(schedule.resident_tiles)} resident there, {executor.slot_bytes} bytes of slots, "
            f"CPU lane of {self._cores}",
            ranks=[0],
        )
        return executor

    def _check_device(self, grad_dtype: torch.dtype) -> None:
        dtypes = set()
        if self._schedule.slot_numel:
            dtypes.add(grad_dtype)
        if self._schedule.resident_tiles:
            dtypes |= {grad_dtype, torch.float32}  # fp32: of parameters that took no part
        for dtype in dtypes:
            check_device_adam(
                self._lanes,
                self._host_adam,
                self._tail,
                bool(self.optimizer.adam_w_mode),
                (dtype, self.dtype),
            )
        if self._recorder is not None:
            self._recorder.take()  # no part of any update

    def _open_timeline(self) -> tuple[Recorder, OnSpans] | None:
        if self._recorder is None:
            return None
        file = TimelineFile(Path(self._settings.timeline), dist.get_rank())

        def on_spans(spans: list[Span], begin_s: float, end_s: float) -> None:
            log_dist(f"deep_optimizer_states: {file.write(spans, begin_s, end_s)}", ranks=[0])

        return self._recorder, on_spans

    @functools.cached_property
    def _schedule(self) -> Schedule:
        has_gpu = get_accelerator().device_name() == "cuda"
        numels = self._subgroup_numels
        chosen, why = settle_policy(self._settings, numels, local_ranks(), has_gpu)
        if why:
            log_dist(f"deep_optimizer_states: {why}", ranks=[0])
        self._settings = chosen
        return Schedule.make(
            numels,
            chosen.policy,
            chosen.stride,
            chosen.ratio,
            chosen.tile_numel,
            self._runs_apart if chosen.just_in_time_forward else (),
        )

    @property
    def last_plan(self) -> Plan:
        """What the last step did, in order."""
        return self._executor.last_plan

    def step(self, closure: Any = None) -> None:
        """One update; stock's own, whose loop over subgroups calls the methods below.

        Raises:
            UpdateError: A lane failed, in this update or in an earlier one.
        """
        self._finish_update()
        self._active = set(self.norm_for_param_grads)
        self._warn_of_dropped_grads()
        if self._may_keep_grads and self._num_updates >= FIRST_UPDATES:
            self._may_keep_grads = False  # once: from then on host memory is not kept up to date
            self._use_spare_memory()
        with self._background.under_way("engine.step()"), contextlib.ExitStack() as self._change:
            super().step(closure)
        self._is_window_open = False
        if self.overflow:
            self._inactive.skipped(self._keys_of_params(active=True))

    def _warn_of_dropped_grads(self) -> None:
        if self._has_warned or not self._is_managed:
            return
        dropped = [
            self.param_names.get(param, param.ds_id)
            for group in self.fp16_groups
            for param in group
            if param.ds_id in self._offload_boundary_param_ids
            and self.get_param_id(param) not in self._active
        ]
        if dropped:
            self._has_warned = True
            logger.warning(
                f"deep_optimizer_states: parameters {dropped[:5]} ({len(dropped)} in all) got "
                "gradients in this accumulation window but none in its last micro-batch. As stock "
                "DeepSpeed does, the update drops them and uses an older gradient again. Use every "
                'parameter in the last micro-batch, or "managed_gradient_accumulation": false, '
                "which drops nothing. Said once"
            )

    def _use_spare_memory(self) -> None:
        """Keep gradients on the device where only its memory stands against it."""
        candidates = self._schedule.slot_subgroups
        chosen, spare = [], self._lanes.spare_bytes()
        for subgroup in candidates:
            spare -= self._host_grads(subgroup).nbytes
            if spare >= 0:
                chosen.append(subgroup)
        both = chosen if self._schedule.dynamic else []
        taken = self._keep_grads_on_device([] if both else chosen, both)
        if candidates:
            log_dist(
                f"deep_optimizer_states: gradients of {len(chosen)} of {len(candidates)} subgroups "
                f"stay on the device, {taken} bytes",
                ranks=[0],
            )

    def _keys_of_params(self, active: bool) -> list[int]:
        return [
            self.get_param_id(param)
            for group in self.fp16_groups
            for param in group
            if self._holds_real_data(param) and (self.get_param_id(param) in self._active) == active
        ]

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Any) -> None:
        """Ask stock for the factor it would multiply gradients with; the kernels apply it."""
        if sub_group_id == 0:
            # The caller may have set another default type or device.
            probe = torch.zeros(1, dtype=torch.float32, device="cpu")
            probe.grad = torch.ones_like(probe)
            groups = self.fp32_partitioned_groups_flat
            self.fp32_partitioned_groups_flat = [probe]
            try:
                super().unscale_and_clip_grads(0, total_norm)
            finally:
                self.fp32_partitioned_groups_flat = groups
            self._grad_scale = float(probe.grad)

    def _optimizer_step(self, sub_group_id: int) -> None:
        if sub_group_id == 0:
            self._update_all_subgroups()

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def _update_all_subgroups(self) -> None:
        self._stand_in_for_optimizer_step()
        # What is cut short from here on leaves wrong state behind.
        self._change.enter_context(self._background.changing("engine.step()"))
        inactive = self._keys_of_params(active=False)
        if inactive:
            self._drain_grads()
        stale = self._inactive.collect(inactive)
        widened = frozenset(self.grad_position[key][0] for key in stale)
        work = self._work(stale, widened)
        executor, update = self._executor, Update(len(work))
        if self._settings.just_in_time_forward:
            self._learn_order()
        actions = self._schedule.actions(widened, executor.share, executor.has_room, self._order)
        self._num_updates += 1
        is_repeated = is_due(self._num_updates, self._settings.verify_every)
        sample = Sample(work) if is_repeated else None
        after = executor.caller_events()

        def run() -> None:
            executor.run(work, actions, after, update.issued)
            if sample is not None:
                self._drain_grads()
                sample.compare(self._host_adam, self._num_updates)

        self._update = update
        self._background.launch(update, run)
        if is_repeated or not self._settings.just_in_time_forward:
            self._finish_update()
        self._inactive.stepped(self._keys_of_params(active=True), self._grad_scale)

    def _work(self, stale: dict[int, Tensor], widened: frozenset[int]) -> list[Work]:
        """What each tile needs.

        Args:
            stale: fp32 gradients of parameters that took no part, by key.
            widened: Their subgroups, which are stepped where their state lives.
        """
        subgroups = [
            self._tensors_of(idx, stale if idx in widened else {})
            for idx in range(len(self._subgroup_numels))
        ]
        scalars = [self._scalars_of(idx) for idx in range(len(self._subgroup_numels))]
        work = []
        for number, tile in enumerate(self._schedule.tiles):
            idx = tile.subgroup
            tail_start = self._tail.start(self._subgroup_numels[idx])
            work.append(
                Work(
                    name=f"tile {number} (subgroup {idx})",
                    tensors=subgroups[idx].narrow(tile.start, tile.numel),
                    scalars=scalars[idx],
                    tail_start=tail_within(tail_start, tile.start, tile.numel),
                    device_grad=None if idx in widened else self._device_grad(number, tile),
                )
            )
        return work

    def _device_grad(self, number: int, tile: Tile) -> Tensor | None:
        """A tile's gradient on the device, where it passes through a slot and does not need one."""
        idx = tile.subgroup
        if idx in self._copied_grads:
            return self._copied_grads[idx].narrow(0, tile.start, tile.numel)
        if idx not in self._device_grads or idx in self._schedule.resident_subgroups:
            return None
        grad = self._device_grads[idx].narrow(0, tile.start, tile.numel)
        if number in self._schedule.device_tiles:
            return grad
        # Too small for the device: the CPU steps it, and reads its gradient from host memory.
        home = self._host_grads(idx).narrow(0, tile.start, tile.numel)
        self._lanes.grads.submit(f"gradient of tile {number}", lambda: copy_all([home], [grad]))
        return None

    def _stand_in_for_optimizer_step(self) -> None:
        """What others expect of ``DeepSpeedCPUAdam.step``, which is never called.

        Raises:
            ConfigError: A hook was registered on it.
        """
        optimizer = self.optimizer
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            raise ConfigError(
                "the optimizer has hooks (register_step_pre_hook, register_step_post_hook), which "
                "would not be called: its step is replaced; remove them and do their work before "
                "or after engine.step()"
            )
        optimizer._opt_called = True  # or torch's lr_scheduler warns that no step was made

    def _scalars_of(self, subgroup: int) -> AdamScalars:
        state = self.optimizer.state[self.fp32_partitioned_groups_flat[subgroup]]
        state["step"] += 1
        group = self.optimizer.param_groups[self.sub_group_to_group_id[subgroup]]
        powers = self._beta_powers.at(state["step"], group["betas"])
        decoupled = bool(self.optimizer.adam_w_mode)
        return adam_scalars(group, powers, self._grad_scale, decoupled)

    def _tensors_of(self, subgroup: int, stale: dict[int, Tensor]) -> AdamTensors:
        master = self.fp32_partitioned_groups_flat[subgroup]
        state = self.optimizer.state[master]
        is_resident = subgroup in self._schedule.resident_subgroups
        grad = self._subgroup_grads(subgroup) if is_resident else self._host_grads(subgroup)
        if stale:
            final = self._subgroup_grads(subgroup)
            grad = final.to(master.device, torch.float32, copy=True)
            for key, gradient in stale.items():
                owner, offset, numel = self.grad_position[key]
                if owner == subgroup:
                    grad.narrow(0, offset, numel).copy_(gradient)
        weights = self.fp16_partitioned_groups_flat[subgroup].data
        return AdamTensors(master.data, state["exp_avg"], state["exp_avg_sq"], grad, weights)

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        # The executor has written the 16-bit weights; stock's copy would repeat it.
        self._unflatten_partitioned_parameters(sub_group_id)

    def destroy(self) -> None:
        """End lanes, unlock host memory, free device slots. A second call changes nothing.

        Raises:
            UpdateError: The update in flight failed, which nobody was told before.
        """
        is_known = self._closed or self._background.has_failed
        try:
            with self.overlooking_failure():
                super().destroy()
            if not is_known:
                self._background.check()
        finally:
            self._close_lanes()
            self.__dict__.pop("_executor", None)

    def _close_lanes(self) -> None:
        if not self._closed:
            self._closed = True
            self._open_gates()
            self._lanes.close()
