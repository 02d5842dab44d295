"""Our subclass of DeepSpeed's ZeRO-3 optimizer: stock's methods, handed to our objects.

What is not overridden (partitioning, reduction, clipping, loss scale, checkpoints) is stock code.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deep_optimizer_states.adapter.autograd_runs import listen
from deep_optimizer_states.adapter.homes import measure_host
from deep_optimizer_states.adapter.launcher import settle_schedule
from deep_optimizer_states.adapter.optimizer import (
    InterleavedOptimizer,
    refuse_autocast,
    refuse_native_pins,
    stand_in_for_step,
)
from deep_optimizer_states.adapter.zero3.ahead import WorkInBackward, refuse_unmanaged
from deep_optimizer_states.adapter.zero3.gathers import GatherBarrier
from deep_optimizer_states.adapter.zero3.gradients import GradientFlush, bytes_on_host
from deep_optimizer_states.adapter.zero3.stock import Layout, StockZeroOptimizer, SubgroupHomes
from deep_optimizer_states.config import BLOCK, Settings
from deep_optimizer_states.core.host import HostRoom
from deep_optimizer_states.core.policies import AUTO
from deep_optimizer_states.errors import ConfigError
from deep_optimizer_states.units import GIB


class InterleavedZeroOptimizer(InterleavedOptimizer, StockZeroOptimizer):
    """ZeRO-3 offload whose update is spread over CPU and device, with stock's bits.

    Host memory holds master weights and moments, and gradients in the accumulation type: one, or
    two with accumulation (``host.bytes_of_state`` and ``bytes_of_gradients``). There is none in the
    type of the master weights: both kernels read the first one and convert it themselves. Resident
    subgroups have all of that on the device instead.

    It owns the objects that do the work, and alone assigns to stock's own attributes. The objects
    are made in :meth:`_create_fp32_partitions`, which stock's constructor calls as soon as it has
    cut the parameters into subgroups, so that every size is known.

    Args:
        module, init_optimizer, args, kwargs: As DeepSpeed passes them to its own class.
        settings: The checked block of the config.
        is_managed: Whether DeepSpeed knows, in a backward, if the accumulation window ends with it.
    """

    offload_optimizer_pin_memory: bool
    grad_partitions_flat_buffer: Tensor

    def __init__(
        self,
        module: Any,
        init_optimizer: Any,
        *args: Any,
        settings: Settings,
        is_managed: bool,
        **kwargs: Any,
    ) -> None:
        refuse_unmanaged(settings, is_managed)
        refuse_native_pins(kwargs["offload_optimizer_config"])
        self._is_managed = is_managed
        self._probes: list[Tensor] | None = None
        self._work_in_backward: WorkInBackward | None = None
        try:
            self._open(init_optimizer, settings, _master_dtype(kwargs))
            super().__init__(module, init_optimizer, *args, **kwargs)
            refuse_autocast(self)
            self._launcher = self._make_launcher(
                self._schedule, self._homes, self._gradients, self._cache
            )
            self._work_in_backward = self._make_work_in_backward()
            self.background.prepare(self._lanes.cpu_affinity.bind_this_thread)
            self._launcher.announce(3, self._why_policy)
            self._barrier.put_up()
            listen(self)
        except BaseException:
            self._close_after_failure()
            raise

    def _make_work_in_backward(self) -> WorkInBackward | None:
        if not (self._settings.step_before_norm or self._cache.is_on):
            return None
        work = WorkInBackward(
            self,
            self._settings,
            self._layout,
            self._schedule,
            self._barrier,
            self._launcher,
            self._is_managed,
        )
        self._gradients.set_callback(work.gradient_is_final)
        self._barrier.set_callback(work.look)
        if self._settings.step_before_norm:
            self._tell_of_uses(work.uses.count)
        return work

    def _tell_of_uses(self, on_use: Callable[[Any], None]) -> None:
        """Call ``on_use`` with every module before it runs."""
        offload = self.parameter_offload
        fetch = offload.pre_sub_module_forward_function

        def tell_and_fetch(module: Any) -> None:
            on_use(module)  # in the caller's grad mode, which stock's method changes
            fetch(module)

        offload.pre_sub_module_forward_function = tell_and_fetch

    # Making: stock's constructor calls these.

    def _create_fp32_partitions(self) -> None:
        layout = self._layout = Layout.of(self)
        room = measure_host(self, self._settings, self._steppers.state_dtypes)
        grad_bytes = bytes_on_host(self, layout, self._is_managed)
        remedy = self._choose_tiles(layout, room, grad_bytes)
        schedule = self._schedule
        self._barrier = GatherBarrier(self.background, self._lanes, layout, schedule)
        self._cache = self._make_cache(schedule, self.gradient_accumulation_dtype)
        self._gradients = GradientFlush(
            self, layout, schedule, self._lanes, self._barrier, self._is_managed, self._cache
        )
        self._homes = SubgroupHomes(self, layout, schedule, self._lanes)
        self._homes.reserve(room, grad_bytes, remedy)  # all memory is taken below
        super()._create_fp32_partitions()
        self._homes.take_masters(self._masters)

    def _choose_tiles(self, layout: Layout, room: HostRoom, grad_bytes: int) -> str:
        """Choose the tiles, and what the device holds for good since host memory lacks its room.

        Returns:
            What to do if host memory lacks room all the same.
        """
        settings = self._settings
        cut = functools.partial(
            settle_schedule,
            numels=layout.numels,
            separate=layout.separate,
            weights_on_host=layout.weights_on_host,
        )
        self._schedule, self._settings, self._why_policy = cut(settings)
        staging_bytes = self._schedule.staged_numel * self.dtype.itemsize
        share = room.largest_share(layout.numels, staging_bytes + grad_bytes)
        limit, numel = settings.device_memory_bytes, sum(layout.numels)
        is_for_us = self._schedule.dynamic and "ratio" not in settings.model_fields_set
        if share == 1.0 or not (limit and is_for_us and self._lanes.tells_memory):
            return f'"{BLOCK}.ratio" below 1 to keep a share on the device'
        each_bytes = room.state_bytes + self.gradient_accumulation_dtype.itemsize
        moved_bytes = round((1 - share) * numel) * each_bytes
        free_bytes = self._lanes.free_bytes()
        free_bytes = free_bytes if limit == AUTO else min(free_bytes, int(limit))
        if moved_bytes > free_bytes:
            return (
                f"more device memory: it would have to hold {moved_bytes / GIB:.1f} GiB of the "
                f"state, and {free_bytes / GIB:.1f} GiB of it can be had"
            )
        if not room.has(numel * self._steppers.state_dtypes[0].itemsize + grad_bytes):
            return "more host memory: master weights are made there, before a share of them moves"
        left = limit if limit == AUTO else int(limit) - moved_bytes
        changed = settings.model_copy(update={"ratio": share, "device_memory_bytes": left})
        self._schedule, self._settings, why = cut(changed)
        self._why_policy = (
            f"{why}{'; ' if why else ''}host memory lacks room, so the device holds "
            f"{1 - share:.0%} of the state for good"
        )
        return ""

    def initialize_optimizer_states(self) -> None:
        """Create the moments where they live; no fp32 gradients."""
        self._homes.make_moments()

    def _setup_for_real_optimizer(self) -> None:
        # Stock would page-lock its gradient buffer, rounded up to a power of two; ours replaces it.
        pin, self.offload_optimizer_pin_memory = self.offload_optimizer_pin_memory, False
        self._lanes.locks_pages = pin
        try:
            super()._setup_for_real_optimizer()
        finally:
            self.offload_optimizer_pin_memory = pin
        flat = self._lanes.host_home(self.grad_partitions_flat_buffer)
        self.grad_partitions_flat_buffer = flat
        views = {ds_id: self._layout.view(flat, ds_id) for ds_id in self._layout.slices}
        self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition = views
        self._gradients.make_homes()

    # State: whoever looks at it, stock's own methods too, sees the finished update.

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """Master weights by subgroup."""
        if self._probes is not None:
            return self._probes
        self._settle()
        return self._masters

    @fp32_partitioned_groups_flat.setter
    def fp32_partitioned_groups_flat(self, masters: list[Tensor]) -> None:
        self._masters = masters

    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> tuple[Tensor, int]:
        # Who writes keeps what stock calls swap buffers.
        with self._reading() if release_swap_buffers else contextlib.nullcontext():
            found: tuple[Tensor, int] = super()._get_fp32_opt_state_partition(
                param, release_swap_buffers, optim_state_key
            )
            return found

    def state_dict(self) -> dict[str, Any]:
        """Return stock's, of finished state."""
        self.background.refuse_to_save()
        self.background.wait()
        # Stock appends to them, and takes it back at the end, which a save cut short has not seen.
        self._clear_fp32_optimizer_param_groups()
        with self._reading():
            found = dict(super().state_dict())
        return self._homes.without_fresh_moments(found)

    def checkpoint_event_prologue(self) -> None:
        """Wait before a checkpoint until everything in flight has arrived."""
        self._prepare_to_save()
        super().checkpoint_event_prologue()

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Let stock move buffers that are no longer in use."""
        self._settle()
        self._gradients.drain()
        super().offload_states(*args, **kwargs)

    def _rigid_load_state_dict(
        self, state_dict: dict[str, Any], load_optimizer_states: bool = True
    ) -> None:
        with self._loading(is_whole=load_optimizer_states):
            self._clear_fp32_optimizer_param_groups()  # as before a save
            super()._rigid_load_state_dict(state_dict, load_optimizer_states)

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir: str) -> None:
        """Load a universal checkpoint; what it replaced goes back to where it lives."""
        with self._loading(is_whole=True):
            super().load_hp_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir)

    def _loading(self, is_whole: bool) -> contextlib.AbstractContextManager[None]:
        if not is_whole:
            self.background.refuse_while_open()
        if self._work_in_backward is not None:
            self._work_in_backward.forget()
        if self.is_cut_short or self._launcher.is_begun:
            self._forget_window()
        return self._launcher.loading(is_whole)

    def _forget_window(self) -> None:
        self._pre_step()
        self._partition_all_parameters()
        for param in itertools.chain.from_iterable(self.fp16_groups):
            param.grad = None
        super()._forget_window()

    # Gradients: from stock's backward to its norms and its scan for an overflow.

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[Tensor]) -> None:
        """Flush this rank's share of reduced gradients to their home, without waiting for it."""
        self._gradients.partition(params_to_release, grad_partitions)

    def reduce_ready_partitions_and_remove_grads(self, param: Any) -> None:
        """Reduce as stock does, then see what may begin: ``ahead``, [Note: one stream]."""
        super().reduce_ready_partitions_and_remove_grads(param)
        if self._work_in_backward is not None:
            self._work_in_backward.after_hook()

    def independent_gradient_partition_epilogue(self) -> None:
        """Reduce what is left in the buckets, as stock does."""
        super().independent_gradient_partition_epilogue()
        if self._work_in_backward is not None:
            self._work_in_backward.after_hook()

    def clear_backward_seen_flag(self) -> None:
        """Begin a forward."""
        self._refuse_half_a_backward()
        if self._work_in_backward is not None:
            self._work_in_backward.begin_forward()
        super().clear_backward_seen_flag()

    def backward_prologue(self) -> None:
        """Begin a backward; refuse one with which the update could not begin."""
        if self._work_in_backward is not None:
            self._work_in_backward.begin_backward()
        super().backward_prologue()

    def _finalize_offload_gradient_accumulation(self) -> None:
        self._gradients.take_norms_from_homes()

    def _get_norm_groups(self) -> list[Tensor]:
        """Return stock's norm of every subgroup, with two waits for the device in all."""
        self._gradients.fetch_norms()
        if self.model_parallel_group is not None or any(
            self._autoep_expert_parallel_group(group) is not None for group in self.fp16_groups
        ):
            return list(super()._get_norm_groups())
        return self._gradients.norms_of_subgroups()

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Return whether a gradient of any rank is infinite or NaN."""
        flat = self.grad_partitions_flat_buffer
        # One look at a single number: stock reduces what it finds over the ranks.
        seen = 0.0 if self._gradients.are_finite() else torch.inf
        self.grad_partitions_flat_buffer = flat.new_full((1,), seen)
        try:
            return bool(super().has_overflow(partition_gradients))
        finally:
            self.grad_partitions_flat_buffer = flat

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        """Return this rank's gradients in fp32: ``[subgroup][parameter]``, each 1-D."""
        as_fp32 = self._gradients.as_fp32
        return {
            group_idx: {idx: as_fp32(param.ds_id) for idx, param in enumerate(group)}
            for group_idx, group in enumerate(self.fp16_groups)
        }

    def _get_fp32_grad_state_partition(
        self, param: Any, release_swap_buffers: bool
    ) -> tuple[Tensor, int]:
        subgroup = self._layout.slices[param.ds_id].subgroup
        return self._gradients.as_fp32(param.ds_id), subgroup

    def _refuse_to_write_grads(self, *_args: Any, **_kwargs: Any) -> None:
        raise ConfigError(
            "gradients cannot be set from outside: there is no fp32 gradient to write to; "
            'set "deep_optimizer_states.enabled" to false to change gradients before a step'
        )

    set_fp32_grad_for_param = _refuse_to_write_grads
    set_local_grad_for_param = _refuse_to_write_grads
    update_fp32_grad_for_param_vectorized = _refuse_to_write_grads

    # The update: stock's step, whose loop over subgroups comes to the methods below.

    def step(self, closure: Any = None) -> None:
        """Make one update.

        Raises:
            UpdateError: A lane failed, in this update or in an earlier one.
        """
        self._refuse_half_a_backward()
        if self._launcher.is_begun:
            self.background.check()
        else:
            self.background.wait()
        self._gradients.begin_step()
        with self.background.under_way("engine.step()"):
            super().step(closure)
            if self._work_in_backward is not None:
                self._work_in_backward.check_step(is_skipped=self.overflow)
        self._gradients.end_step(is_skipped=self.overflow)
        if self._work_in_backward is not None:
            self._work_in_backward.begin_window()

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Any) -> None:
        """Ask stock for the factor it would multiply gradients with; the kernels apply it."""
        if sub_group_id == 0:
            # The caller may have set another default type or device.
            probe = torch.zeros(1, dtype=torch.float32, device="cpu")
            probe.grad = torch.ones_like(probe)
            self._probes = [probe]
            try:
                super().unscale_and_clip_grads(0, total_norm)
            finally:
                self._probes = None
            self._grad_scale = float(probe.grad)

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def _optimizer_step(self, sub_group_id: int) -> None:
        if sub_group_id == 0:
            stand_in_for_step(self.optimizer)
            is_waited_for_later = self._settings.just_in_time_forward and self._barrier.is_up
            order = self._barrier.next_order() if is_waited_for_later else None
            self._launcher.launch(order, self._grad_scale)

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        # The executor has written the 16-bit weights; stock's copy would repeat it.
        self._unflatten_partitioned_parameters(sub_group_id)

    def destroy(self) -> None:
        """End lanes, unlock host memory, free device slots. A second call changes nothing.

        Raises:
            UpdateError: The update in flight failed, which nobody was told before.
        """
        self._barrier.take_down()
        self._gradients.close()
        with self._ending():
            super().destroy()
        self._work_in_backward = None


def _master_dtype(kwargs: dict[str, Any]) -> torch.dtype:
    """Return the type of master weights, from what DeepSpeed passes to its optimizer."""
    if kwargs.get("fp16_master_weights_and_gradients"):
        return torch.float16
    return torch.bfloat16 if kwargs.get("bf16_master_weights_and_gradients") else torch.float32
