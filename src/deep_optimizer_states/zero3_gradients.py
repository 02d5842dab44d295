"""How gradients leave the device: our half of ZeRO-3's backward. See ``zero3`` for the rest.

[Note: two gradients] Stock keeps two: a 16-bit sum that every micro-batch of a window adds to, and
the fp32 gradient that the last one makes of it and that the update reads. A parameter which took
part in the window but not in its last micro-batch is updated with the fp32 gradient of an earlier
window: its newer sum is dropped. So the sum of a window that is not over (the *partial* gradient)
has a home apart from the *final* one, which stays what the last update went by. The newest content
of a parameter is in one or the other. Where the caller decides when a window is over
(``managed_gradient_accumulation`` false), every parameter of the window then gets its final
gradient, nothing is dropped, and one home serves as both.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import mask_nan_or_inf_with_val_inplace
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from deep_optimizer_states.device.base import Device, Event, PendingBytes, Wait
from deep_optimizer_states.errors import ConfigError
from deep_optimizer_states.executor import copy_all
from deep_optimizer_states.inactive import InactiveGradients
from deep_optimizer_states.plan import subgroup_offsets


class GradientFlush(DeepSpeedZeroOptimizer_Stage3):
    """ZeRO-3 whose reduced gradients go to their home on a lane of their own, in 16 bits.

    A subgroup's final gradients live in host memory, or on the device when they are read there
    alone. Of others that the device may read it can have a copy. See also [Note: two gradients].

    Args:
        lanes: Where the copies run.
        is_managed: Whether DeepSpeed knows, in a backward, if the window ends with it.
        args, kwargs: As DeepSpeed passes them to its own class.
    """

    grad_partitions_flat_buffer: Tensor
    norm_for_param_grads: dict[int, Tensor]
    offload_optimizer_pin_memory: bool

    def __init__(self, lanes: Device, is_managed: bool, *args: Any, **kwargs: Any) -> None:
        self._lanes = lanes
        self._grad_events: dict[int, Event] = {}
        self._device_grads: dict[int, Tensor] = {}
        self._copied_grads: dict[int, Tensor] = {}
        self._is_managed = is_managed
        self._partial_flat: Tensor | None = None
        self._partial: set[int] = set()
        self._has_warned = False
        self._inactive = InactiveGradients(self._grad_home_of_key)
        self._grad_scale = 1.0
        self._active: set[int] = set()
        self._is_window_open = False
        self._closed = False
        # As much in flight as stock allows: about two buckets of gradients, 4 bytes an element.
        self._pending = PendingBytes(2 * kwargs["reduce_bucket_size"] * 4)
        super().__init__(*args, **kwargs)

    @functools.cached_property
    def _subgroup_numels(self) -> list[int]:
        return [int(numel) for numel in self.fp16_partitioned_groups_flat_numel]

    @functools.cached_property
    def _subgroup_starts(self) -> list[int]:
        return subgroup_offsets(self._subgroup_numels)

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
        if self._holds_partial_grads:
            self._partial_flat = self._lanes.empty_host(flat.numel(), flat.dtype).zero_()
        views = self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        start = 0
        for param in itertools.chain.from_iterable(self.fp16_groups):
            views[param.ds_id] = flat.narrow(0, start, param.partition_numel())
            start += param.partition_numel()

    def _wait_for(self, param: Any, why: Wait) -> None:
        """Wait until the update in flight is done with a parameter; ``zero3`` knows how."""

    @property
    def _holds_partial_grads(self) -> bool:
        return self._is_managed and self.gradient_accumulation_steps > 1

    def _grad_home(self, param: Any) -> Tensor:
        return self._grad_home_of_key(self.get_param_id(param))

    def _grad_home_of_key(self, key: int) -> Tensor:
        subgroup, offset, numel = self.grad_position[key]
        return self._subgroup_grads(subgroup).narrow(0, offset, numel)

    def _subgroup_grads(self, subgroup: int) -> Tensor:
        if subgroup in self._device_grads:
            return self._device_grads[subgroup]
        return self._host_grads(subgroup)

    def _host_grads(self, subgroup: int) -> Tensor:
        flat = self.grad_partitions_flat_buffer
        return flat.narrow(0, self._subgroup_starts[subgroup], self._subgroup_numels[subgroup])

    def _partial_home(self, param: Any) -> Tensor:
        flat = self.grad_partitions_flat_buffer
        if self._partial_flat is None:  # the caller moved the end of a window of one micro-batch
            self._partial_flat = self._lanes.empty_host(flat.numel(), flat.dtype).zero_()
        subgroup, offset, numel = self.grad_position[self.get_param_id(param)]
        return self._partial_flat.narrow(0, self._subgroup_starts[subgroup] + offset, numel)

    def _newest_grad(self, param: Any) -> Tensor:
        """What stock has in its 16-bit buffer, see [Note: two gradients]."""
        is_partial = param.ds_id in self._partial
        return self._partial_home(param) if is_partial else self._grad_home(param)

    def _keep_grads_on_device(self, device_only: Iterable[int], also_host: Iterable[int]) -> int:
        """From the next update on let the device read gradients of its own memory.

        Args:
            device_only: Subgroups whose gradients only the device reads.
            also_host: Subgroups whose gradients the CPU may read as well.

        Returns:
            Bytes of device memory that this took.
        """
        self._drain_grads()
        taken = 0
        for subgroups, kept in ((device_only, self._device_grads), (also_host, self._copied_grads)):
            for subgroup in subgroups:
                home = self._host_grads(subgroup)
                kept[subgroup] = self._lanes.empty_device(home.numel(), home.dtype).copy_(home)
                taken += home.nbytes
        return taken

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
        numel = partition.numel()
        is_final = self.is_gradient_accumulation_boundary() or not self._is_managed
        homes = [self._grad_home(param) if is_final else self._partial_home(param)]
        dtype = homes[0].dtype
        if self.micro_step_id == 0:
            value = partition.to(dtype, copy=True)
        else:
            # None: this parameter's first gradient ever comes late in a window.
            if (flushed := self._grad_events.get(param.ds_id)) is not None:
                self._lanes.caller_waits(flushed, Wait.GRAD_HOME)
            newest = self._newest_grad(param).narrow(0, 0, numel)
            value = newest.to(partition.device, copy=True, non_blocking=True)
            value.add_(partition.to(dtype).view(value.shape))
        if self.is_gradient_accumulation_boundary():
            self._keep_norm(param, value)
        if is_final:
            self._partial.discard(param.ds_id)
            self._wait_for(param, Wait.GRAD_READ)
            homes += self._copies_of(param)
        else:
            self._partial.add(param.ds_id)
        homes = [home.narrow(0, 0, numel) for home in homes]
        lane = self._lanes.grads
        lane.wait(self._lanes.record_caller(), Wait.GRAD_READY)
        lane.submit(
            f"gradient flush of parameter {param.ds_id}",
            lambda: copy_all(homes, [value] * len(homes)),
            uses=(value,),
        )
        self._grad_events[param.ds_id] = event = lane.record()
        self._pending.add(event, value.nbytes)

    def _copies_of(self, param: Any) -> list[Tensor]:
        subgroup, offset, numel = self.grad_position[self.get_param_id(param)]
        copies = self._copied_grads.get(subgroup)
        return [] if copies is None else [copies.narrow(0, offset, numel)]

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

    def _get_norm_groups(self) -> list[Tensor]:
        """Stock's norm of every subgroup, with two waits for the device in all, not two for each.

        The operations on each number are stock's, in its order. The reduction stays one for each
        subgroup: one of all of them might add the ranks up in another order.
        """
        if self.norm_for_param_grads:
            norms = torch.stack(list(self.norm_for_param_grads.values())).cpu().unbind()
            self.norm_for_param_grads = dict(zip(self.norm_for_param_grads, norms, strict=True))
        groups = self.fp16_groups
        if self.model_parallel_group is not None or any(
            self._autoep_expert_parallel_group(group) is not None for group in groups
        ):
            return list(super()._get_norm_groups())
        squares = torch.tensor(
            [float(self._squared_norm(group)) for group in groups],
            dtype=torch.float32,
            device="cpu",  # not the default device, which the caller may have set
        )
        on_device = squares.to(get_accelerator().current_device_name())
        for idx, group in enumerate(groups):
            ranks = self._get_param_partition_group(group[0])
            dist.all_reduce(on_device.narrow(0, idx, 1), op=dist.ReduceOp.SUM, group=ranks)
        roots = torch.stack([square**0.5 for square in on_device.unbind()])
        mask_nan_or_inf_with_val_inplace(roots, device=roots.device)
        return list(roots.cpu().unbind())

    def _squared_norm(self, group: list[Any]) -> Tensor | float:
        total: Tensor | float = 0.0
        for param in group:
            norm = self.norm_for_param_grads.get(self.get_param_id(param))
            if norm is not None:
                total += norm**2
        return total

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Whether a gradient of any rank is infinite or NaN.

        Stock reads all of the host's gradients twice. Norms that are finite say as much, where they
        cover every gradient: one of a parameter that took no part is older, and not covered.
        """
        self._drain_grads()
        flat = self.grad_partitions_flat_buffer
        # One look at a single number: stock reduces what it finds over the ranks.
        seen = 0.0 if self._norms_show_no_overflow() or self._are_all_finite() else torch.inf
        self.grad_partitions_flat_buffer = flat.new_full((1,), seen)
        try:
            return bool(super().has_overflow(partition_gradients))
        finally:
            self.grad_partitions_flat_buffer = flat

    def _are_all_finite(self) -> bool:
        if not self._partial:
            every = [self._subgroup_grads(idx) for idx in range(len(self._subgroup_numels))]
        else:
            every = [self._newest_grad(param) for group in self.fp16_groups for param in group]
        return all(bool(torch.isfinite(grads).all()) for grads in every)

    def _norms_show_no_overflow(self) -> bool:
        owned = [
            self.get_param_id(param)
            for group in self.fp16_groups
            for param in group
            if self._holds_real_data(param)
        ]
        norms = [self.norm_for_param_grads.get(key) for key in owned]
        found = [norm for norm in norms if norm is not None]
        if len(found) < len(owned) or not found:
            return False
        return bool(torch.isfinite(torch.stack(found)).all())

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
        """What stock holds in host memory: after a step the scaled gradient, before it the raw one.

        Raises:
            ConfigError: Asked in a window whose end the caller decides.
        """
        is_over = self.is_gradient_accumulation_boundary() or not self._is_window_open
        if not self._is_managed and not is_over:
            raise ConfigError(
                "a gradient was asked for between backward and engine.step(): with "
                "managed_gradient_accumulation false stock DeepSpeed has the last step's there, "
                "which is overwritten here; ask after engine.step()"
            )
        self._drain_grads()
        key = self.get_param_id(param)
        if key in self.norm_for_param_grads:  # of this window
            return self._grad_home(param).to("cpu", torch.float32, copy=True)
        return self._inactive.value(key).cpu()

    def _refuse_to_write_grads(self, *_args: Any, **_kwargs: Any) -> None:
        raise ConfigError(
            "gradients cannot be set from outside: there is no fp32 gradient to write to; "
            'set "deep_optimizer_states.enabled" to false to change gradients before a step'
        )

    set_fp32_grad_for_param = _refuse_to_write_grads
    set_local_grad_for_param = _refuse_to_write_grads
    update_fp32_grad_for_param_vectorized = _refuse_to_write_grads
