"""What a run is configured as, as far as its memory depends on it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deep_optimizer_states.config import DEFAULT_TILE_NUMEL
from deep_optimizer_states.core.plan import Tile, cut_flat_state
from deep_optimizer_states.core.schedule import Schedule
from deep_optimizer_states.predict.memory.architecture import Architecture, Kept
from deep_optimizer_states.predict.workload import DTYPES, WorkloadError, cut_into_subgroups, one_of

STAGES = (0, 1, 2, 3)
PLACES = ("none", "cpu", "nvme")
DEFAULT_BUCKET_NUMEL = 500_000_000
"""DeepSpeed's ``reduce_bucket_size``."""
DEFAULT_SUBGROUP_NUMEL = 1_000_000_000
"""DeepSpeed's ``sub_group_size``."""
DEFAULT_LIVE_NUMEL = 1_000_000_000
"""DeepSpeed's ``stage3_max_live_parameters``."""
DEFAULT_PERSISTENCE_NUMEL = 100_000
"""DeepSpeed's ``stage3_param_persistence_threshold``."""
MOST_APART = 1 / 8
"""Share of a rank's elements up to which the plugin gives persistent parameters their own tiles."""


@dataclass(frozen=True)
class Plugin:
    """This package's engine in place of stock's update."""

    policy: str = "auto"  # counts as the policy that needs the most memory, which is dynamic
    stride: int = 2  # with policy stride: one subgroup in this many goes to the device
    ratio: float = 1.0  # share of the optimizer state in host memory
    tile_numel: int = DEFAULT_TILE_NUMEL  # largest piece updated at once, in elements


@dataclass(frozen=True)
class Setting:
    """One run. Types of state count at stage 3 alone, elsewhere they are fp32.

    Whether the settings go together is checked by whoever runs it.

    Raises:
        WorkloadError: A setting has no such value; names it.
    """

    architecture: Architecture
    stage: int = 3  # of ZeRO
    dtype: str = "bf16"  # of weights
    dp: int = 1  # data-parallel ranks
    micro_batch: int = 1  # samples a rank handles in one forward
    sequence: int = 0  # tokens a sample; 0 for the model's most
    accumulation: int = 1  # micro-batches a rank sums before an update
    checkpointing: bool = False  # layers are computed again in backward
    is_flash: bool = True  # attention does not write its scores
    optimizer_at: str = "none"  # where the optimizer state is: none for the device, cpu or nvme
    weights_at: str = "none"  # the same of the 16-bit weights under stage 3
    bucket_numel: int = DEFAULT_BUCKET_NUMEL
    subgroup_numel: int = DEFAULT_SUBGROUP_NUMEL
    live_numel: int = DEFAULT_LIVE_NUMEL
    persistence_numel: int = DEFAULT_PERSISTENCE_NUMEL
    overlaps: bool | None = None  # overlap_comm; None for its default, which is stage 3 alone
    plugin: Plugin | None = None  # None for stock
    masters: str = "fp32"  # type of master weights, and of the gradient beside them
    moments: str = "fp32"  # type of the moments
    sums: str = ""  # type in which gradients are summed; empty for that of the weights
    ratio: float = 1.0  # share of the state in host memory where stock offloads at stage 3
    in_flight: int = 0  # micro-batches that a stage of a pipeline keeps; 0 without a pipeline
    compression_bytes: float = 0.0  # what compression of that pipeline's communication keeps

    def __post_init__(self) -> None:
        for name in ("dtype", "masters", "moments"):
            one_of(name, getattr(self, name), DTYPES)
        for name in ("optimizer_at", "weights_at"):
            one_of(name, getattr(self, name), PLACES)
        for name in ("dp", "micro_batch", "accumulation", "bucket_numel", "subgroup_numel"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise WorkloadError(f"{name} = {value!r}: give a whole number of at least 1")
        if self.stage not in STAGES:
            raise WorkloadError(f"stage = {self.stage!r}: give 0, 1, 2 or 3")

    @property
    def size(self) -> int:
        """Return the bytes of a weight."""
        return _bytes_of(self.dtype)

    @property
    def master_bytes(self) -> int:
        """Return the bytes of a master weight, and of a gradient in its type."""
        return _bytes_of(self.masters)

    @property
    def moments_bytes(self) -> int:
        """Return the bytes of both moments of a parameter."""
        return 2 * _bytes_of(self.moments)

    @property
    def sum_bytes(self) -> int:
        """Return the bytes of a gradient that is kept until the update."""
        return _bytes_of(self.sums or self.dtype)

    @property
    def tokens_a_sample(self) -> int:
        """Return the tokens of one of the run's samples."""
        return self.sequence or self.architecture.sequence

    @cached_property
    def kept(self) -> Kept:
        """Return what autograd keeps of one sample for backward."""
        return self.architecture.kept(self.size, self.tokens_a_sample, self.is_flash)

    @cached_property
    def numel(self) -> int:
        """Return the number of parameters of the whole model."""
        return self.architecture.numel

    @cached_property
    def part(self) -> int:
        """Return the number of parameters of one rank's partition."""
        if not self.stage:
            return self.numel
        if self.stage == 3:
            return sum(math.ceil(numel / self.dp) for numel in self.architecture.tensors)
        return math.ceil(self.numel / self.dp)

    @cached_property
    def largest(self) -> int:
        """Return the elements of the largest parameter."""
        return max(self.architecture.tensors)

    @cached_property
    def subgroups(self) -> tuple[int, ...]:
        """Return the elements of each subgroup of one rank; below stage 3 the plugin's."""
        if self.stage < 3:
            return tuple(numel for _, numel in cut_flat_state(self.part, self.subgroup_numel))
        return cut_into_subgroups(self.architecture.tensors, self.dp, self.subgroup_numel)

    @cached_property
    def persistent(self) -> list[Tile]:
        """Return the parameters that stay gathered on every rank, as parts of its subgroups."""
        found: list[Tile] = []
        subgroup, held = 0, 0
        if self.stage < 3:
            return found  # every parameter is on every rank
        for numel in self.architecture.tensors:
            part = math.ceil(numel / self.dp)
            if numel < self.persistence_numel:
                found.append(Tile(subgroup, held, part))
            held += part
            if held >= self.subgroup_numel:
                subgroup, held = subgroup + 1, 0
        return found

    @cached_property
    def schedule(self) -> Schedule:
        """Return the plugin's tiles; those of few persistent parameters are apart."""
        plugin = self.plugin
        assert plugin
        policy = "dynamic" if plugin.policy == "auto" else plugin.policy
        few = sum(tile.numel for tile in self.persistent) <= MOST_APART * self.part
        apart = self.persistent if few else []
        schedule = Schedule.make(
            self.subgroups, policy, plugin.stride, plugin.ratio, plugin.tile_numel, apart
        )
        return dataclasses.replace(schedule, weights_on_host=self.weights_at != "none")


def setting_of(
    config: Mapping[str, Any],
    architecture: Architecture,
    dp: int = 1,
    **others: Any,  # noqa: ANN401
) -> Setting:
    """Return the run that a configuration of DeepSpeed makes of a model.

    Args:
        config: DeepSpeed's JSON, without ``auto`` values.
        architecture: The model.
        dp: Data-parallel ranks.
        others: Fields of :class:`Setting` that no configuration says, as ``sequence``.

    Raises:
        WorkloadError: A setting has no such value; names it.
    """
    zero = config.get("zero_optimization") or {}
    block = config.get("deep_optimizer_states") or {}
    fields: dict[str, Any] = {
        "stage": zero.get("stage", 0),
        "dtype": next((n for n in ("bf16", "fp16") if _is_on(config, n)), "fp32"),
        "accumulation": config.get("gradient_accumulation_steps", 1),
        "micro_batch": config.get("train_micro_batch_size_per_gpu", 1),
        "optimizer_at": (zero.get("offload_optimizer") or {}).get("device", "none"),
        "weights_at": (zero.get("offload_param") or {}).get("device", "none"),
        "overlaps": zero.get("overlap_comm"),
        "sums": (config.get("data_types") or {}).get("grad_accum_dtype") or "",
        "ratio": (zero.get("offload_optimizer") or {}).get("ratio", 1.0),
    }
    fields["masters"], fields["moments"] = _state_types(config)
    for name, key in (
        ("bucket_numel", "reduce_bucket_size"),
        ("subgroup_numel", "sub_group_size"),
        ("live_numel", "stage3_max_live_parameters"),
        ("persistence_numel", "stage3_param_persistence_threshold"),
    ):
        if key in zero:
            fields[name] = int(zero[key])
    if block.get("enabled"):
        names = ("policy", "stride", "ratio", "tile_numel")
        plugin = fields["plugin"] = Plugin(**{n: block[n] for n in names if n in block})
        if fields["stage"] in (1, 2):  # where stock has no subgroups, and its default no meaning
            fields.setdefault("subgroup_numel", plugin.tile_numel)
    return Setting(architecture, dp=dp, **{**fields, **others})


def _is_on(config: Mapping[str, Any], block: str) -> bool:
    return bool((config.get(block) or {}).get("enabled"))


def _state_types(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the types of master weights and of moments, as DeepSpeed takes them."""
    masters = "fp32"
    for name in ("bf16", "fp16"):
        if (config.get(name) or {}).get(f"{name}_master_weights_and_grads"):
            masters = name
    params = (config.get("optimizer") or {}).get("params") or {}
    is_narrow = params.get("fp32_optimizer_states") is False
    is_narrow |= bool((config.get("bf16") or {}).get("bf16_optimizer_states"))
    return masters, masters if is_narrow else "fp32"


def _bytes_of(dtype: str) -> int:
    return 4 if dtype == "fp32" else 2
