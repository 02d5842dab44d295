"""The one subclass of DeepSpeed's optimizer of ZeRO-1 and ZeRO-2.

What is not overridden (partitioning, the whole way of a gradient, norms, overflow, loss scale, the
gather of new weights, checkpoints) is stock code. Stock has one flat master weight a parameter
group, of which every rank has an equal part. That is cut into slices here, which are the
subgroups of the plan: the knobs of a policy mean what they mean at stage 3. Neither storage nor
checkpoints know of them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import (
    INITIAL_MICRO_STEP_ID,
    DeepSpeedZeroOptimizer,
)
from torch import Tensor
from torch.nn import Module, Parameter
from typing_extensions import override

from deep_optimizer_states.adapter.autograd_runs import listen
from deep_optimizer_states.adapter.barrier import Barrier
from deep_optimizer_states.adapter.homes import SubgroupSlice, measure_host
from deep_optimizer_states.adapter.in_flight import WeightsInFlight
from deep_optimizer_states.adapter.launcher import settle_schedule
from deep_optimizer_states.adapter.optimizer import (
    InterleavedOptimizer,
    refuse_autocast,
    refuse_native_pins,
    stand_in_for_step,
)
from deep_optimizer_states.adapter.residency import LooksInForward, Residency
from deep_optimizer_states.adapter.zero12.gradients import (
    LateScaled,
    SettledFragments,
    SettledMasters,
)
from deep_optimizer_states.adapter.zero12.stock import FlatHomes, cut_groups, runs_within
from deep_optimizer_states.config import BLOCK, Settings
from deep_optimizer_states.errors import ConfigError


class InterleavedFlatOptimizer(InterleavedOptimizer, DeepSpeedZeroOptimizer):
    """ZeRO-1 and ZeRO-2 offload whose update is spread over CPU and device, with stock's bits.

    Host memory has room for master weights and moments in fp32, and for gradients, as a rule in 16
    bits: 14 bytes a parameter. Stock's 16-bit copy of the weights beside them is given up.
    ``step()`` ends with a gather of all weights. Where several ranks share them, it waits for all
    tiles before. One rank by itself has nothing to gather, and returns when the update is launched:
    see ``in_flight``.

    It owns the objects that do the work, and alone assigns to stock's own attributes. The objects
    are made in :meth:`initialize_optimizer_states`, which stock's constructor calls when it has
    cut the parameters and before it hands out views of them.

    Args:
        init_optimizer, args, kwargs: As DeepSpeed passes them to its own class.
        settings: The checked block of the config.
        subgroup_numel: Elements of a subgroup, where the user gave them; 0 for one tile.
        get_module: Returns the engine's model.
    """

    param_buffer_of_bit16_for_cpu_offload_groups: list[Tensor]
    parallel_partitioned_bit16_groups: list[list[Tensor]]
    params_in_partition: list[list[Parameter]]
    partition_size: list[int]
    params_already_reduced: list[bool]
    gradient_accumulation_steps: int
    _weights: WeightsInFlight | None = None
    """Who waits for single tiles; None where ``step()`` waits for all."""
    _residency: Residency | None = None
    """Who moves state to the device and home; None where none ever stays there."""
    _looks: LooksInForward | None = None

    def __init__(
        self,
        init_optimizer: Any,
        *args: Any,
        settings: Settings,
        subgroup_numel: int,
        get_module: Callable[[], Module],
        **kwargs: Any,
    ) -> None:
        offload = kwargs["offload_optimizer_config"]
        refuse_native_pins(offload)
        self._subgroup_numel = subgroup_numel
        self._hidden = contextlib.ExitStack()
        self._is_made = False
        self._done: list[Tensor] | None = None
        self._is_left_in_flight = False
        self._locks_pages = bool(offload.pin_memory)
        # Stock would page-lock what is moved or given up below, and torch keeps what was locked.
        kwargs["offload_optimizer_config"] = offload.model_copy(update={"pin_memory": False})
        try:
            self._open(init_optimizer, settings)
            super().__init__(init_optimizer, *args, **kwargs)
            if self._settings.just_in_time_forward:
                self._weights = self._make_weights_in_flight(get_module)
            if self._launcher.cache.is_on:
                self._residency = Residency(self._launcher, self.background)
                self._looks = LooksInForward(get_module(), self._residency.look)
            listen(self)
        except BaseException:
            self._close_after_failure()
            raise

    # Making: stock's constructor calls these.

    def initialize_optimizer_states(self) -> None:
        """Move master weights to where they live, and take moments and gradients there."""
        self._refuse_other_types()
        if any(dist.get_world_size(group) > 1 for group in self.real_dp_process_group):
            self._settings = self._settings.model_copy(update={"just_in_time_forward": False})
        # Releases up to 0.19.6 have the quotient of two whole numbers, a float.
        self.partition_size = [int(numel) for numel in self.partition_size]
        slices = cut_groups(self.partition_size, self._subgroup_numel or self._settings.tile_numel)
        numels = [part.numel for part in slices]
        schedule, self._settings, why_policy = settle_schedule(self._settings, numels)
        self._slices, self._schedule = slices, schedule
        self._homes = FlatHomes(self, slices, schedule, self._lanes)
        cache = self._make_cache(schedule, self.gradient_accumulation_dtype)
        self._gradients = LateScaled(self, slices, self._lanes, cache, self.background.wait)
        self._take_memory()
        for group in self.optimizer.param_groups:
            group["params"] = SettledMasters(group["params"], self._settle)
        self._launcher = self._make_launcher(schedule, self._homes, self._gradients, cache)
        self._is_made = True
        self.background.prepare(self._lanes.cpu_affinity.bind_this_thread)
        self._launcher.announce(2 if self.partition_gradients else 1, why_policy)

    def _refuse_other_types(self) -> None:
        refuse_autocast(self)
        types = sorted({str(flat.dtype) for flat in self.bit16_groups_flat})
        if len(types) > 1:
            raise ConfigError(
                f'"{BLOCK}" works on weights of one type at ZeRO stages 1 and 2; those of this '
                f"model's parameter groups are {' and '.join(types)}: convert the model to one"
            )

    def _make_weights_in_flight(self, get_module: Callable[[], Module]) -> WeightsInFlight:
        params, runs = [], {}
        for param in itertools.chain.from_iterable(self.params_in_partition):
            group, _, start, numel = self.grad_position[self.get_param_id(param)]
            params.append(param)
            runs[id(param)] = runs_within(self._slices, SubgroupSlice(group, start, numel))
        barrier = Barrier(self.background, self._lanes, self._schedule, runs)
        return WeightsInFlight(get_module, params, barrier)

    def _take_memory(self) -> None:
        masters, dtype = self._masters, self._gradients.dtype
        taken = sum(master.nbytes for master in masters)
        buffers = self.param_buffer_of_bit16_for_cpu_offload_groups
        # The executor stages 16-bit weights tile by tile.
        self.param_buffer_of_bit16_for_cpu_offload_groups = [b.new_empty(0) for b in buffers]
        del buffers
        self.cpu_offload_pin_memory = self._lanes.locks_pages = self._locks_pages
        grad_bytes = sum(self.partition_size) * dtype.itemsize + self._sum_bytes()
        room = measure_host(self, self._settings, self._steppers.state_dtypes, taken)
        self._homes.reserve(
            room, grad_bytes, "ZeRO stage 3, where the device can hold a share of it"
        )
        self._homes.take_masters(masters)
        self._homes.make_moments()
        sizes = self.partition_size
        self._gradients.take([self._lanes.empty_host(numel, dtype).zero_() for numel in sizes])

    def _sum_bytes(self) -> int:
        """Bytes of what stock sums over a window in host memory, an array a parameter, from now on.

        Stage 1 sums on the device. torch rounds what it page-locks up to a power of two.
        """
        if self.gradient_accumulation_steps == 1 or not self.partition_gradients:
            return 0
        sizes = [param.nbytes for param in itertools.chain.from_iterable(self.params_in_partition)]
        is_locked = self._locks_pages and get_accelerator().device_name() == "cuda"
        return sum(1 << (size - 1).bit_length() if is_locked else size for size in sizes)

    def _get_offload_gradient_dict(self) -> None:
        for group, params in enumerate(self.params_in_partition):
            ids = [self.get_param_id(param) for param in params]
            self.offload_gradient_dict[group] = SettledFragments(ids, self._gradients)

    # State: whoever looks at it, stock's own methods too, sees the finished update.

    def _wait(self) -> None:
        super()._wait()
        if self._weights is not None:
            self._weights.give_back()

    def _settle_to_read(self) -> None:
        with self._reading():
            self._settle()

    @property
    def single_partition_of_fp32_groups(self) -> Sequence[Any]:
        """Master weights by parameter group, without ``grad``: gradients are kept elsewhere."""
        if self._done is not None:
            return self._done
        if not self._is_made:
            return self._masters
        if self._gradients.is_writing:  # stock asks in backward, to reach the gradients
            self._wait()
            return self._gradients.targets
        self._settle()
        return self._masters

    @single_partition_of_fp32_groups.setter
    def single_partition_of_fp32_groups(self, masters: list[Tensor]) -> None:
        self._masters = masters

    def state_dict(self) -> dict[str, Any]:
        """Return stock's, of finished state."""
        self.background.refuse_to_save()
        with self._reading():
            self._settle()  # moments are the first that stock reads, and asks nobody for
            return dict(super().state_dict())

    def checkpoint_event_prologue(self) -> None:
        """See before a checkpoint that nothing is in flight, and nothing failed."""
        self._prepare_to_save()

    def clear_backward_seen_flag(self) -> None:
        """Refuse a forward with weights of an update that failed."""
        self._refuse_half_a_backward()
        if self._weights is not None and self._weights.is_up:
            self.background.check()
        else:
            self._wait()
        if self._residency is not None:
            self._residency.begin_forward()
        super().clear_backward_seen_flag()

    @override
    def before_autograd(self) -> int:
        # The graph may be older than the update in flight, and of another engine.
        if self._weights is not None:
            self._weights.let_all_through()
        return super().before_autograd()

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Let stock move what no update uses any more."""
        self._settle()
        super().offload_states(*args, **kwargs)

    def load_state_dict(
        self, state_dict_list: Any, load_optimizer_states: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Load a checkpoint, stock's or a universal one; loaded moments return to their home."""
        if self.is_cut_short:
            self._forget_window()
        with self._launcher.loading(is_whole=bool(load_optimizer_states)):
            super().load_state_dict(state_dict_list, load_optimizer_states, *args, **kwargs)
        self._relink_moments()

    def _forget_window(self) -> None:
        self.micro_step_id = INITIAL_MICRO_STEP_ID
        for bucket in self.ipg_buckets.values():
            bucket.clear()
        self._release_ipg_buffers()
        self.params_already_reduced = [False] * len(self.params_already_reduced)
        super()._forget_window()
        self.zero_grad()

    def _link_all_hp_params(self) -> None:
        super()._link_all_hp_params()
        for param in itertools.chain.from_iterable(self.bit16_groups):
            for prepare, names in (
                (self._settle_to_read, ("get_full_hp_param",)),
                (self._settle, ("set_full_hp_param",)),
                (self._wait, ("get_full_hp_grad", "set_full_hp_grad")),
            ):
                for name in names:
                    setattr(param, name, call_after(prepare, getattr(param, name)))
            param.get_full_hp_grad = call_within(self._gradients.reading, param.get_full_hp_grad)

    def _relink_moments(self) -> None:
        """Make stock's views of moments view those that are stepped."""
        for group, master in zip(self.bit16_groups, self._masters, strict=True):
            for param in group:
                mapping = param._hp_mapping
                if mapping is not None and mapping.optim_fragment:
                    mapping.set_optim_state_fragment(master, self.optimizer.state[master])

    # Gradients: stock's, from backward to its norms; see ``gradients``.

    def copy_grads_in_partition(self, param: Any, *args: Any) -> None:
        """Let stock copy a reduced gradient to host memory; releases differ in arguments."""
        is_final = self.is_gradient_accumulation_boundary()
        with self._gradients.writing(self.get_param_id(param) if is_final else None):
            super().copy_grads_in_partition(param, *args)

    def async_inplace_copy_grad_to_fp32_buffer_from_gpu(self, param: Any) -> None:
        """Let stock copy a gradient where the caller has ended the window."""
        with self._gradients.writing(self.get_param_id(param)):
            super().async_inplace_copy_grad_to_fp32_buffer_from_gpu(param)

    def process_gradients(self, param: Any, i: int) -> None:
        """Let stock take a gradient that has just come, then see what memory there is."""
        super().process_gradients(param, i)
        if self._residency is not None:
            self._residency.in_backward(self.is_gradient_accumulation_boundary())

    # The update: stock's step, whose loop over groups comes to the methods below.

    def step(self, closure: Any = None) -> None:
        """Make one update.

        Raises:
            UpdateError: A lane failed, in this update or in an earlier one.
        """
        self._refuse_half_a_backward()
        self._wait()
        self._is_left_in_flight = False
        with (
            self.background.under_way("engine.step()"),
            contextlib.ExitStack() as self._hidden,
        ):
            super().step(closure)
        if self._residency is not None:
            self._residency.begin_window()
        if self._weights is not None and self._is_left_in_flight:
            self._weights.put_up()

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
        weights = self._weights
        self._is_left_in_flight = weights is not None and weights.may_wait
        order = weights.next_order() if weights is not None and self._is_left_in_flight else None
        self._launcher.launch(order, self._grad_scale)
        with self._handing_out(self._masters):  # of which it makes views
            self._lazy_init_hp_params_optimizer_state()
        self._hidden.enter_context(self._nothing_to_copy())

    @contextlib.contextmanager
    def _nothing_to_copy(self) -> Iterator[None]:
        """Hide the 16-bit weights, which the executor has written, until buffers are reset.

        Stock's loop copies each group's master weight to the buffer in host memory, and that to its
        16-bit weights. All three are empty meanwhile.
        """
        weights = self.parallel_partitioned_bit16_groups
        self.parallel_partitioned_bit16_groups = [
            [part.new_empty(0) for part in parts] for parts in weights
        ]
        try:
            with self._handing_out([master.new_empty(0) for master in self._masters]):
                yield
        finally:
            self.parallel_partitioned_bit16_groups = weights

    @contextlib.contextmanager
    def _handing_out(self, masters: list[Tensor]) -> Iterator[None]:
        """Give stock these as master weights, which it does not read, without a wait."""
        self._done = masters
        try:
            yield
        finally:
            self._done = None

    def reset_cpu_buffers(self) -> None:
        """Show them again, between stock's loop over groups and the gather of new weights."""
        self._hidden.close()
        super().reset_cpu_buffers()

    def destroy(self) -> None:
        """End lanes, unlock host memory, free device slots. A second call changes nothing.

        Raises:
            UpdateError: The update in flight failed, which nobody was told before.
        """
        self._gradients.close()
        with self._ending():
            if self._weights is not None:
                self._weights.take_down()
            if self._looks is not None:
                self._looks.take_down()
            self.cpu_offload_pin_memory = False  # what stock would unlock is the lanes'
            super().destroy()


def call_after(prepare: Callable[[], None], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call``, before which ``prepare`` is called."""

    def prepare_and_call(*args: Any, **kwargs: Any) -> Any:
        prepare()
        return call(*args, **kwargs)

    return prepare_and_call


def call_within(
    open_context: Callable[[], contextlib.AbstractContextManager[None]], call: Callable[..., Any]
) -> Callable[..., Any]:
    """Return ``call``, which is made within a context of its own."""

    def open_and_call(*args: Any, **kwargs: Any) -> Any:
        with open_context():
            return call(*args, **kwargs)

    return open_and_call
