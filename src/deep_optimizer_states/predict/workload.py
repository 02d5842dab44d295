"""Workloads: a model, how it is split over ranks, and who updates its state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from deep_optimizer_states.config import DEFAULT_TILE_NUMEL
from deep_optimizer_states.core import policies
from deep_optimizer_states.core.host import bytes_of_state
from deep_optimizer_states.core.plan import Tile, cut_flat_state
from deep_optimizer_states.core.schedule import Schedule
from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.predict.model import FP32_BYTES, Kept, Model
from deep_optimizer_states.toml_io import did_you_mean

PLUGIN = "plugin"
"""Name of this package's engine."""
POLICIES = tuple(policies.POLICIES)
AUTO = "auto"
BYTES = {"bf16": 2, "fp16": 2, "fp32": FP32_BYTES}
PLACES = ("none", "cpu", "nvme")
KNOWN_VALUES: dict[str, Sequence[object]] = {
    **{"policy": POLICIES, "stage": (0, 1, 2, 3), "optimizer_at": PLACES, "weights_at": PLACES},
    **dict.fromkeys(("dtype", "masters", "moments", "sums"), tuple(BYTES)),
}
POSITIVE = (
    *("dp", "tp", "micro_batch_size", "accumulation", "stride"),
    *("subgroup_numel", "bucket_numel"),
)
"""Fields that are whole numbers of at least 1."""
JSON_SIZES = {
    "bucket_numel": "reduce_bucket_size",
    "subgroup_numel": "sub_group_size",
    "live_numel": "stage3_max_live_parameters",
}
"""Fields of a workload by the keys of DeepSpeed's ``zero_optimization``."""


class WorkloadError(DeepOptimizerStatesError, ValueError):
    """A workload that cannot be; names field, value and reason."""


@dataclass(frozen=True, eq=False)
class StockOffload:
    """Software other than this package: the defaults are today's DeepSpeed.

    After each of the CPU's steps a host thread copies weights to the device, and waits: torch makes
    them 16-bit on the host, in memory that is not page-locked. With ``slots``,
    one subgroup in ``stride`` passes through the device: a host thread copies its fp32 gradient
    there, 16-bit weights are sent behind the next step, and nobody waits for the last flush.
    """

    name: str = "stock"  # printed beside predictions
    words: str = "every subgroup on the CPU"  # who updates what; may hold {stride} and {where}
    # Bytes of a gradient that are copied to the host: today's DeepSpeed copies it as it is, and
    # again as fp32.
    flush_bytes: int = 6
    # Those copies run behind backward, at the rate of page-locked memory; else they come after it,
    # at the rate of pageable memory.
    hides_flush: bool = True
    keeps_last: bool = False  # at a ratio below 1 the last subgroups are resident, not the first
    slots: int = 0  # subgroups that pass through the device at once
    locked_arrays: int = 3  # arrays of the state in host memory that are page-locked as they are
    rounded_arrays: int = 1  # those that torch page-locks and rounds up, one for each subgroup
    pageable_arrays: int = 0  # those that are not page-locked
    # Seconds that no rate explains, by the name of the machine: of a forward, outside the phases.
    forward_s: Mapping[str, float] = field(default_factory=dict)
    outside_s: Mapping[str, float] = field(default_factory=dict)

    def resident_subgroups(self, workload: Workload) -> frozenset[int]:
        """Return the subgroups whose state stays on the device."""
        count = len(workload.subgroups)
        if self.keeps_last:
            return frozenset(range(int(workload.host_share * count), count))
        return frozenset(range(int((1 - workload.host_share) * count)))


STOCK = StockOffload()
"""Today's DeepSpeed."""


@dataclass(frozen=True)
class Workload:
    """One run to be predicted. Types of state count at stage 3 alone, elsewhere they are fp32.

    Raises:
        WorkloadError: A value is impossible; names field, value and reason.
    """

    model: Model
    software: StockOffload | None = None  # who updates the state, if it is not this package
    dp: int = 1  # data-parallel ranks
    tp: int = 1  # tensor-parallel ranks
    micro_batch_size: int = 1  # samples a rank handles in one forward
    accumulation: int = 1  # micro-batches a rank sums before an update
    sequence_length: int = 0  # tokens a sample; 0 for the model's
    dtype: str = "bf16"  # of weights and gradients
    activation_checkpointing: bool = True  # layers are recomputed in backward
    materialized_attention: bool = True  # attention scores are written out (no flash attention)
    hog_share: float = 0.0  # of each GPU's time taken by another process, from 0 to below 1
    # DeepSpeed's settings.
    stage: int = 3  # of ZeRO
    optimizer_at: str = "cpu"  # where the optimizer state is: none for the device, cpu or nvme
    weights_at: str = "none"  # the same of the 16-bit weights under stage 3 (offload_param)
    offload_ratio: float = 1.0  # share of the optimizer state in host memory
    subgroup_numel: int = 100_000_000  # sub_group_size, in elements
    bucket_numel: int = 500_000_000  # reduce_bucket_size
    live_numel: int = 1_000_000_000  # stage3_max_live_parameters
    overlaps: bool = False  # overlap_comm of stages 1 and 2
    masters: str = "fp32"  # type of master weights, and of the gradient beside them
    moments: str = "fp32"  # type of the moments
    locks_state: bool = True  # host memory of the optimizer is page-locked (pin_memory)
    locks_weights: bool = True  # the same of offload_param
    sums: str = ""  # type in which gradients are summed; empty for that of the weights
    # Of this package's engine alone.
    policy: str = "auto"  # who updates what
    stride: int = 2  # with policy stride: one subgroup in this many is updated on the GPU
    tile_numel: int = DEFAULT_TILE_NUMEL  # largest piece updated at once, in elements
    just_in_time_forward: bool = True  # the forward runs while the update ends
    # Device memory in which state stays from step to step, with its gradients: bytes, or auto for
    # what forward and backward leave; its place in host memory is kept.
    device_memory_bytes: float | str = 0
    device_share: float = 0.0  # share of the state in host memory that stays there, as it follows
    # Elements of each subgroup of one rank where they are known; else they follow from the model.
    subgroup_numels: tuple[int, ...] = ()

    def __post_init__(self) -> None:  # noqa: C901 - one check after the other
        for name, known in KNOWN_VALUES.items():
            value = getattr(self, name)
            if value or name != "sums":
                one_of(name, value, known)
        for name, least in (dict.fromkeys(POSITIVE, 1) | {"sequence_length": 0}).items():
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
        room = self.device_memory_bytes
        if room != AUTO and (isinstance(room, str) or room < 0):
            raise WorkloadError(f"device_memory_bytes = {room!r}: give bytes, or '{AUTO}'")
        if not 0.0 <= self.hog_share < 1.0:
            raise WorkloadError(f"hog_share = {self.hog_share!r}: from 0 to below 1")
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
        """Return the name of the software that updates the state."""
        return self.software.name if self.software else PLUGIN

    @property
    def ranks(self) -> int:
        """Return the number of processes."""
        return self.dp * self.tp

    @property
    def sequence(self) -> int:
        """Return the tokens of one sample."""
        return self.sequence_length or self.model.seq_length

    @property
    def tokens(self) -> int:
        """Return the tokens of one micro-batch of one rank."""
        return self.micro_batch_size * self.sequence

    @property
    def weights_on_host(self) -> bool:
        """Return whether 16-bit weights live beside the state (offload_param)."""
        return self.weights_at != "none"

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of one weight or gradient of the model."""
        return BYTES[self.dtype]

    @property
    def host_share(self) -> float:
        """Return the share of the optimizer state that is not on the device."""
        return self.offload_ratio if self.optimizer_at != "none" else 0.0

    @property
    def passing_share(self) -> float:
        """Return the share of the optimizer state that an update reads and writes on the host."""
        return self.host_share * (1.0 - self.device_share)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a parameter's master weight and moments."""
        return bytes_of_state(self.master_bytes, self.moments_bytes // 2)

    @property
    def master_bytes(self) -> int:
        """Return the bytes of a master weight, and of a gradient in its type."""
        return BYTES[self.masters]

    @property
    def moments_bytes(self) -> int:
        """Return the bytes of both moments of a parameter."""
        return 2 * BYTES[self.moments]

    @property
    def sum_bytes(self) -> int:
        """Return the bytes of a gradient that is kept until the update."""
        return BYTES[self.sums or self.dtype]

    @property
    def final_grad_bytes(self) -> int:
        """Return the bytes of a gradient beside offloaded state; stock's is fp32 below stage 3."""
        is_stocks = self.software is not None
        return FP32_BYTES if is_stocks and self.stage < 3 else self.weight_bytes

    @cached_property
    def kept(self) -> Kept:
        """Return what autograd keeps of one sample for backward."""
        is_flash = not self.materialized_attention
        return self.model.kept_of(self.tp)(self.weight_bytes, self.sequence, is_flash)

    @cached_property
    def tensors(self) -> list[int]:
        """Return the elements of each parameter of one tensor-parallel rank."""
        return self.model.tensors(self.tp)

    @cached_property
    def numel(self) -> int:
        """Return the parameters of one tensor-parallel rank, all partitions together."""
        return sum(self.tensors)

    @cached_property
    def part(self) -> int:
        """Return the parameters of one rank's partition."""
        if self.stage == 3:
            return sum(math.ceil(numel / self.dp) for numel in self.tensors)
        return math.ceil(self.numel / self.dp) if self.stage else self.numel

    @cached_property
    def subgroups(self) -> tuple[int, ...]:
        """Return the elements of each subgroup of one rank; below stage 3 this package's."""
        if self.subgroup_numels:
            return self.subgroup_numels
        if self.stage < 3:
            return tuple(numel for _, numel in cut_flat_state(self.part, self.subgroup_numel))
        return cut_into_subgroups(self.tensors, self.dp, self.subgroup_numel)

    @cached_property
    def schedule(self) -> Schedule:
        """Return the tiles of one rank under this package's policy."""
        return self.schedule_with(())

    def schedule_with(self, separate: Iterable[Tile]) -> Schedule:
        """Return the tiles where some runs of elements get tiles of their own."""
        ratio = self.offload_ratio * (1.0 - self.device_share)
        schedule = Schedule.make(
            self.subgroups, self.policy, self.stride, ratio, self.tile_numel, separate
        )
        return dataclasses.replace(schedule, weights_on_host=self.weights_on_host)


def cut_into_subgroups(tensors: Sequence[int], dp: int, subgroup_numel: int) -> tuple[int, ...]:
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


def workload_of_json(
    config: Mapping[str, Any],
    model: Model,
    **others: Any,
) -> Workload:
    """Return the run that a configuration of DeepSpeed makes of a model.

    Args:
        config: DeepSpeed's JSON, without ``auto`` values.
        model: What is trained.
        others: Fields of :class:`Workload` that no configuration says, such as ``dp``.

    Raises:
        WorkloadError: A setting has no such value; names it.
    """
    zero = config.get("zero_optimization") or {}
    offload = zero.get("offload_optimizer") or {}
    weights = zero.get("offload_param") or {}
    block = config.get("deep_optimizer_states") or {}
    params = (config.get("optimizer") or {}).get("params") or {}
    half = next((n for n in ("bf16", "fp16") if (config.get(n) or {}).get("enabled")), "")
    types = config.get(half) or {}
    masters = half if types.get(f"{half}_master_weights_and_grads") else "fp32"
    is_narrow = params.get("fp32_optimizer_states") is False or types.get("bf16_optimizer_states")
    fields: dict[str, Any] = {
        "software": STOCK,
        "stage": zero.get("stage", 0),
        "dtype": half or "fp32",
        "accumulation": config.get("gradient_accumulation_steps", 1),
        "micro_batch_size": config.get("train_micro_batch_size_per_gpu", 1),
        "optimizer_at": offload.get("device", "none"),
        "locks_state": offload.get("pin_memory", True) is not False,
        "weights_at": weights.get("device", "none"),
        "locks_weights": weights.get("pin_memory", True) is not False,
        "overlaps": bool(zero.get("overlap_comm")),
        "masters": masters,
        "moments": masters if is_narrow else "fp32",
        "sums": (config.get("data_types") or {}).get("grad_accum_dtype") or "",
        "offload_ratio": offload.get("ratio", 1.0),
        "subgroup_numel": 1_000_000_000,  # DeepSpeed's own
    }
    if block.get("enabled"):
        names = {"ratio": "offload_ratio", "device_memory_bytes": "device_memory_bytes"}
        names |= {n: n for n in ("policy", "stride", "tile_numel", "just_in_time_forward")}
        own = {field: block[name] for name, field in names.items() if name in block}
        fields |= {"software": None, "offload_ratio": 1.0, "device_memory_bytes": AUTO, **own}
        if fields["stage"] in (1, 2):  # where stock has no subgroups, and its default no meaning
            fields["subgroup_numel"] = fields.get("tile_numel", DEFAULT_TILE_NUMEL)
    fields |= {name: int(zero[key]) for name, key in JSON_SIZES.items() if key in zero}
    return Workload(model, **{**fields, **others})


def one_of(name: str, value: object, known: Sequence[object]) -> None:
    """Check a value that must be one of a few.

    Raises:
        WorkloadError: It is not; names the nearest.
    """
    if value not in known:
        hint = did_you_mean(value, known, cutoff=0.0)
        raise WorkloadError(f"{name} = {value!r}: {hint}known: {', '.join(map(str, known))}")
