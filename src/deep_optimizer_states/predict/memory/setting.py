"""What a run is configured as, as far as its memory depends on it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deep_optimizer_states.config import DEFAULT_TILE_NUMEL
from deep_optimizer_states.plan import Tile, cut_flat_state
from deep_optimizer_states.predict.memory.architecture import Architecture
from deep_optimizer_states.predict.workload import DTYPES, WorkloadError, cut_into_subgroups, one_of
from deep_optimizer_states.schedule import Schedule

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


_MASTERS_KEY = "{}_master_weights_and_grads"


@dataclass(frozen=True)
class Plugin:
    """This package's engine in place of stock's update.

    Attributes:
        policy: Who updates what; ``auto`` counts as the one that needs the most, ``dynamic``.
        stride: With policy ``stride``: one subgroup in this many goes to the device.
        ratio: Share of the optimizer state in host memory.
        tile_numel: Largest piece updated at once, in elements.
    """

    policy: str = "auto"
    stride: int = 2
    ratio: float = 1.0
    tile_numel: int = DEFAULT_TILE_NUMEL


@dataclass(frozen=True)
class Setting:
    """One run.

    Attributes:
        architecture: The model.
        stage: Of ZeRO.
        dtype: Of weights: bf16, fp16 or fp32.
        dp: Data-parallel ranks.
        micro_batch: Samples a rank handles in one forward.
        sequence: Tokens a sample; 0 for the model's most.
        accumulation: Micro-batches a rank sums before an update.
        checkpointing: Layers are computed again in backward.
        is_flash: Attention does not write its scores.
        optimizer_at: Where the optimizer state is: ``none`` for the device, ``cpu`` or ``nvme``.
        weights_at: The same of the 16-bit weights under stage 3.
        bucket_numel: DeepSpeed's ``reduce_bucket_size``.
        subgroup_numel: DeepSpeed's ``sub_group_size``.
        live_numel: DeepSpeed's ``stage3_max_live_parameters``.
        persistence_numel: DeepSpeed's ``stage3_param_persistence_threshold``.
        overlaps: DeepSpeed's ``overlap_comm``; None for its default, which is stage 3 alone.
        plugin: This package's engine; None for stock.
        gathers_on_save: Stage 3 gathers the whole 16-bit model when it is saved.
        masters: Type of master weights, and of the gradient beside them. Stage 3 alone counts it.
        moments: Type of the moments. Stage 3 alone counts it.
        sums: Type in which gradients are summed; empty for that of the weights. Stage 3 alone.
        ratio: Share of the state in host memory where stock offloads the optimizer at stage 3.
        in_flight: Micro-batches whose activations a stage of a pipeline keeps; 0 without one.
        compression_bytes: What compression of that pipeline's communication keeps.
    """

    architecture: Architecture
    stage: int = 3
    dtype: str = "bf16"
    dp: int = 1
    micro_batch: int = 1
    sequence: int = 0
    accumulation: int = 1
    checkpointing: bool = False
    is_flash: bool = True
    optimizer_at: str = "none"
    weights_at: str = "none"
    bucket_numel: int = DEFAULT_BUCKET_NUMEL
    subgroup_numel: int = DEFAULT_SUBGROUP_NUMEL
    live_numel: int = DEFAULT_LIVE_NUMEL
    persistence_numel: int = DEFAULT_PERSISTENCE_NUMEL
    overlaps: bool | None = None
    plugin: Plugin | None = None
    gathers_on_save: bool = False
    masters: str = "fp32"
    moments: str = "fp32"
    sums: str = ""
    ratio: float = 1.0
    in_flight: int = 0
    compression_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("dtype", "masters", "moments"):
            one_of(name, getattr(self, name), DTYPES)
        for name in ("optimizer_at", "weights_at"):
            one_of(name, getattr(self, name), PLACES)
        if self.stage not in STAGES:
            raise WorkloadError(f"stage = {self.stage!r}: give 0, 1, 2 or 3")
        for name in ("dp", "micro_batch", "accumulation", "bucket_numel", "subgroup_numel"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise WorkloadError(f"{name} = {value!r}: give a whole number of at least 1")
        if self.weights_at != "none" and self.stage != 3:
            raise WorkloadError(
                f"offload_param = {self.weights_at!r}: stage {self.stage} cannot; it needs stage 3"
            )
        if self.optimizer_at == "nvme" and self.stage != 3:
            raise WorkloadError(f"offload_optimizer = 'nvme': needs stage 3, not {self.stage}")
        if self.optimizer_at != "none" and not self.stage:
            raise WorkloadError(f"offload_optimizer = {self.optimizer_at!r}: needs stage 1 to 3")
        self._check_plugin()

    def _check_plugin(self) -> None:
        """Refuse what the plugin does not work with."""
        if self.plugin and self.optimizer_at != "cpu":
            raise WorkloadError("deep_optimizer_states: needs offload_optimizer: cpu")
        if self.plugin and self.stage < 3 and self.plugin.ratio != 1:
            raise WorkloadError(
                f"deep_optimizer_states.ratio = {self.plugin.ratio:g}: needs stage 3, not "
                f"{self.stage}; give 1"
            )
        if self.plugin and self.weights_at == "nvme":
            raise WorkloadError("deep_optimizer_states: works with offload_param: cpu, not nvme")

    @property
    def size(self) -> int:
        """Bytes of a weight."""
        return _bytes_of(self.dtype)

    @property
    def master_bytes(self) -> int:
        """Bytes of a master weight, and of a gradient in its type."""
        return _bytes_of(self.masters)

    @property
    def moments_bytes(self) -> int:
        """Bytes of both moments of a parameter."""
        return 2 * _bytes_of(self.moments)

    @property
    def sum_bytes(self) -> int:
        """Bytes of a gradient that is kept until the update."""
        return _bytes_of(self.sums or self.dtype)

    @property
    def tokens_a_sample(self) -> int:
        """Of the run's samples."""
        return self.sequence or self.architecture.sequence

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.micro_batch * self.tokens_a_sample

    @cached_property
    def numel(self) -> int:
        """Parameters of the whole model."""
        return self.architecture.numel

    @cached_property
    def part(self) -> int:
        """Parameters of one rank's partition."""
        if not self.stage:
            return self.numel
        if self.stage == 3:
            return sum(math.ceil(numel / self.dp) for numel in self.architecture.tensors)
        return math.ceil(self.numel / self.dp)

    @cached_property
    def largest(self) -> int:
        """Elements of the largest parameter tensor."""
        return max(self.architecture.tensors)

    @cached_property
    def subgroups(self) -> tuple[int, ...]:
        """Elements of each subgroup of one rank; below stage 3 the plugin's, of all parameters."""
        if self.stage < 3:
            return tuple(numel for _, numel in cut_flat_state(self.part, self.subgroup_numel))
        return cut_into_subgroups(self.architecture.tensors, self.dp, self.subgroup_numel)

    @cached_property
    def persistent(self) -> list[Tile]:
        """Parameters that stay gathered on every rank, where a rank's subgroups have them."""
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
        """The plugin's tiles: those of persistent parameters are apart, where they are few."""
        assert self.plugin
        policy = "dynamic" if self.plugin.policy == "auto" else self.plugin.policy
        plugin, apart = self.plugin, self.persistent
        if sum(tile.numel for tile in apart) > MOST_APART * self.part:
            apart = []
        way = (policy, plugin.stride, plugin.ratio, plugin.tile_numel)
        schedule = Schedule.make(self.subgroups, *way, apart)
        return dataclasses.replace(schedule, weights_on_host=self.weights_at != "none")


def setting_of(
    config: Mapping[str, Any],
    architecture: Architecture,
    dp: int = 1,
    **others: Any,  # noqa: ANN401
) -> Setting:
    """The run that a configuration of DeepSpeed makes of a model.

    Args:
        config: DeepSpeed's JSON, without ``auto`` values.
        architecture: The model.
        dp: Data-parallel ranks.
        others: Fields of :class:`Setting` that no configuration says, as ``sequence``.

    Raises:
        WorkloadError: It cannot be run; names the setting.
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
        "gathers_on_save": bool(zero.get("stage3_gather_16bit_weights_on_model_save")),
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
    """Types of master weights and of moments, as DeepSpeed takes them from its blocks."""
    is_asked = (n for n in ("fp16", "bf16") if (config.get(n) or {}).get(_MASTERS_KEY.format(n)))
    masters = next(is_asked, "fp32")
    params = (config.get("optimizer") or {}).get("params") or {}
    is_narrow = params.get("fp32_optimizer_states") is False
    is_narrow |= bool((config.get("bf16") or {}).get("bf16_optimizer_states"))
    return masters, masters if is_narrow else "fp32"


def _bytes_of(dtype: str) -> int:
    return 4 if dtype == "fp32" else 2
