"""Run a plan on a device: issue each action on its lane, with the waits that make it exact.

[Note: slots] A device subgroup's master weights, moments and gradient live in one of ``NUM_SLOTS``
device slots while it is stepped. With three, one is prefetched, one stepped and one flushed at the
same time. A slot is prefetched into again only after its flush.

[Note: staging] The CPU lane writes 16-bit weights into one of two host buffers, so that the next
subgroup is stepped while the last one's weights are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deep_optimizer_states.device.base import Device, Event, Wait
from deep_optimizer_states.kernels.host import HostAdam
from deep_optimizer_states.kernels.scalars import AdamScalars
from deep_optimizer_states.plan import Action, Kind, Plan

NUM_SLOTS = 3
NUM_STAGING_BUFFERS = 2


@dataclass(frozen=True)
class Subgroup:
    """The tensors of one subgroup, each of shape (numel,).

    Attributes:
        master: Master weights, fp32, host.
        exp_avg, exp_avg_sq: Moments, fp32, host.
        grad: Summed gradient, fp32, bf16 or fp16, host.
        weights: The weights the model computes with, on the device.
    """

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor
    weights: Tensor


class _Buffers:
    """A buffer of one kind, and the event after which it may be filled again."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors
        self.filled: Event | None = None
        self.stepped: Event | None = None
        self.free: Event | None = None

    def views(self, numel: int) -> tuple[Tensor, ...]:
        return tuple(tensor.narrow(0, 0, numel) for tensor in self.tensors)


class Executor:
    """Runs one plan, once a step.

    Args:
        plan: What to do to which subgroup.
        numels: Elements of each subgroup.
        dtypes: Types of gradients and of the model's weights.
        device: Where device subgroups are stepped.
        host_adam: The CPU lane's kernel.
    """

    def __init__(
        self,
        plan: Plan,
        numels: Sequence[int],
        dtypes: tuple[torch.dtype, torch.dtype],
        device: Device,
        host_adam: HostAdam,
    ) -> None:
        assert plan.num_subgroups == len(numels), (plan.num_subgroups, len(numels))
        self.plan = plan
        self._device = device
        self._host_adam = host_adam
        grad_dtype, weights_dtype = dtypes
        on_device, on_host = plan.device_subgroups, plan.host_subgroups
        slot_numel = max((numels[idx] for idx in on_device), default=0)
        slot_dtypes = (torch.float32, torch.float32, torch.float32, grad_dtype)
        self._slots = [
            _Buffers(tuple(device.empty_slot(slot_numel, dtype) for dtype in slot_dtypes))
            for _ in range(min(NUM_SLOTS, len(on_device)))
        ]
        staging_numel = max((numels[idx] for idx in on_host), default=0)
        self._staging = [
            _Buffers((device.empty_host(staging_numel, weights_dtype),))
            for _ in range(min(NUM_STAGING_BUFFERS, len(on_host)))
        ]
        self._slot_of = {idx: self._slots[n % NUM_SLOTS] for n, idx in enumerate(on_device)}
        self._staging_of = {
            idx: self._staging[n % NUM_STAGING_BUFFERS] for n, idx in enumerate(on_host)
        }
        self._issue: dict[Kind, Callable[[int, Subgroup, AdamScalars], None]] = {
            Kind.PREFETCH: self._prefetch,
            Kind.DEVICE_STEP: self._device_step,
            Kind.STATE_FLUSH: self._state_flush,
            Kind.HOST_STEP: self._host_step,
            Kind.WEIGHTS: self._send_weights,
        }

    @property
    def slot_bytes(self) -> int:
        """Device memory of all slots, in bytes."""
        return sum(tensor.nbytes for slot in self._slots for tensor in slot.tensors)

    def run(self, subgroups: Sequence[Subgroup], scalars: Sequence[AdamScalars]) -> None:
        """Update every subgroup; returns when all state and weights are in place.

        Args:
            subgroups: Tensors of each subgroup, by index.
            scalars: Adam's scalars of each subgroup, by index.

        Raises:
            UpdateError: Work on a lane failed or did not end in time.
        """
        # Weights are still being read by what the caller has queued (backward, all-gathers).
        caller = self._device.record_caller()
        for lane in (self._device.compute, self._device.weights):
            lane.wait(caller, Wait.WEIGHTS_IDLE)
        # Gradients reach host memory on a lane of their own; both Adams read them from there.
        self._device.host_waits(self._device.grads.record(), Wait.GRADS_FLUSHED)
        for action in self.plan.actions:
            self._run_action(action, subgroups, scalars)
        self._device.synchronize()

    def _run_action(
        self, action: Action, subgroups: Sequence[Subgroup], scalars: Sequence[AdamScalars]
    ) -> None:
        idx = action.subgroup
        self._issue[action.kind](idx, subgroups[idx], scalars[idx])

    def _prefetch(self, idx: int, subgroup: Subgroup, scalars: AdamScalars) -> None:
        slot, lane = self._slot_of[idx], self._device.h2d
        if slot.free is not None:  # see [Note: slots]
            lane.wait(slot.free, Wait.SLOT_FREE)
        sources = (subgroup.master, subgroup.exp_avg, subgroup.exp_avg_sq, subgroup.grad)
        targets = slot.views(subgroup.master.numel())
        lane.submit(f"prefetch of subgroup {idx}", lambda: copy_all(targets, sources))
        slot.filled = lane.record()

    def _device_step(self, idx: int, subgroup: Subgroup, scalars: AdamScalars) -> None:
        slot, lane = self._slot_of[idx], self._device.compute
        assert slot.filled is not None, idx
        lane.wait(slot.filled, Wait.PREFETCHED)
        master, exp_avg, exp_avg_sq, grad = slot.views(subgroup.master.numel())
        weights = subgroup.weights
        lane.submit(
            f"step of subgroup {idx}",
            lambda: self._device.adam(master, (exp_avg, exp_avg_sq), grad, weights, scalars),
        )
        slot.stepped = lane.record()

    def _state_flush(self, idx: int, subgroup: Subgroup, scalars: AdamScalars) -> None:
        slot, lane = self._slot_of[idx], self._device.d2h
        assert slot.stepped is not None, idx
        lane.wait(slot.stepped, Wait.STEPPED)
        sources = slot.views(subgroup.master.numel())[:3]
        targets = (subgroup.master, subgroup.exp_avg, subgroup.exp_avg_sq)
        lane.submit(f"state flush of subgroup {idx}", lambda: copy_all(targets, sources))
        self._device.release_slot(slot.tensors)
        slot.free = lane.record()

    def _host_step(self, idx: int, subgroup: Subgroup, scalars: AdamScalars) -> None:
        staging = self._staging_of[idx]
        if staging.free is not None:  # see [Note: staging]
            self._device.host_waits(staging.free, Wait.STAGING_FREE)
        (staged,) = staging.views(subgroup.master.numel())
        self._host_adam.step(
            subgroup.master,
            (subgroup.exp_avg, subgroup.exp_avg_sq),
            subgroup.grad,
            staged,
            scalars,
            torch.get_num_threads(),
        )

    def _send_weights(self, idx: int, subgroup: Subgroup, scalars: AdamScalars) -> None:
        staging, lane = self._staging_of[idx], self._device.weights
        (staged,) = staging.views(subgroup.master.numel())
        target = subgroup.weights
        lane.submit(f"weights of subgroup {idx}", lambda: copy_all((target,), (staged,)))
        staging.free = lane.record()


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensor by tensor, without blocking where the device can."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
