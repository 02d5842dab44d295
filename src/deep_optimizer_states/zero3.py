"""Our ZeRO-3 optimizer: DeepSpeed's own, with the update phase and the gradient flush replaced.

The only file, beside ``install``, that knows DeepSpeed's internals. Everything not overridden here
(partitioning, reduction, norms, clipping, loss scale, checkpoints) is stock code.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import log_dist
from torch import Tensor

from deep_optimizer_states.config import Settings
from deep_optimizer_states.device.base import Device, Event, PendingBytes, Wait
from deep_optimizer_states.device.emulated import EmulatedDevice, Faults
from deep_optimizer_states.errors import ConfigError, UpdateError
from deep_optimizer_states.executor import Executor, Sizes, Work, copy_all
from deep_optimizer_states.inactive import InactiveGradients
from deep_optimizer_states.kernels.calibrate_tail import find_tail
from deep_optimizer_states.kernels.host import HostAdam
from deep_optimizer_states.kernels.scalars import AdamScalars, BetaPowers, adam_scalars
from deep_optimizer_states.kernels.tensors import AdamTensors
from deep_optimizer_states.memory import check_host_memory, free_host_bytes, local_ranks
from deep_optimizer_states.plan import Plan, subgroup_offsets
from deep_optimizer_states.schedule import Schedule

faults_for_tests: Faults | None = None
"""What the emulated device breaks on purpose; set by tests alone."""


def open_device(tail_mode: int) -> Device:
    """The device that DeepSpeed's accelerator names.

    Raises:
        ConfigError: It is neither CUDA nor the CPU.
    """
    name = get_accelerator().device_name()
    if name == "cuda":
        from deep_optimizer_states.device.cuda import CudaDevice

        return CudaDevice(tail_mode)
    if name == "cpu":
        return EmulatedDevice(HostAdam(tail_mode), faults_for_tests)
    raise ConfigError(f"accelerator '{name}': deep_optimizer_states runs on cuda and cpu")


class InterleavedZeroOptimizer(DeepSpeedZeroOptimizer_Stage3):
    """ZeRO-3 offload whose update is spread over CPU and device, with stock's bits.

    Host memory holds master weights and moments (fp32) and one gradient in the accumulation type,
    14 bytes a parameter. There is no fp32 gradient: both kernels read the 16-bit one and widen it
    themselves. Resident subgroups have all of that on the device instead.

    Args:
        module, init_optimizer, args, kwargs: As DeepSpeed passes them to its own class.
        settings: The checked block of the config.
    """

    fp32_partitioned_groups_flat: list[Tensor]
    grad_partitions_flat_buffer: Tensor
    offload_optimizer_pin_memory: bool

    def __init__(
        self, module: Any, init_optimizer: Any, *args: Any, settings: Settings, **kwargs: Any
    ) -> None:
        self._settings = settings
        self._tail = find_tail(init_optimizer)
        self._host_adam = HostAdam(self._tail.mode)
        self._lanes = open_device(self._tail.mode)
        self._beta_powers = BetaPowers(init_optimizer.defaults["betas"])
        self._grad_events: dict[int, Event] = {}
        self._resident_grads: dict[int, Tensor] = {}
        self._inactive = InactiveGradients(self._grad_home_of_key)
        self._grad_scale = 1.0
        self._active: set[int] = set()
        self._is_window_open = False
        self._pending = PendingBytes(2 * kwargs["reduce_bucket_size"] * 4)
        self._closed = False
        try:
            super().__init__(module, init_optimizer, *args, **kwargs)
            if self.torch_autocast_gradscaler is not None:
                raise ConfigError(
                    "torch_autocast in fp16 scales gradients by itself, which "
                    '"deep_optimizer_states" does not repeat; use torch_autocast in bfloat16, or '
                    'the "fp16" or "bf16" block'
                )
            self._executor = self._build_executor()
        except BaseException:
            self._close_lanes()
            raise

    def _build_executor(self) -> Executor:
        schedule = self._schedule
        sizes = Sizes(
            schedule.slot_numel,
            schedule.staging_numel,
            self.grad_partitions_flat_buffer.dtype,
            self.dtype,
        )
        executor = Executor(sizes, self._lanes, self._host_adam)
        log_dist(
            f"deep_optimizer_states: policy {self._settings.policy}, "
            f"{len(self._subgroup_numels)} subgroups in {len(schedule.tiles)} tiles, "
            f"{len(schedule.device_tiles)} of them updated on the device, "
            f"{len(schedule.resident_tiles)} resident there, {executor.slot_bytes} bytes of slots",
            ranks=[0],
        )
        return executor

    @functools.cached_property
    def _subgroup_numels(self) -> list[int]:
        return [int(numel) for numel in self.fp16_partitioned_groups_flat_numel]

    @functools.cached_property
    def _subgroup_starts(self) -> list[int]:
        return subgroup_offsets(self._subgroup_numels)

    @functools.cached_property
    def _schedule(self) -> Schedule:
        chosen = self._settings
        numels = self._subgroup_numels
        return Schedule.make(numels, chosen.policy, chosen.stride, chosen.ratio, chosen.tile_numel)

    @property
    def last_plan(self) -> Plan:
        """What the last step did, in order."""
        return self._executor.last_plan

    # ---- where the state lives ---------------------------------------------------------------

    def _create_fp32_partitions(self) -> None:
        resident = self._schedule.resident_subgroups
        host_numel = sum(n for i, n in enumerate(self._subgroup_numels) if i not in resident)
        staging_bytes = 2 * self._schedule.staging_numel * self.dtype.itemsize
        check_host_memory(host_numel, staging_bytes, free_host_bytes(), local_ranks())
        super()._create_fp32_partitions()
        for idx, master in enumerate(self.fp32_partitioned_groups_flat):
            # The tensor object is the key of the optimizer's state, so only its storage moves.
            master.data = self._home_of(idx, master.data)

    def initialize_optimizer_states(self) -> None:
        """Create the moments where they live; no fp32 gradients."""
        for idx, master in enumerate(self.fp32_partitioned_groups_flat):
            self.optimizer.state[master] = {
                "step": 0,
                "exp_avg": self._home_of(idx, torch.zeros_like(master.data)),
                "exp_avg_sq": self._home_of(idx, torch.zeros_like(master.data)),
            }
            if idx in self._schedule.resident_subgroups:
                grads = self._lanes.empty_device(master.numel(), self.gradient_accumulation_dtype)
                self._resident_grads[idx] = grads.zero_()

    def _home_of(self, subgroup: int, source: Tensor) -> Tensor:
        if subgroup in self._schedule.resident_subgroups:
            home = self._lanes.empty_device(source.numel(), source.dtype)
        else:
            home = self._lanes.empty_host(source.numel(), source.dtype)
        return home.copy_(source)

    def _rigid_load_state_dict(
        self, state_dict: dict[str, Any], load_optimizer_states: bool = True
    ) -> None:
        homes = [dict(self.optimizer.state[p]) for p in self.fp32_partitioned_groups_flat]
        super()._rigid_load_state_dict(state_dict, load_optimizer_states)
        self._return_home(homes)

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir: str) -> None:
        """Load a universal checkpoint; what it replaced goes back to where it lives."""
        homes = [dict(self.optimizer.state[p]) for p in self.fp32_partitioned_groups_flat]
        super().load_hp_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir)
        self._return_home(homes)

    def _return_home(self, homes: list[dict[str, Any]]) -> None:
        """Copy loaded moments into the tensors that held them before loading.

        torch's ``load_state_dict`` puts its own tensors in place of ours; a checkpoint from before
        the first step has none.
        """
        for master, home in zip(self.fp32_partitioned_groups_flat, homes, strict=True):
            loaded = self.optimizer.state.setdefault(master, {})
            for key in ("exp_avg", "exp_avg_sq"):
                if key not in loaded:
                    home[key].zero_()
                elif loaded[key] is not home[key]:
                    home[key].copy_(loaded[key])
                loaded[key] = home[key]
            loaded["step"] = int(loaded.get("step", 0))

    def _setup_for_real_optimizer(self) -> None:
        # Stock would page-lock its gradient buffer, rounded up to a power of two; ours replaces it.
        pin, self.offload_optimizer_pin_memory = self.offload_optimizer_pin_memory, False
        try:
            super()._setup_for_real_optimizer()
        finally:
            self.offload_optimizer_pin_memory = pin
        stock = self.grad_partitions_flat_buffer
        flat = self._lanes.empty_host(stock.numel(), stock.dtype).zero_()
        self.grad_partitions_flat_buffer = flat
        views = self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        start = 0
        for param in itertools.chain.from_iterable(self.fp16_groups):
            views[param.ds_id] = flat.narrow(0, start, param.partition_numel())
            start += param.partition_numel()

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Stock moves buffers that gradients may still be on their way to."""
        self._drain_grads()
        super().offload_states(*args, **kwargs)

    # ---- gradients, during backward ----------------------------------------------------------

    def _grad_home(self, param: Any) -> Tensor:
        return self._grad_home_of_key(self.get_param_id(param))

    def _grad_home_of_key(self, key: int) -> Tensor:
        subgroup, offset, numel = self.grad_position[key]
        return self._subgroup_grads(subgroup).narrow(0, offset, numel)

    def _subgroup_grads(self, subgroup: int) -> Tensor:
        if subgroup in self._resident_grads:
            return self._resident_grads[subgroup]
        flat = self.grad_partitions_flat_buffer
        return flat.narrow(0, self._subgroup_starts[subgroup], self._subgroup_numels[subgroup])

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[Tensor]) -> None:
        """Flush this rank's share of reduced gradients to their home, without waiting for it.

        Args:
            params_to_release: Parameters whose gradients were reduced.
            grad_partitions: This rank's slice of each, 1-D, on the device. Views of a bucket that
                the next reduction overwrites.
        """
        self._is_window_open = True
        for param, partition in zip(params_to_release, grad_partitions, strict=True):
            if self._holds_real_data(param):
                self._offload_boundary_param_ids.add(param.ds_id)
                self._flush_grad(param, partition)
            if param.grad is not None and not get_accelerator().is_synchronized_device():
                param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None

    def _holds_real_data(self, param: Any) -> bool:
        """Whether this rank's partition has more than padding."""
        first = param.partition_numel() * self._get_param_partition_rank(param)
        return bool(first < param.ds_numel)

    def _flush_grad(self, param: Any, partition: Tensor) -> None:
        home = self._grad_home(param).narrow(0, 0, partition.numel())
        if self.micro_step_id == 0:
            value = partition.to(home.dtype, copy=True)
        else:
            # None: this parameter's first gradient ever comes late in a window.
            if (flushed := self._grad_events.get(param.ds_id)) is not None:
                self._lanes.caller_waits(flushed, Wait.GRAD_HOME)
            value = home.to(partition.device, copy=True, non_blocking=True)
            value.add_(partition.to(home.dtype).view(value.shape))
        if self.is_gradient_accumulation_boundary():
            self._keep_norm(param, value)
        lane = self._lanes.grads
        lane.wait(self._lanes.record_caller(), Wait.GRAD_READY)
        lane.submit(
            f"gradient flush of parameter {param.ds_id}",
            lambda: copy_all((home,), (value,)),
            uses=(value,),
        )
        self._grad_events[param.ds_id] = event = lane.record()
        self._pending.add(event, value.nbytes)

    def _keep_norm(self, param: Any, grad: Tensor) -> None:
        self.norm_for_param_grads[self.get_param_id(param)] = self._constant_buffered_norm2(grad)

    def _drain_grads(self) -> None:
        if not self._closed:
            self._lanes.grads.record().synchronize()

    def _finalize_offload_gradient_accumulation(self) -> None:
        # Boundary set by hand, after backward: the norms are taken from the gradients' homes.
        self._drain_grads()
        for group in self.fp16_groups:
            for param in group:
                if param.ds_id in self._offload_boundary_param_ids:
                    home = self._grad_home(param)
                    self._keep_norm(param, home.to(get_accelerator().current_device_name()))

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Stock scans the host's gradients; resident ones are shown to it there."""
        self._drain_grads()
        flat = self.grad_partitions_flat_buffer
        for idx, grads in self._resident_grads.items():
            flat.narrow(0, self._subgroup_starts[idx], grads.numel()).copy_(grads)
        return bool(super().has_overflow(partition_gradients))

    # ---- the update phase --------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        """One update; stock's own, whose loop over subgroups calls the methods below.

        Raises:
            UpdateError: A lane failed, or a parameter got gradients in this accumulation window but
                none in its last micro-batch: stock would drop them and use an older one again.
        """
        self._active = set(self.norm_for_param_grads)
        self._refuse_lost_grads()
        super().step(closure)
        self._is_window_open = False
        if self.overflow:
            self._inactive.skipped(self._keys_of_params(active=True))

    def _refuse_lost_grads(self) -> None:
        lost = [
            self.param_names.get(param, param.ds_id)
            for group in self.fp16_groups
            for param in group
            if param.ds_id in self._offload_boundary_param_ids
            and self.get_param_id(param) not in self._active
        ]
        if lost:
            raise UpdateError(
                f"parameters {lost[:5]} ({len(lost)} in all) got gradients in this accumulation "
                "window but none in its last micro-batch. Stock DeepSpeed would drop them and use "
                "an older gradient again; use every parameter in the last micro-batch, or "
                "gradient_accumulation_steps 1"
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
            probe = torch.zeros(1)
            probe.grad = torch.ones(1)
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
        inactive = self._keys_of_params(active=False)
        if inactive:
            self._drain_grads()
        stale = self._inactive.collect(inactive)
        widened = {self.grad_position[key][0] for key in stale}
        subgroups = [
            self._tensors_of(idx, stale if idx in widened else {})
            for idx in range(len(self._subgroup_numels))
        ]
        scalars = [self._scalars_of(idx) for idx in range(len(self._subgroup_numels))]
        work = []
        for number, tile in enumerate(self._schedule.tiles):
            tail_start = self._tail.start(self._subgroup_numels[tile.subgroup]) - tile.start
            work.append(
                Work(
                    name=f"tile {number} (subgroup {tile.subgroup})",
                    tensors=subgroups[tile.subgroup].narrow(tile.start, tile.numel),
                    scalars=scalars[tile.subgroup],
                    tail_start=min(max(tail_start, 0), tile.numel),
                )
            )
        actions = self._schedule.actions(frozenset(widened), self._executor.is_slot_free)
        self._executor.run(work, actions)
        self._inactive.stepped(self._keys_of_params(active=True), self._grad_scale)

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
        grad = self._subgroup_grads(subgroup)
        if stale:
            grad = grad.to(torch.float32, copy=True)
            for key, gradient in stale.items():
                owner, offset, numel = self.grad_position[key]
                if owner == subgroup:
                    grad.narrow(0, offset, numel).copy_(gradient)
        weights = self.fp16_partitioned_groups_flat[subgroup].data
        return AdamTensors(master.data, state["exp_avg"], state["exp_avg_sq"], grad, weights)

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        # The executor has written the 16-bit weights; stock's copy would repeat it.
        self._unflatten_partitioned_parameters(sub_group_id)

    # ---- access to gradients -----------------------------------------------------------------

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        """This rank's gradients widened to fp32: ``[subgroup][parameter]``, each 1-D."""
        return {
            group_idx: {idx: self._fp32_grad(param) for idx, param in enumerate(group)}
            for group_idx, group in enumerate(self.fp16_groups)
        }

    def _get_fp32_grad_state_partition(
        self, param: Any, release_swap_buffers: bool
    ) -> tuple[Tensor, int]:
        return self._fp32_grad(param), self.grad_position[self.get_param_id(param)][0]

    def _fp32_grad(self, param: Any) -> Tensor:
        """What stock holds in fp32: after a step the scaled gradient, before it the raw one."""
        self._drain_grads()
        key = self.get_param_id(param)
        grad = self._inactive.current(key)
        if grad is not None and key not in self._active:
            return grad.clone()
        home = self._grad_home(param).to(torch.float32, copy=True)
        was_stepped = not self._is_window_open and not self.overflow
        return home.mul_(self._grad_scale) if was_stepped else home

    def _refuse_to_write_grads(self, *_args: Any, **_kwargs: Any) -> None:
        raise ConfigError(
            "gradients cannot be set from outside: there is no fp32 gradient to write to; "
            'set "deep_optimizer_states.enabled" to false to change gradients before a step'
        )

    set_fp32_grad_for_param = _refuse_to_write_grads
    set_local_grad_for_param = _refuse_to_write_grads
    update_fp32_grad_for_param_vectorized = _refuse_to_write_grads

    def destroy(self) -> None:
        """End lanes, unlock host memory, free device slots. A second call changes nothing."""
        try:
            super().destroy()
        finally:
            self._close_lanes()
            self.__dict__.pop("_executor", None)

    def _close_lanes(self) -> None:
        if not self._closed:
            self._closed = True
            self._lanes.close()
