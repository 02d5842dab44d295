"""The way of gradients from the device to the update.

[Note: two gradients] Stock keeps two: a 16-bit sum that every micro-batch of a window adds to, and
the fp32 gradient that the last one makes of it and that the update reads. A parameter which took
part in the window but not in its last micro-batch is updated with the fp32 gradient of an earlier
window: its newer sum is dropped. So the sum of a window that is not over (the *partial* gradient)
has a home apart from the *final* one, which stays what the last update went by. The newest content
of a parameter is in one or the other. Where the caller decides when a window is over
(``managed_gradient_accumulation`` false), every parameter of the window then gets its final
gradient, nothing is dropped, and one home serves as both.

[Note: inactive parameters] Stock multiplies its fp32 gradient in place by the step's factor. A
parameter that got no gradient in a window still has its last one there, already scaled once for
every step since, and is updated with it again. We keep no second gradient, so for such parameters
alone, one is made, in the type of the master weights, and lives until they take part again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.utils import mask_nan_or_inf_with_val_inplace
from deepspeed.utils import logger
from torch import Tensor
from typing_extensions import override

from deep_optimizer_states.adapter.flushes import Flushes
from deep_optimizer_states.adapter.launcher import Gradients
from deep_optimizer_states.adapter.zero3.gathers import GatherBarrier
from deep_optimizer_states.adapter.zero3.stock import Layout, Stock
from deep_optimizer_states.core.cache import TileCache
from deep_optimizer_states.core.device.base import Device, Event, Wait
from deep_optimizer_states.core.host import bytes_of_gradients
from deep_optimizer_states.core.schedule import Schedule
from deep_optimizer_states.errors import ConfigError


def bytes_on_host(stock: Stock, layout: Layout, is_managed: bool) -> int:
    """Return the host memory of gradients, in bytes; those of resident subgroups have a part."""
    each_bytes = bytes_of_gradients(
        stock.gradient_accumulation_dtype.itemsize, micro_batches_of(stock, is_managed)
    )
    return sum(layout.numels) * each_bytes


def micro_batches_of(stock: Stock, is_managed: bool) -> int:
    """Return those of a window; 1 where one home serves for all: see [Note: two gradients]."""
    return stock.gradient_accumulation_steps if is_managed else 1


class GradientFlush(Gradients):
    """Sends reduced gradients to their homes on a lane of their own, in 16 bits.

    Final gradients live in host memory, those of resident subgroups on the device. A tile that the
    cache keeps has its own where its state is; whoever looks at gradients has them copied home.
    See also [Note: two gradients].

    It owns every home of a gradient but the flat buffer in host memory, which stock holds as
    ``grad_partitions_flat_buffer``, and the cache's; the flushes in flight; the older gradients of
    parameters that took no part; and what it has seen of the current window. Of stock it reads that
    buffer, which micro-batch runs, and the norms, to which it adds those that it takes.
    """

    def __init__(  # noqa: PLR0913 - each is a thing of its own
        self,
        stock: Stock,
        layout: Layout,
        schedule: Schedule,
        lanes: Device,
        barrier: GatherBarrier,
        is_managed: bool,
        cache: TileCache,
    ) -> None:
        self._cache = cache
        self._stock = stock
        self._layout = layout
        self._schedule = schedule
        self._lanes = lanes
        self._barrier = barrier
        self._is_managed = is_managed
        self._on_final: Callable[[int], None] = lambda ds_id: None
        self.dtype = stock.gradient_accumulation_dtype
        self._flushed: dict[int, Event] = {}
        self._on_device: dict[int, Tensor] = {}
        self._partial_flat: Tensor | None = None
        self._partial: set[int] = set()
        self._inactive = InactiveGradients(self._home, stock.master_weights_and_grads_dtype)
        self._active: set[int] = set()
        self._is_window_open = False
        self._has_warned = False
        # As much in flight as stock allows: about two buckets of gradients in fp32.
        self._flushes = Flushes(lanes, 2 * stock.reduce_bucket_size * torch.float32.itemsize)

    def set_callback(self, on_final: Callable[[int], None]) -> None:
        """Call ``on_final`` with each parameter whose final gradient is on its way home."""
        self._on_final = on_final

    def make_homes(self) -> None:
        """Take the memory beside stock's flat buffer, which must be in its place."""
        dtype = self._stock.gradient_accumulation_dtype
        for subgroup in self._schedule.resident_subgroups:
            home = self._lanes.empty_device(self._layout.numels[subgroup], dtype)
            self._on_device[subgroup] = home.zero_()
        if micro_batches_of(self._stock, self._is_managed) > 1:
            self._make_partial_homes()

    def _make_partial_homes(self) -> Tensor:
        flat = self._stock.grad_partitions_flat_buffer
        self._partial_flat = self._lanes.empty_host(flat.numel(), flat.dtype).zero_()
        return self._partial_flat

    def host_grads(self, subgroup: int) -> Tensor:
        """Return a subgroup's place in stock's flat buffer, 1-D."""
        start, numel = self._layout.starts[subgroup], self._layout.numels[subgroup]
        return self._stock.grad_partitions_flat_buffer.narrow(0, start, numel)

    @override
    def beside_state(self, subgroup: int) -> Tensor:
        is_resident = subgroup in self._schedule.resident_subgroups
        return self._on_device[subgroup] if is_resident else self.host_grads(subgroup)

    def _home(self, ds_id: int) -> Tensor:
        place = self._layout.slices[ds_id]
        return self.beside_state(place.subgroup).narrow(0, place.start, place.numel)

    def _pieces(self, ds_id: int, numel: int) -> list[Tensor]:
        """Return the first ``numel`` elements of a final gradient where it is kept, in pieces."""
        run = replace(self._layout.slices[ds_id], numel=numel)
        return self._cache.grads_of(run, self.beside_state(run.subgroup))

    def _partial_home(self, ds_id: int) -> Tensor:
        flat = self._partial_flat
        if flat is None:  # the caller moved the end of a window of one micro-batch
            flat = self._make_partial_homes()
        return self._layout.view(flat, ds_id)

    def _newest(self, ds_id: int, device: torch.device, numel: int) -> Tensor:
        """Return a copy of what a parameter's gradient is by now, in the order of the caller."""
        if ds_id in self._partial:
            pieces = [self._partial_home(ds_id).narrow(0, 0, numel)]
        else:
            self._barrier.wait_for(ds_id, Wait.GRAD_READ)  # or it may be on its way to the device
            pieces = self._pieces(ds_id, numel)
        moved = [piece.to(device, copy=True, non_blocking=True) for piece in pieces]
        return moved[0] if len(moved) == 1 else torch.cat(moved)

    def _come_home(self) -> None:
        """Wait for flushes, and copy home what the cache keeps."""
        self.drain()
        self._cache.copy_grads_home()

    def partition(self, params: list[Any], partitions: list[Tensor]) -> None:
        """Start to flush this rank's share of reduced gradients to their home.

        Args:
            params: Parameters whose gradients were reduced.
            partitions: This rank's slice of each, 1-D, on the device. Views of a bucket that the
                next reduction overwrites.
        """
        self._is_window_open = True
        for param, partition in zip(params, partitions, strict=True):
            if param.ds_id in self._layout.owned:
                self._stock._offload_boundary_param_ids.add(param.ds_id)
                self.flush(param.ds_id, partition)
            if param.grad is not None and not get_accelerator().is_synchronized_device():
                param.grad.record_stream(get_accelerator().current_stream())
            param.grad = None

    def flush(self, ds_id: int, partition: Tensor) -> None:
        """Send one slice to its home; ``partition`` may be overwritten when this returns."""
        numel, stock = partition.numel(), self._stock
        is_boundary = stock.is_gradient_accumulation_boundary()
        is_final = is_boundary or not self._is_managed
        if stock.micro_step_id == 0:
            value = partition.to(self.dtype, copy=True)
        else:
            # None when a parameter's first gradient arrives after the window's first micro-batch.
            if (flushed := self._flushed.get(ds_id)) is not None:
                self._lanes.caller_waits(flushed, Wait.GRAD_HOME)
            value = self._newest(ds_id, partition.device, numel)
            value.add_(partition.to(self.dtype).view(value.shape))
        if is_boundary:
            stock.norm_for_param_grads[ds_id] = stock._constant_buffered_norm2(value)
        if is_final:
            self._partial.discard(ds_id)
            self._barrier.wait_for(ds_id, Wait.GRAD_READ)
            homes = self._pieces(ds_id, numel)  # an update may just have taken it to the device
        else:
            self._partial.add(ds_id)
            homes = [self._partial_home(ds_id).narrow(0, 0, numel)]
        self._flushed[ds_id] = self._flushes.send(f"parameter {ds_id}", value, homes)
        if is_boundary:
            self._on_final(ds_id)

    @property
    @override
    def have_failed(self) -> bool:
        return self._flushes.have_failed

    @override
    def drain(self) -> None:
        self._flushes.drain()

    @override
    def forget_flushes(self) -> None:
        self._flushed.clear()
        self._flushes.forget()

    def close(self) -> None:
        """Stop waiting for flushes: the lanes are about to end."""
        self._flushes.close()

    def take_norms_from_homes(self) -> None:
        """Compute norms again after the caller ended the window by hand, after backward."""
        self._come_home()
        stock, device = self._stock, get_accelerator().current_device_name()
        for ds_id in self._layout.slices:
            if ds_id in stock._offload_boundary_param_ids:
                home = self._home(ds_id).to(device)
                stock.norm_for_param_grads[ds_id] = stock._constant_buffered_norm2(home)

    def fetch_norms(self) -> None:
        """Bring all norms to the host in one wait for the device, where stock has one for each."""
        norms = self._stock.norm_for_param_grads
        if norms:
            fetched = torch.stack(list(norms.values())).cpu().unbind()
            norms.update(zip(norms, fetched, strict=True))

    def norms_of_subgroups(self) -> list[Tensor]:
        """Return stock's norm of every subgroup over the ranks, with one wait for the device.

        The operations on each number are stock's, in its order. The reduction stays one for each
        subgroup: one of all of them might add the ranks up in another order.
        """
        groups, norms = self._stock.fp16_groups, self._stock.norm_for_param_grads
        squares = torch.tensor(
            [
                float(sum(norms[param.ds_id] ** 2 for param in group if param.ds_id in norms))
                for group in groups
            ],
            dtype=torch.float32,
            device="cpu",  # not the default device, which the caller may have set
        )
        on_device = squares.to(get_accelerator().current_device_name())
        for idx, group in enumerate(groups):
            ranks = self._stock._get_param_partition_group(group[0])
            dist.all_reduce(on_device.narrow(0, idx, 1), op=dist.ReduceOp.SUM, group=ranks)
        roots = torch.stack([square**0.5 for square in on_device.unbind()])
        mask_nan_or_inf_with_val_inplace(roots, device=roots.device)
        return list(roots.cpu().unbind())

    def are_finite(self) -> bool:
        """Return whether no gradient of this rank is infinite or NaN.

        Stock scans all host gradients twice. Finite norms prove the same, unless a parameter got no
        gradient in this window: its older gradient has no norm.
        """
        self.drain()
        norms, owned = self._stock.norm_for_param_grads, self._layout.owned
        is_covered = bool(owned) and owned <= norms.keys()
        if is_covered and torch.stack([norms[ds_id] for ds_id in owned]).isfinite().all():
            return True
        self._come_home()
        if self._partial:
            homes = {True: self._partial_home, False: self._home}
            every = [homes[ds_id in self._partial](ds_id) for ds_id in self._layout.slices]
        else:
            every = [self.beside_state(idx) for idx in range(len(self._layout.numels))]
        return all(bool(torch.isfinite(grads).all()) for grads in every)

    def begin_step(self) -> None:
        """Note which parameters got a gradient; warn once of gradients that the update drops."""
        self._active = set(self._stock.norm_for_param_grads)
        if self._has_warned or not self._is_managed:
            return
        lost = self._stock._offload_boundary_param_ids - self._active
        if lost:
            params = itertools.chain.from_iterable(self._stock.fp16_groups)
            names = self._stock.param_names
            dropped = [names.get(param, param.ds_id) for param in params if param.ds_id in lost]
            self._has_warned = True
            logger.warning(
                f"deep_optimizer_states: parameters {dropped[:5]} ({len(dropped)} in all) got "
                "gradients in this accumulation window but none in its last micro-batch. As stock "
                "DeepSpeed does, the update drops them and uses an older gradient again. Use every "
                'parameter in the last micro-batch, or "managed_gradient_accumulation": false, '
                "which drops nothing. Said once"
            )

    @override
    def stale_grads_upcast(self) -> dict[int, Tensor]:
        inactive = self._layout.owned - self._active
        if inactive:
            self._come_home()
        found: dict[int, Tensor] = {}
        for ds_id, gradient in self._inactive.collect(inactive).items():
            place = self._layout.slices[ds_id]
            if place.subgroup not in found:
                final = self.beside_state(place.subgroup)
                kept = self._stock.master_weights_and_grads_dtype
                found[place.subgroup] = final.to(kept, copy=True)
            found[place.subgroup].narrow(0, place.start, place.numel).copy_(gradient)
        return found

    @override
    def stepped(self, factor: float) -> None:
        self._inactive.stepped(self._active & self._layout.owned, factor)

    def end_step(self, is_skipped: bool) -> None:
        """End the window; with ``is_skipped`` an overflow has kept the step from updating."""
        self._is_window_open = False
        if is_skipped:
            self._inactive.skipped(self._active & self._layout.owned)

    def as_fp32(self, ds_id: int) -> Tensor:
        """Return what stock holds in host memory: the raw gradient, after a step the scaled one.

        Returns:
            1-D, in the type of master weights, which is fp32 unless 16 bits were asked for.

        Raises:
            ConfigError: Asked in a window whose end the caller decides.
        """
        is_over = self._stock.is_gradient_accumulation_boundary() or not self._is_window_open
        if not self._is_managed and not is_over:
            raise ConfigError(
                "a gradient was asked for between backward and engine.step(): with "
                "managed_gradient_accumulation false stock DeepSpeed has the last step's there, "
                "which is overwritten here; ask after engine.step()"
            )
        self._come_home()
        if ds_id in self._stock.norm_for_param_grads:  # of this window
            kept = self._stock.master_weights_and_grads_dtype
            return self._home(ds_id).to("cpu", kept, copy=True)
        return self._inactive.value(ds_id).cpu()


class InactiveGradients:
    """Gradients of the parameters that stock would update with a stale one."""

    def __init__(
        self, home_of: Callable[[int], Tensor], dtype: torch.dtype = torch.float32
    ) -> None:
        self._home_of = home_of
        self._dtype = dtype
        self._stale: dict[int, Tensor] = {}
        self._last_factor: dict[int, float] = {}

    def collect(self, inactive: Iterable[int]) -> dict[int, Tensor]:
        """Return gradients of parameters without one in this step, before this step's factor.

        Returns:
            Key -> gradient, 1-D. Parameters that never had one are left out: their home is 0.
        """
        for key in inactive:
            if key in self._stale:
                continue
            factor = self._last_factor.get(key)
            if factor is not None:
                self._stale[key] = self._home_of(key).to(self._dtype, copy=True).mul_(factor)
        return {key: self._stale[key] for key in inactive if key in self._stale}

    def value(self, key: int) -> Tensor:
        """Return a copy of a parameter's gradient as the last step left it, 1-D."""
        if key in self._stale:
            return self._stale[key].clone()
        home = self._home_of(key).to(self._dtype, copy=True)
        return home.mul_(self._last_factor.get(key, 1.0))

    def stepped(self, active: Iterable[int], factor: float) -> None:
        """Multiply the kept gradients by the step's factor, rounded to fp32."""
        for key in active:
            self._stale.pop(key, None)
            self._last_factor[key] = factor
        for gradient in self._stale.values():
            gradient.mul_(factor)

    def skipped(self, active: Iterable[int]) -> None:
        """Note that the step was skipped (overflow): this window's gradients stay as they came."""
        for key in active:
            self._stale.pop(key, None)
            self._last_factor[key] = 1.0
