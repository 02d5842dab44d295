"""The one subclass of DeepSpeed's optimizer of ZeRO-1 and ZeRO-2: its methods, handed to objects.

What is not overridden (partitioning, the whole way of a gradient, norms, overflow, loss scale, the
gather of new weights, checkpoints) is stock code.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from deep_optimizer_states.auto import settle_policy
from deep_optimizer_states.config import BLOCK, Settings
from deep_optimizer_states.errors import ConfigError, UpdateError
from deep_optimizer_states.gate import Background
from deep_optimizer_states.memory import local_ranks
from deep_optimizer_states.schedule import Schedule
from deep_optimizer_states.zero.loading import loading
from deep_optimizer_states.zero.steppers import Steppers
from deep_optimizer_states.zero.update import UpdatePhase, stand_in_for_step
from deep_optimizer_states.zero12.gradients import LateScaled, SettledFragments
from deep_optimizer_states.zero12.homes import FlatHomes
from deep_optimizer_states.zero12.stock import cut_groups


class InterleavedFlatOptimizer(DeepSpeedZeroOptimizer):
    """ZeRO-1 and ZeRO-2 offload whose update is spread over CPU and device, with stock's bits.

    Host memory holds master weights, moments and gradients in fp32, 16 bytes a parameter; stock's
    16-bit copy beside them is given up. ``step()`` waits for all tiles: it ends with a gather of
    all weights. So nothing is in flight outside of it, unless it was interrupted.

    It owns the objects that do the work, and alone assigns to stock's own attributes. The objects
    are made in :meth:`initialize_optimizer_states`, which stock's constructor calls when it has
    cut the parameters and before it hands out views of them.

    Args:
        init_optimizer, args, kwargs: As DeepSpeed passes them to its own class.
        settings: The checked block of the config.
        subgroup_numel: Elements of a subgroup, where the user gave them; 0 for one tile.
    """

    param_buffer_of_bit16_for_cpu_offload_groups: list[Tensor]
    parallel_partitioned_bit16_groups: list[list[Tensor]]
    partition_size: list[int]

    def __init__(
        self,
        init_optimizer: Any,
        *args: Any,
        settings: Settings,
        subgroup_numel: int,
        **kwargs: Any,
    ) -> None:
        # Gradients lie in host memory, and nothing waits for single tiles.
        none = {"keep_grads_on_device": False, "just_in_time_forward": False}
        self._settings = settings.model_copy(update=none)
        self._subgroup_numel = subgroup_numel
        self._closed = False
        self._grad_scale = 1.0
        self._change = contextlib.ExitStack()
        self._hidden = contextlib.ExitStack()
        self._is_made = False
        self._done: list[Tensor] | None = None
        self._steppers = Steppers.open(init_optimizer, bool(settings.timeline))
        self._lanes = self._steppers.lanes
        self.background = Background(self._lanes)
        offload = kwargs["offload_optimizer_config"]
        self._locks_pages = bool(offload.pin_memory)
        # Stock would page-lock what is moved or given up below, and torch keeps what was locked.
        kwargs["offload_optimizer_config"] = offload.model_copy(update={"pin_memory": False})
        try:
            super().__init__(init_optimizer, *args, **kwargs)
        except BaseException:
            with contextlib.suppress(UpdateError):  # it says less than what happened first
                self._close_lanes()
            raise

    # Making: stock's constructor calls these.

    def initialize_optimizer_states(self) -> None:
        """Move master weights to where they live, and take moments and gradients there."""
        self._refuse_other_types()
        # Releases up to 0.19.6 have the quotient of two whole numbers, a float.
        self.partition_size = [int(numel) for numel in self.partition_size]
        runs = cut_groups(self.partition_size, self._subgroup_numel or self._settings.tile_numel)
        schedule = self._settle_schedule([run.numel for run in runs])
        self._homes = FlatHomes(self, runs, schedule, self._lanes)
        self._gradients = LateScaled(self, runs)
        self._take_memory()
        self._update = UpdatePhase(
            self, self._settings, self._steppers, schedule, self._homes, self._gradients
        )
        self._is_made = True
        self.background.prepare(self._lanes.near.bind_this_thread)
        self._update.announce(2 if self.partition_gradients else 1, self._why_policy)

    def _refuse_other_types(self) -> None:
        if self.torch_autocast_gradscaler is not None:
            raise ConfigError(
                "torch_autocast in fp16 scales gradients by itself, which "
                f'"{BLOCK}" does not repeat; use torch_autocast in bfloat16, or '
                'the "fp16" or "bf16" block'
            )
        types = sorted({str(flat.dtype) for flat in self.bit16_groups_flat})
        if len(types) > 1:
            raise ConfigError(
                f'"{BLOCK}" works on weights of one type at ZeRO stages 1 and 2; those of this '
                f"model's parameter groups are {' and '.join(types)}: convert the model to one"
            )

    def _settle_schedule(self, numels: list[int]) -> Schedule:
        has_gpu = get_accelerator().device_name() == "cuda"
        chosen, why = settle_policy(self._settings, numels, local_ranks(), has_gpu)
        self._settings, self._why_policy = chosen, why
        way = (chosen.policy, chosen.stride, chosen.ratio, chosen.tile_numel)
        return Schedule.make(numels, *way)

    def _take_memory(self) -> None:
        masters, numel = self._masters, sum(self.partition_size)
        taken = sum(master.nbytes for master in masters)
        buffers = self.param_buffer_of_bit16_for_cpu_offload_groups
        # The executor stages 16-bit weights tile by tile.
        self.param_buffer_of_bit16_for_cpu_offload_groups = [b.new_empty(0) for b in buffers]
        del buffers
        self.cpu_offload_pin_memory = self._lanes.locks_pages = self._locks_pages
        self._homes.reserve(self._settings, numel * LateScaled.dtype.itemsize, taken)
        self._homes.take_masters(masters)
        self._homes.make_moments()
        sizes = self.partition_size
        grads = [self._lanes.empty_host(numel, LateScaled.dtype).zero_() for numel in sizes]
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad
        self._gradients.take(grads)

    def _get_offload_gradient_dict(self) -> None:
        super()._get_offload_gradient_dict()
        for group, fragments in self.offload_gradient_dict.items():
            ids = [self.get_param_id(param) for param in self.params_in_partition[group]]
            settled = SettledFragments(fragments, ids, self._gradients)
            self.offload_gradient_dict[group] = settled

    # State: whoever looks at it, stock's own methods too, sees the finished update.

    @property
    def single_partition_of_fp32_groups(self) -> list[Tensor]:
        """Master weights by parameter group, with their gradients."""
        if self._done is not None:
            return self._done
        if self._is_made:
            self.background.wait()
            self._gradients.settle()
        return self._masters

    @single_partition_of_fp32_groups.setter
    def single_partition_of_fp32_groups(self, masters: list[Tensor]) -> None:
        self._masters = masters

    @property
    def state(self) -> Any:
        """Moments by master weight."""
        self.background.wait()
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def state_dict(self) -> dict[str, Any]:
        """Stock's, of finished state."""
        self.background.refuse_to_save()
        self.background.wait()
        return dict(super().state_dict())

    def checkpoint_event_prologue(self) -> None:
        """Before a checkpoint is written or loaded: nothing is in flight, and nothing failed."""
        if not self.background.overlooks_failure:
            self.background.refuse_to_save()
        self.background.wait()

    def clear_backward_seen_flag(self) -> None:
        """A forward begins: weights of an update that failed are not to be computed with."""
        self.background.wait()
        super().clear_backward_seen_flag()

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Stock moves what an update may still use."""
        self.background.wait()
        super().offload_states(*args, **kwargs)

    def load_state_dict(
        self, state_dict_list: Any, load_optimizer_states: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Load a checkpoint, stock's or a universal one; loaded moments return to their home."""
        is_whole = bool(load_optimizer_states)
        with loading(self.background, self._update, self._homes, is_whole):
            super().load_state_dict(state_dict_list, load_optimizer_states, *args, **kwargs)
        self._relink_moments()

    def _relink_moments(self) -> None:
        """Parameters whose views of moments stock has made view those that are stepped."""
        for group, master in zip(self.bit16_groups, self._masters, strict=True):
            for param in group:
                mapping = param._hp_mapping
                if mapping is not None and mapping.optim_fragment:
                    mapping.set_optim_state_fragment(master, self.optimizer.state[master])

    # Gradients: stock's, from backward to its norms; see [Note: scaled late] in ``gradients``.

    def copy_grads_in_partition(self, param: Any, *args: Any) -> None:
        """Stock's copy of a reduced gradient to host memory; releases differ in arguments."""
        is_final = self.is_gradient_accumulation_boundary()
        with self._gradients.writing(self.get_param_id(param) if is_final else None):
            super().copy_grads_in_partition(param, *args)

    def async_inplace_copy_grad_to_fp32_buffer_from_gpu(self, param: Any) -> None:
        """Stock's copy, which comes alone where the caller has ended the window."""
        with self._gradients.writing(self.get_param_id(param)):
            super().async_inplace_copy_grad_to_fp32_buffer_from_gpu(param)

    # The update: stock's step, whose loop over groups comes to the methods below.

    def step(self, closure: Any = None) -> None:
        """One update.

        Raises:
            UpdateError: A lane failed, in this update or in an earlier one.
        """
        self.background.wait()
        with (
            self.background.under_way("engine.step()"),
            contextlib.ExitStack() as self._change,
            contextlib.ExitStack() as self._hidden,
        ):
            super().step(closure)

    def unscale_and_clip_grads(self, grad_groups_flat: list[Tensor], total_norm: Any) -> None:
        """Ask stock for the factor it would multiply gradients with; the kernels apply it."""
        if self._done is None:  # the first group: the others have the same factor
            # The caller may have set another default type or device.
            probe = torch.ones(1, dtype=torch.float32, device="cpu")
            super().unscale_and_clip_grads([probe], total_norm)
            self._grad_scale = float(probe)

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def _optimizer_step(self, group_no: int) -> None:
        if group_no > 0:
            return
        stand_in_for_step(self.optimizer)
        # What is cut short from here on leaves wrong state behind.
        self._change.enter_context(self.background.changing("engine.step()"))
        self._gradients.settle()
        self._update.launch(self.background, None, self._grad_scale)
        self._lazy_init_hp_params_optimizer_state()
        self._hidden.enter_context(self._nothing_to_copy())

    @contextlib.contextmanager
    def _nothing_to_copy(self) -> Any:
        """Until buffers are reset: the executor has written the 16-bit weights already.

        Stock's loop copies each group's master weight to the buffer in host memory, and that to its
        16-bit weights. All three are empty meanwhile.
        """
        weights = self.parallel_partitioned_bit16_groups
        self._done = [master.new_empty(0) for master in self._masters]
        nothing = [[part.new_empty(0) for part in parts] for parts in weights]
        self.parallel_partitioned_bit16_groups = nothing
        try:
            yield
        finally:
            self._done, self.parallel_partitioned_bit16_groups = None, weights

    def reset_cpu_buffers(self) -> None:
        """Stock's, between its loop over groups and the gather of the new weights."""
        self._hidden.close()
        super().reset_cpu_buffers()

    @property
    def device_share(self) -> float:
        """Share of the parameters that the last step updated on the device, from 0 to 1."""
        return self._update.device_share

    def destroy(self) -> None:
        """End lanes, unlock host memory, free device slots. A second call changes nothing.

        Raises:
            UpdateError: The update in flight failed, which nobody was told before.
        """
        is_known = self._closed or self.background.has_failed
        try:
            with self.background.overlooking_failure():
                self.cpu_offload_pin_memory = False  # what stock would unlock is the lanes'
                super().destroy()
            if not is_known:
                self.background.check()
        finally:
            self._close_lanes()
            self.__dict__.pop("_update", None)

    def _close_lanes(self) -> None:
        if not self._closed:
            self._closed = True
            self.background.close()
            self._lanes.close()
