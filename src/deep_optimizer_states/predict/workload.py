"""What is to be predicted: a model, how it is split over ranks, and who updates its state."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property

from deep_optimizer_states.core.schedule import Schedule
from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.predict.model import ModelShape

OURS = "ours"
"""Name of this package's engine."""
POLICIES = ("auto", "all-host", "ratio", "stride", "all-device", "dynamic")
DTYPES = ("bf16", "fp16", "fp32")
FP32_BYTES = 4
STATE_BYTES = 3 * FP32_BYTES
"""Master weight and two moments of a parameter."""


class WorkloadError(DeepOptimizerStatesError, ValueError):
    """A workload that cannot be; names field, value and reason."""


@dataclass(frozen=True, eq=False)
class StockOffload:
    """Software other than this package: the defaults are today's DeepSpeed ZeRO-3 offload.

    After each of the CPU's steps a host thread copies fp32 weights to the device. With ``slots``,
    one subgroup in ``stride`` passes through the device: a host thread copies its fp32 gradient
    there, 16-bit weights are sent behind the next step, and nobody waits for the last flush.
    """

    name: str = "zero3"  # printed beside predictions
    words: str = "every subgroup on the CPU"  # who updates what; may hold {stride} and {where}
    # Bytes of a gradient that are copied to the host: today's DeepSpeed copies it as it is, and
    # again as fp32.
    flush_bytes: int = 6
    # Those copies run behind backward, at the rate of page-locked memory; else they come after it,
    # at the rate of pageable memory.
    hides_flush: bool = True
    keeps_last: bool = False  # at a ratio below 1 the last subgroups are resident, not the first
    blocking_rate: str = "h2d_bytes_per_s"  # of copies that a host thread waits for
    slots: int = 0  # subgroups that pass through the device at once
    locked_arrays: int = 3  # fp32 arrays in host memory that are page-locked as they are
    rounded_arrays: int = 1  # those that torch page-locks and rounds up, one for each subgroup
    pageable_arrays: int = 0  # those that are not page-locked
    # Seconds that no rate explains, by the name of the machine: of a forward, outside the phases.
    forward_s: Mapping[str, float] = field(default_factory=dict)
    outside_s: Mapping[str, float] = field(default_factory=dict)

    def resident_subgroups(self, workload: Workload) -> frozenset[int]:
        """Return the subgroups whose state stays on the device."""
        count = len(workload.subgroups)
        if self.keeps_last:
            return frozenset(range(int(workload.offload_ratio * count), count))
        return frozenset(range(int((1 - workload.offload_ratio) * count)))

    def host_state_bytes(self, numels: Sequence[int]) -> tuple[float, float]:
        """Return the host memory of the state and fp32 gradients of subgroups.

        Returns:
            Page-locked bytes, and others.
        """
        exact, rounded = FP32_BYTES * sum(numels), sum(power_of_two(FP32_BYTES * n) for n in numels)
        locked = self.locked_arrays * exact + self.rounded_arrays * rounded
        return locked, float(self.pageable_arrays * exact)


STOCK = StockOffload()
"""Today's DeepSpeed ZeRO-3 offload."""


@dataclass(frozen=True)
class Workload:
    """One run to be predicted.

    Other software than this package (``software``) has no use for ``policy``,
    ``just_in_time_forward``, ``keeps_device_grads`` and ``tile_numel``.

    Raises:
        WorkloadError: A value is impossible; names field, value and reason.
    """

    model: ModelShape
    software: StockOffload | None = None  # who updates the state, if it is not this package
    dp: int = 1  # data-parallel ranks
    tp: int = 1  # tensor-parallel ranks
    micro_batch_size: int = 1  # samples a rank handles in one forward
    accumulation: int = 1  # micro-batches a rank sums before an update
    sequence_length: int = 0  # tokens a sample; 0 for the model's
    offload_ratio: float = 1.0  # share of the optimizer state in host memory
    stride: int = 2  # with policy stride: one subgroup in this many is updated on the GPU
    policy: str = "auto"  # who updates what; auto chooses
    just_in_time_forward: bool = True  # the forward runs while the update ends
    # 16-bit gradients of what the device updates stay there, if its memory has room for them.
    keeps_device_grads: bool = True
    tile_numel: int = 2**25  # largest piece updated at once, in elements
    subgroup_numel: int = 100_000_000  # DeepSpeed's sub_group_size, in elements
    activation_checkpointing: bool = True  # layers are recomputed in backward
    materialized_attention: bool = True  # attention scores are written out (no flash attention)
    hog_share: float = 0.0  # of each GPU's time taken by another process, from 0 to below 1
    dtype: str = "bf16"  # of weights and gradients
    weights_on_host: bool = False  # 16-bit weights live in host memory too (offload_param)
    # Elements of each subgroup of one rank where they are known; else they follow from the model.
    subgroup_numels: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, known in (("policy", POLICIES), ("dtype", DTYPES)):
            one_of(name, getattr(self, name), known)
        positive = ("dp", "tp", "micro_batch_size", "accumulation", "stride", "subgroup_numel")
        for name, least in (dict.fromkeys(positive, 1) | {"sequence_length": 0}).items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise WorkloadError(f"{name} = {value!r}: give a whole number of at least {least}")
        if type(self.tile_numel) is not int or self.tile_numel < 16 or self.tile_numel % 16:
            raise WorkloadError(f"tile_numel = {self.tile_numel!r}: give a multiple of 16")
        if not 0.0 <= self.offload_ratio <= 1.0:
            raise WorkloadError(
                f"offload_ratio = {self.offload_ratio!r}: the share of the optimizer state in host "
                "memory, from 0 (all on the GPU) to 1 (all on the host)"
            )
        if not 0.0 <= self.hog_share < 1.0:
            raise WorkloadError(f"hog_share = {self.hog_share!r}: from 0 to below 1")
        self._check_split()

    def _check_split(self) -> None:
        for name in ("heads", "kv_heads", "ffn"):
            if getattr(self.model, name) % self.tp:
                raise WorkloadError(
                    f"tp = {self.tp}: the model's {name} {getattr(self.model, name)} cannot be "
                    "split over it"
                )
        if self.software is not None and self.software.slots and self.stride < 2:
            raise WorkloadError(
                f"stride = {self.stride}: engine '{self.engine}' needs a stride of at least 2"
            )
        if self.software is None and self.policy == "ratio" and self.offload_ratio == 1.0:
            raise WorkloadError("policy = 'ratio': needs offload_ratio below 1")

    @property
    def engine(self) -> str:
        """Name of the software that updates the state."""
        return self.software.name if self.software else OURS

    @property
    def ranks(self) -> int:
        """Processes of the run."""
        return self.dp * self.tp

    @property
    def sequence(self) -> int:
        """Tokens of one sample."""
        return self.sequence_length or self.model.seq_length

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch of one rank."""
        return self.micro_batch_size * self.sequence

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight or gradient of the model."""
        return 4 if self.dtype == "fp32" else 2

    @cached_property
    def subgroups(self) -> tuple[int, ...]:
        """Elements of each subgroup of one rank, by DeepSpeed's rule."""
        return self.subgroup_numels or cut_into_subgroups(
            self.model.tensors(self.tp), self.dp, self.subgroup_numel
        )


@functools.lru_cache(maxsize=64)
def schedule_of(workload: Workload, policy: str) -> Schedule:
    """Return the tiles of one rank under a policy of this package's engine.

    Raises:
        PlanError: The policy is not one that a schedule can be made for, as ``auto``.
    """
    schedule = Schedule.make(
        workload.subgroups, policy, workload.stride, workload.offload_ratio, workload.tile_numel
    )
    return dataclasses.replace(schedule, weights_on_host=workload.weights_on_host)


def cut_into_subgroups(tensors: list[int], dp: int, subgroup_numel: int) -> tuple[int, ...]:
    """Return the elements of each subgroup of one rank.

    DeepSpeed takes parameters whole, in order, and closes a subgroup when it holds at least
    ``subgroup_numel`` elements of this rank's partitions.

    Args:
        tensors: Elements of each parameter.
        dp: Ranks that share each of them.
        subgroup_numel: DeepSpeed's ``sub_group_size``.
    """
    found, held = [], 0
    for numel in tensors:
        held += math.ceil(numel / dp)
        if held >= subgroup_numel:
            found.append(held)
            held = 0
    return (*found, held) if held else tuple(found)


def one_of(name: str, value: object, known: Sequence[str]) -> None:
    """Check a value that must be one of a few words.

    Raises:
        WorkloadError: It is not; names the nearest.
    """
    if value not in known:
        near = get_close_matches(str(value), known, n=1, cutoff=0.0)
        raise WorkloadError(
            f"{name} = {value!r}: did you mean '{near[0]}'? known: {', '.join(known)}"
            if near
            else f"{name} = {value!r}: known: {', '.join(known)}"
        )


def power_of_two(num_bytes: float) -> float:
    """Return the size to which torch rounds up a page-locked allocation of ``num_bytes``."""
    return float(1 << max(0, int(num_bytes) - 1).bit_length()) if num_bytes else 0.0
