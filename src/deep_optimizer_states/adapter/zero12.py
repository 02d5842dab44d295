"""The one subclass of DeepSpeed's optimizer of ZeRO-1 and ZeRO-2, and the objects that it owns.

What is not overridden (partitioning, the whole way of a gradient, norms, overflow, loss scale, the
gather of new weights, checkpoints) is stock code. Stock has one flat master weight a parameter
group, of which every rank has an equal part. That is cut into slices here, which are the
subgroups of the plan: the knobs of a policy mean what they mean at stage 3. Neither storage nor
checkpoints know of them.

[Note: scaled late] Before its update stock multiplies the gradients of a group by one factor, which
unscales and clips them: a pass over memory of its own. Our kernels apply the factor while they read
a gradient, so it is not written back. But a parameter that takes no part in the next window is
updated with its old gradient again, multiplied twice then; and a user may look at gradients after a
step. So each parameter's gradient *owes* the last factor, until new content replaces it, the next
update reads it, or somebody looks.

[Note: kept gradients] In backward stock copies gradients to what it finds as ``grad`` of its master
weights, on the stream that computes. So it finds a :class:`GradientTarget` there, which sends them
on the ``grads`` lane, behind backward. Stock keeps them in fp32; here they have the type in which
backward sums them, which loses nothing. The gradient of a cached tile stays where its state is,
once an update has brought it there.

[Note: gradients in fp32] What is multiplied, or written by a user, needs fp32. The gradient of such
a parameter has an fp32 tensor of its own, until stock writes a new one. Meanwhile the CPU steps the
subgroups that have elements of the parameter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, SupportsIndex

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
from deep_optimizer_states.adapter.flushes import Flushes
from deep_optimizer_states.adapter.homes import AnyStock, StateHomes, SubgroupSlice, measure_host
from deep_optimizer_states.adapter.in_flight import WeightsInFlight
from deep_optimizer_states.adapter.launcher import Gradients, settle_schedule
from deep_optimizer_states.adapter.optimizer import (
    InterleavedOptimizer,
    refuse_autocast,
    refuse_native_pins,
    stand_in_for_step,
)
from deep_optimizer_states.adapter.residency import LooksInForward, Residency
from deep_optimizer_states.config import BLOCK, Settings
from deep_optimizer_states.core.cache import TileCache
from deep_optimizer_states.core.device.base import Device
from deep_optimizer_states.core.plan import Tile, cut_flat_state
from deep_optimizer_states.core.schedule import Schedule
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

    # Gradients: stock's, from backward to its norms; see [Note: scaled late].

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


class Stock(AnyStock, Protocol):
    """The attributes of DeepSpeed's optimizer that the objects here read, and no others."""

    partition_size: list[int]
    """Elements of this rank's part of each parameter group, padding included."""
    parallel_partitioned_bit16_groups: list[list[Tensor]]
    """16-bit weights by parameter group and rank, each 1-D."""
    grad_position: dict[int, list[int]]
    """Parameter -> group, first element of its own that is here, first one of the group's, number.
    Only of parameters of which this rank has something."""
    reduce_bucket_size: int
    """Elements of a bucket of gradients."""
    real_dp_process_group: list[Any]
    """Ranks that share a parameter group."""
    gradient_accumulation_dtype: torch.dtype
    """Type that backward sums gradients in: that of the weights, or fp32."""


def cut_groups(group_numels: Sequence[int], subgroup_numel: int) -> list[SubgroupSlice]:
    """Cut every group into subgroups, in order."""
    return [
        SubgroupSlice(group, start, length)
        for group, numel in enumerate(group_numels)
        for start, length in cut_flat_state(numel, subgroup_numel)
    ]


def runs_within(slices: Sequence[SubgroupSlice], part: SubgroupSlice) -> list[Tile]:
    """Return the elements of a part of a group, a run for each subgroup that has some."""
    runs = []
    for idx, whole in enumerate(slices):
        start = max(part.start, whole.start)
        end = min(part.start + part.numel, whole.start + whole.numel)
        if whole.master == part.master and start < end:
            runs.append(Tile(idx, start - whole.start, end - start))
    return runs


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


@dataclasses.dataclass(frozen=True)
class _Owing:
    """What tells a parameter's gradient from its copy beside state.

    It is replaced as a whole, so that Ctrl-C finds the factor applied and gone, or neither.
    """

    factor: float = 1.0
    in_fp32: Tensor | None = None
    """1-D, and what the factor is owed to; None for the copy beside state."""


class LateScaled(Gradients):
    """The gradients of this rank, and what they are still to be multiplied with.

    See [Note: kept gradients] and [Note: gradients in fp32].

    Attributes:
        is_writing: Whether stock writes gradients now, which are not to be scaled.
        targets: What stands in for the master weights meanwhile, one for each parameter group.

    Args:
        stock: DeepSpeed's optimizer.
        slices: Its subgroups.
        lanes: What gradients are sent on, home or to tiles that are on the device.
        cache: Which those are.
        wait: Waits for the update in flight, which reads gradients as they are.
    """

    def __init__(
        self,
        stock: Stock,
        slices: Sequence[SubgroupSlice],
        lanes: Device,
        cache: TileCache,
        wait: Callable[[], None],
    ) -> None:
        self.dtype = stock.gradient_accumulation_dtype
        self._stock = stock
        self._slices = slices
        self._cache = cache
        # Stock has one such copy at a time. A bucket of them goes home behind the next bucket.
        self._flushes = Flushes(lanes, stock.reduce_bucket_size * self.dtype.itemsize)
        self._wait = wait
        self._grads: list[Tensor] = []
        self._runs: dict[SubgroupSlice, list[Tile]] = {}
        self._owing: dict[int, _Owing] = {}
        self._is_reading = False
        self.targets: list[GradientTarget] = []
        self.is_writing = False

    def take(self, grads: list[Tensor]) -> None:
        """Work on these: one for each parameter group, 1-D."""
        self._grads = grads
        wholes = [SubgroupSlice(group, 0, grad.numel()) for group, grad in enumerate(grads)]
        self.targets = [GradientTarget(self, whole) for whole in wholes]

    @contextlib.contextmanager
    def writing(self, param_id: int | None = None) -> Iterator[None]:
        """Let stock write gradients.

        Args:
            param_id: The parameter whose gradient is replaced; None for none.
        """
        if param_id is not None:
            self._owing.pop(param_id, None)
        before, self.is_writing = self.is_writing, True
        try:
            yield
        finally:
            self.is_writing = before

    def write(self, part: SubgroupSlice, source: Tensor) -> None:
        """Copy a new gradient to where it is kept, without waiting for the copy.

        Args:
            part: Elements of a group.
            source: Their gradient, 1-D, which later work of the caller's may overwrite.
        """
        value, runs = source.to(self.dtype, copy=True), self._runs_of(part)
        homes = [self._cache.grads_of(run, self.beside_state(run.subgroup)) for run in runs]
        name = f"elements {part.start} to {part.start + part.numel} of group {part.master}"
        self._flushes.send(name, value, list(itertools.chain.from_iterable(homes)))

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Let gradients be read which nobody writes to."""
        before, self._is_reading = self._is_reading, True
        try:
            yield
        finally:
            self._is_reading = before

    def look(self, param_id: int) -> Tensor:
        """Return what stock holds for a parameter of which this rank has something, 1-D, in fp32.

        The next update goes by what is written there.

        Raises:
            UpdateError: A lane failed, or an update.
        """
        owing = self._owing.get(param_id, _Owing())
        if owing.in_fp32 is None:
            part = self._part_of(param_id)
            self.bring_home(self._runs_of(part))
        else:
            self._wait()
        with torch.inference_mode(False):  # it may outlast the caller's
            if owing.in_fp32 is None:
                value = part.of(self._grads[part.master]).to(torch.float32, copy=True)
            else:
                value = owing.in_fp32
            if self._is_reading or owing.factor != 1.0:
                value = value * owing.factor
        if not self._is_reading:
            self._owing[param_id] = _Owing(in_fp32=value)
        return value

    def bring_home(self, runs: Iterable[Tile]) -> None:
        """Have gradients of some runs of elements at home until the next update.

        Raises:
            UpdateError: A lane failed, or an update.
        """
        self._wait()
        self.drain()
        tiles = dict.fromkeys(tile for run in runs for tile in self._cache.schedule.tiles_of(run))
        self._cache.bring_grads_home(tiles)

    @override
    def stale_grads_upcast(self) -> dict[int, Tensor]:
        for param_id in [it for it, owing in self._owing.items() if owing.factor != 1.0]:
            self.look(param_id)
        values = {
            param_id: owing.in_fp32
            for param_id, owing in self._owing.items()
            if owing.in_fp32 is not None
        }
        parts = {param_id: self._runs_of(self._part_of(param_id)) for param_id in values}
        subgroups = sorted({run.subgroup for runs in parts.values() for run in runs})
        if not subgroups:
            return {}
        self.bring_home(Tile(idx, 0, self._slices[idx].numel) for idx in subgroups)
        found = {idx: self.beside_state(idx).to(torch.float32, copy=True) for idx in subgroups}
        for param_id, runs in parts.items():
            value, start = values[param_id], 0
            for run in runs:
                piece = value.narrow(0, start, run.numel)
                found[run.subgroup].narrow(0, run.start, run.numel).copy_(piece)
                start += run.numel
        return found

    def _part_of(self, param_id: int) -> SubgroupSlice:
        group, _, start, numel = self._stock.grad_position[param_id]
        return SubgroupSlice(group, start, numel)

    def _runs_of(self, part: SubgroupSlice) -> list[Tile]:
        if part not in self._runs:
            self._runs[part] = runs_within(self._slices, part)
        return self._runs[part]

    @override
    def stepped(self, factor: float) -> None:
        kept = self._owing
        self._owing = {
            param_id: dataclasses.replace(kept.get(param_id, _Owing()), factor=factor)
            for param_id in self._stock.grad_position
        }

    @override
    def beside_state(self, subgroup: int) -> Tensor:
        part = self._slices[subgroup]
        return part.of(self._grads[part.master])

    @property
    @override
    def have_failed(self) -> bool:
        return self._flushes.have_failed

    @override
    def drain(self) -> None:
        self._flushes.drain()

    @override
    def forget_flushes(self) -> None:
        self._flushes.forget()

    def close(self) -> None:
        """Stop waiting for gradients: the lanes are about to end."""
        self._flushes.close()


class GradientTarget:
    """Stands in for a master weight, for its ``grad`` and for what stock cuts out of that."""

    def __init__(self, gradients: LateScaled, part: SubgroupSlice) -> None:
        self._gradients = gradients
        self._part = part

    @property
    def dtype(self) -> torch.dtype:
        """The type that stock may give them in."""
        return self._gradients.dtype

    @property
    def grad(self) -> GradientTarget:
        """The gradients of its elements."""
        return self

    def view(self, _numel: int) -> GradientTarget:
        """Return it as 1-D, which it is."""
        return self

    def narrow(self, _dim: int, start: int, numel: int) -> GradientTarget:
        """Return elements ``start`` to ``start + numel``."""
        part = SubgroupSlice(self._part.master, self._part.start + start, numel)
        return GradientTarget(self._gradients, part)

    def copy_(self, source: Tensor, non_blocking: bool) -> None:
        """Let these gradients be ``source``, 1-D; whoever reads them waits for the copy."""
        assert non_blocking, "stock would read them at once"
        self._gradients.write(self._part, source)


class _LookedAfter(list[Any]):
    """A list of stock's whose items are looked after when they are taken out.

    ``list`` joins two lists without taking their items out, so that is written here.
    """

    def __add__(self, other: Any) -> Any:
        return list(self) + other

    def __radd__(self, other: Any) -> Any:
        return other + list(self)


class SettledMasters(_LookedAfter):
    """Stands in for Adam's list of a group's master weights: whoever takes one out may write it."""

    def __init__(self, masters: Iterable[Tensor], settle: Callable[[], None]) -> None:
        super().__init__(masters)
        self._settle = settle

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        self._settle()
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[Tensor]:
        self._settle()
        return super().__iter__()

    def __reduce_ex__(self, _protocol: SupportsIndex) -> Any:
        return list, (list(self),)  # a copy is not of this optimizer


class SettledFragments(_LookedAfter):
    """Stands in for stock's list of a group's gradients: asked for one, it returns that in fp32."""

    def __init__(self, param_ids: Iterable[int], gradients: LateScaled) -> None:
        super().__init__(param_ids)
        self._gradients = gradients

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        found = super().__getitem__(index)
        if isinstance(found, list):
            return [self._gradients.look(param_id) for param_id in found]
        return self._gradients.look(found)

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])


class FlatHomes(StateHomes):
    """Homes of parameter groups, in host memory; a subgroup is a slice of one."""

    def __init__(
        self, stock: Stock, slices: Sequence[SubgroupSlice], schedule: Schedule, lanes: Device
    ) -> None:
        super().__init__(stock, slices, schedule, lanes)
        self._flat = stock

    @override
    def weights_of(self, number: int) -> Tensor:
        rank = int(dist.get_rank(self._flat.real_dp_process_group[number]))
        return self._flat.parallel_partitioned_bit16_groups[number][rank]

    @override
    def group_of(self, subgroup: int) -> int:
        return self._slices[subgroup].master
