"""Homes of optimizer state: host memory near the cores of the CPU lane, or the device's."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from deepspeed import comm as dist
from torch import Tensor

from deep_optimizer_states.config import Settings
from deep_optimizer_states.core.device.base import Device
from deep_optimizer_states.core.host import (
    HostRoom,
    LaneCores,
    bytes_of_state,
    choose_cores,
    find_place,
    free_host_bytes,
    local_ranks,
)
from deep_optimizer_states.core.kernels.adam import AdamTensors
from deep_optimizer_states.core.kernels.host import Tail
from deep_optimizer_states.core.schedule import Schedule

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class SubgroupSlice:
    """A subgroup: elements ``start`` to ``start + numel`` of the master weight of that number."""

    master: int
    start: int
    numel: int

    def of(self, flat: Tensor) -> Tensor:
        """Return these elements of a 1-D tensor as long as the master weight."""
        return flat.narrow(0, self.start, self.numel)


class StateHomes(abc.ABC):
    """The memory of this rank's master weights and moments.

    It owns that memory, which lies near the cores that step it. Stock keeps the tensors themselves,
    as keys and values of the optimizer's ``state``, the 16-bit weights and the process groups.
    """

    def __init__(
        self, stock: AnyStock, slices: Sequence[SubgroupSlice], schedule: Schedule, lanes: Device
    ) -> None:
        self._stock = stock
        self._slices = slices
        self._schedule = schedule
        self._lanes = lanes
        self._masters: list[Tensor] = []
        self._moments: list[dict[str, Tensor]] = []

    @property
    def _moments_dtype(self) -> torch.dtype:
        """Type of fresh moments, as ``DeepSpeedCPUAdam`` chooses it."""
        is_fp32 = self._stock.optimizer.fp32_optimizer_states
        return torch.float32 if is_fp32 else self._stock.master_weights_and_grads_dtype

    @property
    def num_subgroups(self) -> int:
        """Subgroups of this rank, empty ones too."""
        return len(self._slices)

    @abc.abstractmethod
    def weights_of(self, number: int) -> Tensor:
        """Return the 16-bit weights of a master weight, looked up anew: stock may replace them."""

    @abc.abstractmethod
    def group_of(self, subgroup: int) -> int:
        """Return the parameter group that a subgroup is of."""

    def tensors_of(self, subgroup: int, grad: Tensor) -> AdamTensors:
        """Return a subgroup's state and 16-bit weights where they live, beside its gradient."""
        part = self._slices[subgroup]
        state = self._state_of(part.master)
        whole = (self._masters[part.master], state["exp_avg"], state["exp_avg_sq"])
        master, exp_avg, exp_avg_sq = [part.of(tensor.data) for tensor in whole]
        weights = part.of(self.weights_of(part.master).data)
        return AdamTensors(master, exp_avg, exp_avg_sq, grad, weights)

    def state_on_host(self) -> list[list[Tensor]]:
        """Return master weights and moments of each tile that an update overwrites in host memory.

        They are views. The list is empty for a tile whose state is resident on the device.
        """
        found: list[list[Tensor]] = []
        for tile in self._schedule.tiles:
            part, whole = self._slices[tile.subgroup], list[Tensor]()
            if tile.subgroup not in self._schedule.resident_subgroups:
                whole = [self._masters[part.master], *self._moments[part.master].values()]
            found.append([part.of(one.data).narrow(0, tile.start, tile.numel) for one in whole])
        return found

    def count_step(self, subgroup: int) -> int:
        """Step stock's counter of the master weight, once for all of its subgroups; return it."""
        part = self._slices[subgroup]
        state = self._state_of(part.master)
        if part.start == 0:
            state["step"] += 1
        return int(state["step"])

    def tail_start(self, subgroup: int, tail: Tail) -> int:
        """Return the first element that is rounded as a tail; not clamped to the subgroup.

        Stock steps the whole master weight at once.
        """
        part = self._slices[subgroup]
        return tail.start(self._masters[part.master].numel()) - part.start

    def _state_of(self, number: int) -> dict[str, Any]:
        state: dict[str, Any] = self._stock.optimizer.state[self._masters[number]]
        if not state:  # stock has none before its first step, in checkpoints neither
            state |= {"step": 0, **self._moments[number]}
        return state

    def reserve(self, room: HostRoom, grad_bytes: int, remedy: str) -> None:
        """Check that host memory suffices, and choose CPU cores. Every rank must call it.

        Args:
            room: What there is of it.
            grad_bytes: What gradients take beside the state in host memory, in bytes.
            remedy: As in :meth:`HostRoom.check`.

        Raises:
            HostMemoryError: There is not enough.
        """
        resident = self._schedule.resident_subgroups
        host_numel = sum(part.numel for idx, part in enumerate(self._slices) if idx not in resident)
        staging_bytes = self._schedule.staged_numel * self._stock.dtype.itemsize
        room.check(host_numel, staging_bytes + grad_bytes, remedy)
        self._lanes.cpu_affinity = self._choose_cores()

    def _choose_cores(self) -> LaneCores:
        mine = find_place(dist.get_rank(), self._lanes.pci_address)
        everyone = [mine]
        for group in (self._stock.dp_process_group, self._stock.model_parallel_group):
            if group is not None:
                found: list[Any] = [None] * dist.get_world_size(group=group)
                # torch's: at DeepSpeed's, which it does not know, its comms_logger calls exit(0).
                torch.distributed.all_gather_object(found, everyone, group=group)
                everyone = list({place.rank: place for part in found for place in part}.values())
        return choose_cores(mine, everyone)

    def take_masters(self, masters: list[Tensor]) -> None:
        """Move the master weights that stock made to where they live."""
        self._masters = masters
        for number, master in enumerate(masters):
            # The tensor object is the key of the optimizer's state, so only its storage moves.
            master.data = self._home_of(number, master.data)

    def make_moments(self) -> None:
        """Take the memory of the moments, which are 0."""
        dtype = self._moments_dtype
        for number, master in enumerate(self._masters):
            fresh = [torch.zeros_like(master.data, dtype=dtype) for _ in _MOMENTS]
            zeros = [self._home_of(number, moment) for moment in fresh]
            self._moments.append(dict(zip(_MOMENTS, zeros, strict=True)))

    def _home_of(self, number: int, source: Tensor) -> Tensor:
        return self._lanes.host_home(source)

    def return_home(self) -> None:
        """Copy loaded moments into the tensors that held them before loading.

        torch's ``load_state_dict`` replaces our tensors by its own, in the type of the master
        weights. Stock continues with those, so fp32 moments of 16-bit master weights have 16 bits
        from then on. A checkpoint from before the first step has no moments, or zeros. The moments
        are then 0 again, in their first type.
        """
        for number, (master, home) in enumerate(zip(self._masters, self._moments, strict=True)):
            loaded = self._stock.optimizer.state.get(master, {})
            is_fresh = not loaded.get("step", 0)
            for key in _MOMENTS:
                dtype = self._moments_dtype if is_fresh else loaded[key].dtype
                if home[key].dtype != dtype:
                    home[key] = self._home_of(number, home[key].to(dtype))
                if is_fresh:
                    home[key].zero_()
                elif loaded[key] is not home[key]:
                    home[key].copy_(loaded[key])
            if loaded:
                loaded |= home
                loaded["step"] = int(loaded.get("step", 0))


def measure_host(
    stock: AnyStock,
    settings: Settings,
    state_dtypes: Iterable[torch.dtype],
    taken_bytes: int = 0,
) -> HostRoom:
    """Return the host memory that there is for state; to be called by every rank.

    Args:
        stock: Whose ranks share it.
        settings: The checked block of the config.
        state_dtypes: Types of master weights and of moments.
        taken_bytes: What this rank has taken of it already, in bytes.
    """
    num_ranks = local_ranks()
    # What ranks have allocated already counts as free for them. The barrier stops any rank from
    # allocating more before all have measured.
    free_bytes = settings.host_memory_bytes or free_host_bytes() + taken_bytes * num_ranks
    dist.barrier(group=stock.dp_process_group)
    state_bytes = bytes_of_state(*(dtype.itemsize for dtype in state_dtypes))
    return HostRoom(free_bytes, num_ranks, state_bytes)


class AnyStock(Protocol):
    """The attributes of DeepSpeed's optimizer that the shared objects read, and no others."""

    optimizer: Any
    """The ``DeepSpeedCPUAdam``: its state by master weight, and its parameter groups."""
    dtype: torch.dtype
    """Type of the model's weights."""
    master_weights_and_grads_dtype: torch.dtype
    """Type of master weights, and of the gradients that stock updates them with."""
    dp_process_group: Any
    model_parallel_group: Any
