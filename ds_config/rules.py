"""What keys cost, what ``auto`` becomes, and which of them cannot stand together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from ds_config.expressions import Key
from ds_config.releases import keys_of

ZERO = "zero_optimization"
_BUCKET_ELEMENTS = 500_000_000
_MODEST_BYTES = 1_000_000_000
"""Two buckets of 2e8 elements in 16 bits take less than this."""
_ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")
_ONE_BIT_UNTIL = Version("0.19.7")
"""The first release without those optimizers."""
_DTYPES = {
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
}
"""Names of types as DeepSpeed takes them."""
_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_STAGES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        (
            *("sub_group_size", "offload_param", "zero_hpz_partition_size", "leaf_module"),
            *("zero_quantized_weights", "zero_quantized_nontrainable_weights"),
            *("zero_quantized_gradients", "memory_efficient_linear", "pipeline_loading_checkpoint"),
            *("override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks"),
            *("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters"),
            *("max_reuse_distance", "model_persistence_threshold"),
        ),
        (3,),
    ),
    **dict.fromkeys(
        ("allgather_partitions", "allgather_bucket_size", "round_robin_gradients"), (1, 2)
    ),
    **dict.fromkeys(("parameter_alignment", "compute_grad_norm"), (1, 2)),
    "ignore_unused_parameters": (2,),
    **dict.fromkeys(("overlap_comm", "offload_optimizer", "reduce_bucket_size"), (1, 2, 3)),
    "contiguous_gradients": (1, 2, 3),
}
"""Stages in which a key of ZeRO does something; any other does in all."""
_NVME_ONLY = ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "fast_init")


@dataclass(frozen=True)
class Conflict:
    """Keys that do not go together."""

    key: str
    text: str
    remedy: str
    is_fault: bool = True
    """Whether DeepSpeed refuses them; else it is told as a warning."""


@dataclass(frozen=True)
class Setting:
    """What a configuration is explained for."""

    version: str
    """Release of DeepSpeed."""
    hidden: int | None = None
    """Hidden size of the model, in elements."""
    num_ranks: int | None = None
    """Data-parallel ranks."""

    def auto(self, key: Key) -> str:
        """What Hugging Face's integration puts in the place of ``auto``."""
        size = self.hidden or 0
        formulas = {
            "reduce_bucket_size": ("hidden size squared", size * size),
            "stage3_prefetch_bucket_size": ("0.9 x hidden size squared", 9 * size * size // 10),
            "stage3_param_persistence_threshold": ("10 x hidden size", 10 * size),
        }
        if key[-1] in formulas and key[0] == ZERO:
            text, value = formulas[key[-1]]
            return f"{value:,} ({text})" if self.hidden else f"{text} (give --model)"
        return "Hugging Face's integration fills it in from TrainingArguments"


def cost_bytes(key: Key, table: Mapping[str, Any], setting: Setting) -> int | None:
    """Memory of the device that the bucket of ``reduce_bucket_size`` takes; None for other keys."""
    if key != (ZERO, "reduce_bucket_size"):
        return None
    found = buckets(table, setting)
    return found.num_bytes if found and found.count else None


@dataclass(frozen=True)
class Buckets:
    """The buffers into which gradients are copied before they are reduced."""

    count: int
    numel: int
    """Elements of one."""
    element_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of one."""
        return self.numel * self.element_bytes


def buckets(table: Mapping[str, Any], setting: Setting) -> Buckets | None:
    """The buckets that DeepSpeed allocates, whether the model fills them or not.

    Stage 3 allocates one when the engine is made (``runtime/zero/stage3.py``). Stages 1 and 2
    allocate one for every backward, and a second one with ``overlap_comm``
    (``runtime/zero/stage_1_and_2.py``). ``allgather_bucket_size`` allocates nothing.

    Returns:
        None where the configuration does not say how large they are.
    """
    zero = _block(table, ZERO)
    stage, numel = zero.get("stage", 0), zero.get("reduce_bucket_size", _BUCKET_ELEMENTS)
    if numel == "auto" and setting.hidden:
        numel = setting.hidden**2
    if not _is_number(numel) or stage not in (0, 1, 2, 3):
        return None
    weights = _weights_type(table)
    summed = _DTYPES.get(str(_block(table, "data_types").get("grad_accum_dtype")), weights)
    sent = _DTYPES.get(str(table.get("communication_data_type")), weights)
    is_offloaded = _block(zero, "offload_optimizer").get("device", "none") != "none"
    is_copied = zero.get("contiguous_gradients", True) or (stage < 3 and is_offloaded)
    if stage == 1 and (weights, summed) == ("bf16", "fp32") and not is_offloaded:
        is_copied = False  # DeepSpeed's BF16_Optimizer, which has no buckets
    if not stage or not is_copied:
        return Buckets(0, int(numel), 0)
    kind = {1: summed, 2: weights, 3: sent}[stage]
    count = 2 if stage < 3 and zero.get("overlap_comm") is True else 1
    return Buckets(count, int(numel), 4 if kind == "fp32" else 2)


def _weights_type(table: Mapping[str, Any]) -> str:
    """Type of the model's weights; ``auto`` counts as 16 bits, since Hugging Face fills it in."""
    kinds = ((kind, _block(table, kind).get("enabled", False)) for kind in ("bf16", "fp16"))
    return next((kind for kind, enabled in kinds if enabled), "fp32")


def ignored(table: Mapping[str, Any], known: set[Key]) -> Iterator[tuple[str, str]]:
    """Keys that this configuration's stage or devices make no use of: key, and why."""
    zero = _block(table, ZERO)
    stage = zero.get("stage", 0)
    for name in zero:
        stages = _STAGES.get(
            name.removeprefix("stage3_"), (3,) if name.startswith("stage3_") else None
        )
        if name == "compute_grad_norm" and zero[name] is False:
            continue  # refused there, see `conflicts`
        if (ZERO, name) in known and stages and stage not in stages and stage in (0, 1, 2, 3):
            yield f"{ZERO}.{name}", f"does nothing at stage {stage}"
    for block in ("offload_optimizer", "offload_param"):
        offload = _block(zero, block)
        for name in _NVME_ONLY:
            if name in offload and offload.get("device") != "nvme":
                yield f"{ZERO}.{block}.{name}", "does nothing unless device is nvme"


def wrong_plain_values(table: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Values that no model of DeepSpeed checks: key, what is wrong, remedy."""
    for name in ("optimizer", "scheduler"):
        block = _block(table, name)
        if not isinstance(block.get("type", ""), str):
            yield f"{name}.type", f"= {block['type']!r} is no name", "give a name as text"
        if not isinstance(block.get("params", {}), Mapping):
            yield f"{name}.params", f"= {block['params']!r} is no block", "give an object: {...}"
    for name in _BATCHES:
        value = table.get(name)
        if isinstance(value, str) and value != "auto":
            yield name, f"= {value!r} is text", f"write {value} without quotes"
        elif value is not None and value != "auto" and (not _is_number(value) or value < 1):
            yield name, f"= {value!r}", "give a whole number of 1 or more"
    for name in ("gradient_clipping", "steps_per_print", "gradient_predivide_factor"):
        if isinstance(table.get(name), str) and table[name] != "auto":
            yield name, f"= {table[name]!r} is text", "write the number without quotes"


def conflicts(table: Mapping[str, Any], setting: Setting) -> Iterator[Conflict]:
    """What cannot, or should not, stand together."""
    yield from _of_types(table)
    yield from _of_offloading(table)
    yield from _of_gradient_norm(table, setting)
    yield from _of_optimizer(table, setting)
    yield from _of_batches(table, setting)
    checkpointing = _block(table, "activation_checkpointing")
    for name in ("contiguous_memory_optimization", "cpu_checkpointing"):
        if checkpointing.get(name) and not checkpointing.get("partition_activations"):
            yield Conflict(
                f"activation_checkpointing.{name}",
                "needs partition_activations",
                "set partition_activations to true",
                is_fault=False,
            )
    found = buckets(table, setting)
    if found and found.count > 1:
        size = found.count * found.num_bytes
        yield Conflict(
            f"{ZERO}.overlap_comm",
            f"holds two buckets of reduce_bucket_size in backward: {size / 1e9:.1f} GB of the "
            "device",
            "make reduce_bucket_size smaller if memory is short" if size > _MODEST_BYTES else "",
            is_fault=False,
        )


def _of_types(table: Mapping[str, Any]) -> Iterator[Conflict]:
    stage = _block(table, ZERO).get("stage", 0)
    bf16 = _block(table, "bf16")
    if bf16.get("enabled") is True and _block(table, "fp16").get("enabled") is True:
        yield Conflict("fp16", "and bf16 are both enabled", "enable one of them")
    for kind in ("fp16", "bf16"):
        name = f"{kind}_master_weights_and_grads"
        if _block(table, kind).get(name) and stage not in (1, 2, 3):
            yield Conflict(f"{kind}.{name}", f"needs stage 1, 2 or 3, not {stage}", "leave it out")
    enabled = [_block(table, kind).get("enabled", False) for kind in ("fp16", "bf16")]
    summed = _block(table, "data_types").get("grad_accum_dtype")
    weights = _weights_type(table)
    if stage == 0 and "auto" not in enabled and _DTYPES.get(str(summed), weights) != weights:
        yield Conflict(
            "data_types.grad_accum_dtype",
            f"= {summed} without ZeRO needs weights of that type, not {weights}",
            "leave it out, or give stage 1, 2 or 3",
        )
    if bf16.get("bf16_optimizer_states") and not bf16.get("bf16_master_weights_and_grads"):
        yield Conflict(
            "bf16.bf16_optimizer_states",
            "needs bf16_master_weights_and_grads",
            "set that to true as well",
        )


def _of_offloading(table: Mapping[str, Any]) -> Iterator[Conflict]:
    zero = _block(table, ZERO)
    stage = zero.get("stage", 0)
    if stage == 3 and zero.get("sub_group_size") == 0:
        yield Conflict(
            f"{ZERO}.sub_group_size",
            "= 0 makes every tensor a subgroup of its own, updated by itself",
            "leave it out (1e9), or give 1e8 where memory is short during the update",
            is_fault=False,
        )
    ratio = _block(zero, "offload_optimizer").get("ratio", 1.0)
    if _is_number(ratio) and ratio < 1 and stage != 3:
        key = f"{ZERO}.offload_optimizer.ratio"
        yield Conflict(
            key, f"= {ratio} needs stage 3, not {stage}", "leave ratio out, or give stage 3"
        )
    for block in ("offload_optimizer", "offload_param"):
        offload = _block(zero, block)
        if offload.get("device") != "nvme":
            continue
        if stage != 3:
            does = "as cpu does" if block == "offload_optimizer" and stage else "not at all"
            text = f"= nvme works at stage 3 alone, here {does}"
            yield Conflict(f"{ZERO}.{block}.device", text, "give cpu, or stage 3", is_fault=False)
        elif not offload.get("nvme_path"):
            yield Conflict(f"{ZERO}.{block}.nvme_path", "is missing", "give a folder on the disk")


def _of_gradient_norm(table: Mapping[str, Any], setting: Setting) -> Iterator[Conflict]:
    """Without its norm a gradient cannot be clipped."""
    zero, key = _block(table, ZERO), f"{ZERO}.compute_grad_norm"
    if zero.get("compute_grad_norm") is not False:
        return
    clip = table.get("gradient_clipping", _clip_by_default(setting.version))
    if zero.get("stage", 0) not in (1, 2):
        stage = zero.get("stage", 0)
        yield Conflict(key, f"= false needs stage 1 or 2, not {stage}", "leave it out")
    elif _is_number(clip) and clip > 0:
        remedy = "write gradient_clipping: 0 at the top level, or leave compute_grad_norm out"
        yield Conflict(key, f"= false needs gradient_clipping 0, and it is {clip}", remedy)
    elif _block(zero, "offload_optimizer").get("device", "none") != "none":
        yield Conflict(key, "= false does not go with offload_optimizer", "leave it out")


def _clip_by_default(version: str) -> Any:  # noqa: ANN401
    fact = keys_of(version).get(("gradient_clipping",))
    return fact.default if fact else None


def _of_optimizer(table: Mapping[str, Any], setting: Setting) -> Iterator[Conflict]:
    zero, optimizer = _block(table, ZERO), _block(table, "optimizer")
    stage = zero.get("stage", 0)
    if table.get("gradient_allreduce_op") == "sum" and stage == 3:
        yield Conflict("gradient_allreduce_op", "= sum does not go with stage 3", "write mean")
    if zero.get("legacy_stage1") is True and stage:
        yield Conflict(f"{ZERO}.legacy_stage1", "is refused since 0.5.9", "leave it out")
    if "max_grad_norm" in _block(optimizer, "params"):
        yield Conflict(
            "optimizer.params.max_grad_norm",
            "is refused where DeepSpeed makes the optimizer",
            "write gradient_clipping at the top level",
        )
    kind = str(optimizer.get("type", ""))
    if kind.lower() not in _ONE_BIT:
        return
    if Version(setting.version) >= _ONE_BIT_UNTIL:
        yield Conflict(
            "optimizer.type", f"= {kind} is no optimizer since {_ONE_BIT_UNTIL}", "give AdamW"
        )
    elif stage:
        yield Conflict("optimizer.type", f"= {kind} does not go with ZeRO", "give AdamW")


def _of_batches(table: Mapping[str, Any], setting: Setting) -> Iterator[Conflict]:
    """train_batch_size is micro-batch x accumulation x ranks."""
    values = [table.get(name) for name in _BATCHES]
    if values[0] is None and values[1] is None:
        text = "and train_micro_batch_size_per_gpu are both missing"
        yield Conflict(_BATCHES[0], text, "give one of them")
    if values[0] is None or not all(value is None or _is_number(value) for value in values):
        return
    total, micro, steps = int(values[0]), values[1] or 1, values[2] or 1
    per_update = micro * steps * (setting.num_ranks or 1)
    product = f"micro-batch {micro} x accumulation {steps} x {setting.num_ranks or 'the'} ranks"
    if total < micro:
        yield Conflict(_BATCHES[0], f"= {total} is below the micro-batch", f"give {micro} or more")
    elif setting.num_ranks and None not in values and total != per_update:
        remedy = f"give train_batch_size = {per_update}, or leave one of the three out"
        yield Conflict(_BATCHES[0], f"= {total} is not {product}", remedy)
    elif total % per_update:
        remedy = f"give a multiple of {per_update}"
        yield Conflict(_BATCHES[0], f"= {total} is no multiple of {product}", remedy)


def _block(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = table.get(name)
    return value if isinstance(value, Mapping) else {}


def _is_number(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, int | float) and not isinstance(value, bool)
