"""What keys cost, what ``auto`` becomes, and which of them cannot stand together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ds_config.source import Key

ZERO = "zero_optimization"
_BUCKET_ELEMENTS = 500_000_000
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
        return "taken from the program's own arguments (Hugging Face's TrainingArguments)"


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


def conflicts(table: Mapping[str, Any], setting: Setting) -> Iterator[tuple[str, str, str, bool]]:
    """What cannot, or should not, stand together: key, why, remedy, whether DeepSpeed refuses it."""
    zero = _block(table, ZERO)
    stage = zero.get("stage", 0)
    if all(_block(table, name).get("enabled") is True for name in ("fp16", "bf16")):
        yield "fp16", "and bf16 are both enabled", "enable one of them", True
    if table.get("gradient_allreduce_op") == "sum" and stage == 3:
        yield "gradient_allreduce_op", "= sum does not go with stage 3", "write mean", True
    optimizer = _block(zero, "offload_optimizer")
    ratio = optimizer.get("ratio", 1.0)
    if optimizer and _is_number(ratio) and ratio < 1 and stage != 3:
        yield (
            f"{ZERO}.offload_optimizer.ratio", f"= {ratio} needs stage 3, not {stage}",
            "leave ratio out, or give stage 3", True,
        )  # fmt: skip
    for block in ("offload_optimizer", "offload_param"):
        offload = _block(zero, block)
        if offload.get("device") == "nvme":
            if stage != 3:
                yield (
                    f"{ZERO}.{block}.device",
                    f"= nvme needs stage 3, not {stage}",
                    "give cpu",
                    True,
                )
            elif not offload.get("nvme_path"):
                yield f"{ZERO}.{block}.nvme_path", "is missing", "give a folder on the disk", True
    checkpointing = _block(table, "activation_checkpointing")
    for name in ("contiguous_memory_optimization", "cpu_checkpointing"):
        if checkpointing.get(name) and not checkpointing.get("partition_activations"):
            yield (
                f"activation_checkpointing.{name}", "needs partition_activations",
                "set partition_activations to true", name.startswith("contiguous"),
            )  # fmt: skip
    for block in ("fp16_master_weights_and_grads", "bf16_master_weights_and_grads"):
        kind = block.partition("_")[0]
        if _block(table, kind).get(block) and stage not in (1, 2, 3):
            yield f"{kind}.{block}", f"needs stage 1, 2 or 3, not {stage}", "leave it out", True
    bf16 = _block(table, "bf16")
    if bf16.get("bf16_optimizer_states") and not bf16.get("bf16_master_weights_and_grads"):
        yield (
            "bf16.bf16_optimizer_states", "needs bf16_master_weights_and_grads",
            "set that to true as well", True,
        )  # fmt: skip
    if "max_grad_norm" in _block(_block(table, "optimizer"), "params"):
        yield (
            "optimizer.params.max_grad_norm", "is not used by DeepSpeed",
            "write gradient_clipping at the top level", False,
        )  # fmt: skip
    kind = str(_block(table, "optimizer").get("type", "")).lower()
    if kind in ("onebitadam", "onebitlamb", "zerooneadam") and stage in (2, 3):
        yield "optimizer.type", f"= {kind} does not go with stage {stage}", "give AdamW", True
    if zero.get("overlap_comm") is True and (size := overlap_bytes(table, setting)) is not None:
        yield (
            f"{ZERO}.overlap_comm", f"takes about {size / 1e9:.1f} GB of the device for its buckets",
            "make the buckets smaller if memory is short (2e8: 3.6 GB)", False,
        )  # fmt: skip
    yield from _batch_conflicts(table, setting)


def _batch_conflicts(
    table: Mapping[str, Any], setting: Setting
) -> Iterator[tuple[str, str, str, bool]]:
    values = [table.get(name) for name in _BATCHES]
    if values[0] is None and values[1] is None:
        yield (
            _BATCHES[0], "and train_micro_batch_size_per_gpu are both missing",
            "give one of them", True,
        )  # fmt: skip
    if not all(value is None or _is_number(value) for value in values):
        return
    total, micro, steps = values
    ranks = setting.num_ranks
    if total and micro and total < micro:
        yield (
            _BATCHES[0],
            f"= {total} is below the micro-batch {micro}",
            f"give {micro} or more",
            True,
        )
    elif total and micro and steps and ranks is None and total % (micro * steps):
        yield (
            _BATCHES[0], f"= {total} is no multiple of micro-batch {micro} x accumulation {steps}",
            f"give {micro * steps} x the number of ranks", True,
        )  # fmt: skip
    elif ranks and total:
        yield from _with_ranks(int(total), micro, steps, ranks)


def _with_ranks(
    total: int, micro: int | None, steps: int | None, ranks: int
) -> Iterator[tuple[str, str, str, bool]]:
    per_rank = (micro or 1) * (steps or 1) * ranks
    if micro and steps and per_rank != total:
        yield (
            _BATCHES[0], f"= {total} is not micro-batch {micro} x accumulation {steps} x {ranks} ranks",
            f"give train_batch_size = {per_rank}, or leave one of the three out", True,
        )  # fmt: skip
    elif total % per_rank:
        yield (
            _BATCHES[0], f"= {total} cannot be split over {ranks} ranks"
            + (f" in micro-batches of {micro}" if micro else ""),
            f"give a multiple of {per_rank}", True,
        )  # fmt: skip


def _block(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = table.get(name)
    return value if isinstance(value, Mapping) else {}


def _is_number(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, int | float) and not isinstance(value, bool)
