"""Our ZeRO-3 optimizer: DeepSpeed's own, with the update phase and the gradient flush replaced.

The only file, beside ``install``, that knows DeepSpeed's internals. Everything not overridden here
(partitioning, reduction, norms, clipping, loss scale, checkpoints) is stock code.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import log_dist
from torch import Tensor

from deep_optimizer_states.config import Settings
from deep_optimizer_states.device.base import Device, Event, Wait
from deep_optimizer_states.device.emulated import EmulatedDevice, Faults
from deep_optimizer_states.errors import ConfigError
from deep_optimizer_states.executor import Executor, Subgroup, copy_all
from deep_optimizer_states.kernels.calibrate_tail import find_tail
from deep_optimizer_states.kernels.host import HostAdam, Tail
from deep_optimizer_states.kernels.scalars import BetaPowers, adam_scalars
from deep_optimizer_states.plan import build_plan, choose_device_subgroups, subgroup_offsets

faults_for_tests: Faults | None = None
"""What the emulated device breaks on purpose; set by tests alone."""


def open_device(tail: Tail) -> Device:
    """The device that DeepSpeed's accelerator names.

    Raises:
        ConfigError: It is neither CUDA nor the CPU.
    """
    name = get_accelerator().device_name()
    if name == "cuda":
        from deep_optimizer_states.device.cuda import CudaDevice

        return CudaDevice(tail)
    if name == "cpu":
        return EmulatedDevice(HostAdam(tail), faults_for_tests)
    raise ConfigError(f"accelerator '{name}': deep_optimizer_states runs on cuda and cpu")


class InterleavedZeroOptimizer(DeepSpeedZeroOptimizer_Stage3):
    """ZeRO-3 offload whose update is spread over CPU and device, with stock's bits.

    Host memory holds master weights and moments (fp32) and one gradient in the accumulation type.
    There is no fp32 gradient: both kernels read the 16-bit one and widen it themselves.

    Args:
        module, init_optimizer, args, kwargs: As DeepSpeed passes them to its own class.
        settings: The checked block of the config.
    """

    fp32_partitioned_groups_flat: list[Tensor]

    def __init__(
        self, module: Any, init_optimizer: Any, *args: Any, settings: Settings, **kwargs: Any
    ) -> None:
        self._settings = settings
        tail = find_tail(init_optimizer)
        self._host_adam = HostAdam(tail)
        self._lanes = open_device(tail)
        self._beta_powers = BetaPowers(init_optimizer.defaults["betas"])
        self._grad_events: dict[int, Event] = {}
        self._grad_scale = 1.0
        try:
            super().__init__(module, init_optimizer, *args, **kwargs)
            self._executor = self._build_executor()
        except BaseException:
            self._lanes.close()
            raise

    def _build_executor(self) -> Executor:
        numels = self._subgroup_numels
        settings = self._settings
        chosen = choose_device_subgroups(len(numels), settings.policy, settings.stride)
        executor = Executor(
            build_plan(len(numels), chosen),
            numels,
            (self.grad_partitions_flat_buffer.dtype, self.dtype),
            self._lanes,
            self._host_adam,
        )
        log_dist(
            f"deep_optimizer_states: policy {settings.policy}, {len(chosen)} of {len(numels)} "
            f"subgroups updated on the device, {executor.slot_bytes} bytes of slots",
            ranks=[0],
        )
        return executor

    @property
    def _subgroup_numels(self) -> list[int]:
        return [int(numel) for numel in self.fp16_partitioned_groups_flat_numel]

    @functools.cached_property
    def _subgroup_starts(self) -> list[int]:
        return subgroup_offsets(self._subgroup_numels)

    # ---- where the state lives ---------------------------------------------------------------

    def _create_fp32_partitions(self) -> None:
        super()._create_fp32_partitions()
        for master in self.fp32_partitioned_groups_flat:
            # The tensor object is the key of the optimizer's state, so only its storage moves.
            master.data = self._host_copy(master.data)

    def initialize_optimizer_states(self) -> None:
        """Create the moments in host memory for overlapping copies; no fp32 gradients."""
        for master in self.fp32_partitioned_groups_flat:
            self.optimizer.state[master] = {
                "step": 0,
                "exp_avg": self._host_copy(torch.zeros_like(master.data)),
                "exp_avg_sq": self._host_copy(torch.zeros_like(master.data)),
            }

    def _host_copy(self, source: Tensor) -> Tensor:
        home = self._lanes.empty_host(source.numel(), source.dtype)
        return home.copy_(source)

    def _rigid_load_state_dict(
        self, state_dict: dict[str, Any], load_optimizer_states: bool = True
    ) -> None:
        homes = [dict(self.optimizer.state[p]) for p in self.fp32_partitioned_groups_flat]
        super()._rigid_load_state_dict(state_dict, load_optimizer_states)
        for master, home in zip(self.fp32_partitioned_groups_flat, homes, strict=True):
            # torch's load_state_dict puts its own tensors in place of ours; a checkpoint from
            # before the first step has none.
            loaded = self.optimizer.state.setdefault(master, {"step": 0})
            for key in ("exp_avg", "exp_avg_sq"):
                if key not in loaded:
                    loaded[key] = torch.zeros_like(home[key])
                if loaded[key] is not home[key]:
                    loaded[key] = home[key].copy_(loaded[key])
            loaded["step"] = int(loaded["step"])

    # ---- gradients, during backward ----------------------------------------------------------

    def _grad_home(self, param: Any) -> Tensor:
        subgroup, offset, numel = self.grad_position[self.get_param_id(param)]
        start = self._subgroup_starts[subgroup] + offset
        flat: Tensor = self.grad_partitions_flat_buffer
        return flat.narrow(0, start, numel)

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[Tensor]) -> None:
        """Flush this rank's share of reduced gradients to the host, without waiting for it.

        Args:
            params_to_release: Parameters whose gradients were reduced.
            grad_partitions: This rank's slice of each, 1-D, on the device. Views of a bucket that
                the next reduction overwrites.
        """
        for param, partition in zip(params_to_release, grad_partitions, strict=True):
            rank = self._get_param_partition_rank(param)
            if param.partition_numel() * rank < param.ds_numel:
                self._offload_boundary_param_ids.add(param.ds_id)
                self._flush_grad(param, partition)
            if param.grad is not None and not get_accelerator().is_synchronized_device():
                param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None

    def _flush_grad(self, param: Any, partition: Tensor) -> None:
        home = self._grad_home(param).narrow(0, 0, partition.numel())
        if self.micro_step_id == 0:
            value = partition.to(home.dtype, copy=True)
        else:
            self._lanes.caller_waits(self._grad_events[param.ds_id], Wait.GRAD_HOME)
            value = home.to(partition.device, copy=True, non_blocking=True)
            value.add_(partition.to(home.dtype).view(value.shape))
        if self.is_gradient_accumulation_boundary():
            self.norm_for_param_grads[self.get_param_id(param)] = self._constant_buffered_norm2(
                value
            )
        lane = self._lanes.grads
        lane.wait(self._lanes.record_caller(), Wait.GRAD_READY)
        lane.submit(
            f"gradient flush of parameter {param.ds_id}",
            lambda: copy_all((home,), (value,)),
            uses=(value,),
        )
        self._grad_events[param.ds_id] = lane.record()

    def _drain_grads(self) -> None:
        self._lanes.grads.record().synchronize()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Stock's boundary work reads gradients from the host, where they must have arrived."""
        self._drain_grads()
        super().finalize_gradient_accumulation_boundary()

    def _offload_grad_partition_at_boundary(
        self,
        param: Any,
        grad_buffer: Tensor,
        offload_fp32_gradients: Any,
        offload_fp32_offsets: Any,
    ) -> None:
        # Stock also widens the gradient into an fp32 buffer; we have none.
        self.norm_for_param_grads[self.get_param_id(param)] = self._constant_buffered_norm2(
            grad_buffer
        )

    # ---- the update phase --------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        """One update; stock's own, whose loop over subgroups calls the methods below."""
        if self.dtype == torch.float16:  # the overflow check reads gradients from the host
            self._drain_grads()
        super().step(closure)

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
        subgroups, scalars = [], []
        decoupled = bool(self.optimizer.adam_w_mode)
        for idx, master in enumerate(self.fp32_partitioned_groups_flat):
            state = self.optimizer.state[master]
            state["step"] += 1
            group = self.optimizer.param_groups[self.sub_group_to_group_id[idx]]
            powers = self._beta_powers.at(state["step"], group["betas"])
            scalars.append(adam_scalars(group, powers, self._grad_scale, decoupled))
            grad = self.grad_partitions_flat_buffer.narrow(
                0, self._subgroup_starts[idx], master.numel()
            )
            subgroups.append(
                Subgroup(
                    master=master.data,
                    exp_avg=state["exp_avg"],
                    exp_avg_sq=state["exp_avg_sq"],
                    grad=grad,
                    weights=self.fp16_partitioned_groups_flat[idx].data,
                )
            )
        self._executor.run(subgroups, scalars)

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        # The executor has written the 16-bit weights; stock's copy would repeat it.
        self._unflatten_partitioned_parameters(sub_group_id)

    # ---- access to gradients -----------------------------------------------------------------

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        """This rank's gradients widened to fp32: ``[subgroup][parameter]``, each 1-D."""
        self._drain_grads()
        return {
            group_idx: {idx: self._grad_home(param).float() for idx, param in enumerate(group)}
            for group_idx, group in enumerate(self.fp16_groups)
        }

    def _get_fp32_grad_state_partition(
        self, param: Any, release_swap_buffers: bool
    ) -> tuple[Tensor, int]:
        self._drain_grads()
        return self._grad_home(param).float(), self.grad_position[self.get_param_id(param)][0]

    def _refuse_to_write_grads(self, *_args: Any, **_kwargs: Any) -> None:
        raise ConfigError(
            "gradients cannot be set from outside: there is no fp32 gradient to write to; "
            'set "deep_optimizer_states.enabled" to false to change gradients before a step'
        )

    set_fp32_grad_for_param = _refuse_to_write_grads
    set_local_grad_for_param = _refuse_to_write_grads
    update_fp32_grad_for_param_vectorized = _refuse_to_write_grads

    def destroy(self) -> None:
        """End lanes and unlock host memory."""
        super().destroy()
        self._lanes.close()
