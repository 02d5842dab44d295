"""Where optimizer state lives: in memory of the lanes' device, or on it."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor

from deep_optimizer_states.config import Settings
from deep_optimizer_states.cores import LaneCores, choose_cores, find_place
from deep_optimizer_states.device.base import Device
from deep_optimizer_states.kernels.tensors import AdamTensors
from deep_optimizer_states.memory import check_host_memory, free_host_bytes, local_ranks
from deep_optimizer_states.schedule import Schedule
from deep_optimizer_states.zero3.stock import Layout, Stock

_MOMENTS = ("exp_avg", "exp_avg_sq")


class StateHomes:
    """The memory of this rank's master weights and moments.

    It owns that memory: resident subgroups have theirs on the device, the others in host memory
    near the cores that step them. Stock keeps the tensors themselves, as keys and values of the
    optimizer's ``state``, and the 16-bit weights; it also names the process groups.

    Args:
        stock: DeepSpeed's optimizer.
        layout: How it has cut the parameters.
        schedule: Which subgroups are resident.
        lanes: Whose memory it is.
    """

    def __init__(self, stock: Stock, layout: Layout, schedule: Schedule, lanes: Device) -> None:
        self._stock = stock
        self._layout = layout
        self._schedule = schedule
        self._lanes = lanes
        self._masters: list[Tensor] = []
        self._moments: list[dict[str, Tensor]] = []

    @property
    def _moments_dtype(self) -> torch.dtype:
        """Type of fresh moments, as ``DeepSpeedCPUAdam`` chooses it."""
        is_fp32 = self._stock.optimizer.fp32_optimizer_states
        return torch.float32 if is_fp32 else self._stock.master_weights_and_grads_dtype

    def reserve(self, settings: Settings, grad_bytes: int) -> None:
        """See that the memory is there, and choose the cores that it will be near. Every rank must.

        Args:
            settings: The checked block of the config.
            grad_bytes: What gradients take beside the state in host memory, in bytes.

        Raises:
            HostMemoryError: There is not enough.
        """
        resident = self._schedule.resident_subgroups
        host_numel = sum(n for idx, n in enumerate(self._layout.numels) if idx not in resident)
        staging_bytes = 2 * self._schedule.staging_numel * self._stock.dtype.itemsize
        free_bytes = settings.host_memory_bytes or free_host_bytes()
        # Or a rank that comes late counts what another has taken already.
        dist.barrier(group=self._stock.dp_process_group)
        master_bytes = self._stock.master_weights_and_grads_dtype.itemsize
        state_bytes = master_bytes + len(_MOMENTS) * self._moments_dtype.itemsize
        needs = (host_numel, staging_bytes + grad_bytes)
        check_host_memory(*needs, free_bytes, local_ranks(), state_bytes)
        self._lanes.near = self._choose_cores(settings)

    def _choose_cores(self, settings: Settings) -> LaneCores:
        mine = find_place(dist.get_rank(), self._lanes.pci_address)
        everyone = [mine]
        for group in (self._stock.dp_process_group, self._stock.model_parallel_group):
            if group is not None:
                found: list[Any] = [None] * dist.get_world_size(group=group)
                # torch's: at DeepSpeed's, which it does not know, its comms_logger calls exit(0).
                torch.distributed.all_gather_object(found, everyone, group=group)
                everyone = list({place.rank: place for part in found for place in part}.values())
        return choose_cores(mine, everyone, settings.host_threads, settings.bind_cores)

    def take_masters(self, masters: list[Tensor]) -> None:
        """Move the master weights of all subgroups, as stock made them, to where they live."""
        self._masters = masters
        for idx, master in enumerate(masters):
            # The tensor object is the key of the optimizer's state, so only its storage moves.
            master.data = self._home_of(idx, master.data)

    def make_moments(self) -> None:
        """Create the moments where they live; no fp32 gradients."""
        dtype = self._moments_dtype
        for idx, master in enumerate(self._masters):
            zeros = [
                self._home_of(idx, torch.zeros_like(master.data, dtype=dtype)) for _ in _MOMENTS
            ]
            self._moments.append(dict(zip(_MOMENTS, zeros, strict=True)))
            self._stock.optimizer.state[master] = {"step": 0, **self._moments[idx]}

    def _home_of(self, subgroup: int, source: Tensor) -> Tensor:
        if subgroup in self._schedule.resident_subgroups:
            return self._lanes.empty_device(source.numel(), source.dtype).copy_(source)
        return self._lanes.host_home(source)

    def return_home(self) -> None:
        """Copy loaded moments into the tensors that held them before loading.

        torch's ``load_state_dict`` puts its own tensors in place of ours, in the type of the master
        weights. Stock goes on with those, so fp32 moments of 16-bit master weights have 16 bits
        from then on. Stock's checkpoints from before the first update have no moments, and ours
        have zeros: fresh ones are made.
        """
        for idx, (master, home) in enumerate(zip(self._masters, self._moments, strict=True)):
            loaded = self._stock.optimizer.state.setdefault(master, {})
            is_fresh = not loaded.get("step", 0)
            for key in _MOMENTS:
                dtype = self._moments_dtype if is_fresh else loaded[key].dtype
                if home[key].dtype != dtype:
                    home[key] = self._home_of(idx, home[key].to(dtype))
                if is_fresh:
                    home[key].zero_()
                elif loaded[key] is not home[key]:
                    home[key].copy_(loaded[key])
                loaded[key] = home[key]
            loaded["step"] = int(loaded.get("step", 0))

    def without_fresh_moments(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint's contents as stock would have them before the first update.

        Stock has no moments then and makes them in their own type later. Zeros in a checkpoint
        would come back in the type of the master weights, and stay so.
        """
        inner = state_dict["optimizer_state_dict"]
        if self._moments_dtype == self._stock.master_weights_and_grads_dtype:
            return state_dict
        kept = {idx: state for idx, state in inner["state"].items() if state["step"]}
        return {**state_dict, "optimizer_state_dict": {**inner, "state": kept}}

    def state_of(self, subgroup: int) -> dict[str, Any]:
        """What the optimizer keeps of a subgroup: ``step`` and both moments."""
        found: dict[str, Any] = self._stock.optimizer.state[self._masters[subgroup]]
        return found

    def tensors_of(self, subgroup: int, grad: Tensor) -> AdamTensors:
        """State and 16-bit weights of a subgroup where they live, beside a gradient of its."""
        master, state = self._masters[subgroup], self.state_of(subgroup)
        weights = self._stock.fp16_partitioned_groups_flat[subgroup].data
        return AdamTensors(master.data, state["exp_avg"], state["exp_avg_sq"], grad, weights)
