"""What keys cost, what ``auto`` becomes, and which of them cannot stand together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ds_config.expressions import Key

ZERO = "zero_optimization"
_BUCKET_ELEMENTS = 500_000_000
_MODEST_BYTES = 4_000_000_000
"""What buckets of 2e8 elements take with overlap_comm is below this."""
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


def cost_bytes(key: Key, value: Any, setting: Setting) -> int | None:  # noqa: ANN401
    """Memory of the device that a bucket takes, in bytes, for 16-bit gradients and weights."""
    if (
        key[0] != ZERO
        or len(key) != 2
        or key[1] not in ("reduce_bucket_size", "allgather_bucket_size")
    ):
        return None
    if value == "auto":
        value = setting.hidden * setting.hidden if setting.hidden else None
    return None if not _is_number(value) else int(2 * value)


def overlap_bytes(table: Mapping[str, Any], setting: Setting) -> int | None:
    """What ``overlap_comm`` takes: 4.5 sets of both buckets, in bytes.

    The factor is that of Hugging Face's guide to DeepSpeed.
    """
    zero = _block(table, ZERO)
    sizes = [
        zero.get(name, _BUCKET_ELEMENTS) for name in ("reduce_bucket_size", "allgather_bucket_size")
    ]
    sizes = [setting.hidden**2 if size == "auto" and setting.hidden else size for size in sizes]
    return int(4.5 * sum(sizes) * 2) if all(_is_number(size) for size in sizes) else None


def ignored(table: Mapping[str, Any], known: set[Key]) -> Iterator[tuple[str, str]]:
    """Keys that this configuration's stage or devices make no use of: key, and why."""
    zero = _block(table, ZERO)
    stage = zero.get("stage", 0)
    for name in zero:
        stages = _STAGES.get(
            name.removeprefix("stage3_"), (3,) if name.startswith("stage3_") else None
        )
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
    yield from _of_optimizer(table)
    yield from _of_batches(table, setting)
    checkpointing = _block(table, "activation_checkpointing")
    for name in ("contiguous_memory_optimization", "cpu_checkpointing"):
        if checkpointing.get(name) and not checkpointing.get("partition_activations"):
            yield Conflict(
                f"activation_checkpointing.{name}",
                "needs partition_activations",
                "set partition_activations to true",
                is_fault=name.startswith("contiguous"),
            )
    overlaps = _block(table, ZERO).get("overlap_comm") is True
    if overlaps and (size := overlap_bytes(table, setting)) is not None:
        yield Conflict(
            f"{ZERO}.overlap_comm",
            f"takes about {size / 1e9:.1f} GB of the device for its buckets",
            "make the buckets smaller if memory is short" if size > _MODEST_BYTES else "",
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
            key = f"{ZERO}.{block}.device"
            yield Conflict(key, f"= nvme needs stage 3, not {stage}", "give cpu")
        elif not offload.get("nvme_path"):
            yield Conflict(f"{ZERO}.{block}.nvme_path", "is missing", "give a folder on the disk")


def _of_optimizer(table: Mapping[str, Any]) -> Iterator[Conflict]:
    stage, optimizer = _block(table, ZERO).get("stage", 0), _block(table, "optimizer")
    if table.get("gradient_allreduce_op") == "sum" and stage == 3:
        yield Conflict("gradient_allreduce_op", "= sum does not go with stage 3", "write mean")
    if "max_grad_norm" in _block(optimizer, "params"):
        yield Conflict(
            "optimizer.params.max_grad_norm",
            "is not used by DeepSpeed",
            "write gradient_clipping at the top level",
            is_fault=False,
        )
    kind = str(optimizer.get("type", "")).lower()
    if kind in ("onebitadam", "onebitlamb", "zerooneadam") and stage in (2, 3):
        yield Conflict("optimizer.type", f"= {kind} does not go with stage {stage}", "give AdamW")


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
