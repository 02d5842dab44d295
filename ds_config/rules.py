"""Rules of keys: their cost, the values that they take, and those that cannot stand together."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ds_config.installed import Key
from ds_config.lenient import Placeholder, number_of
from ds_config.release import KeyFact, Mend, Note

ZERO = "zero_optimization"
AUTO = "auto"
_BUCKET_ELEMENTS = 500_000_000
_MODEST_BYTES = 1_000_000_000
"""Two buckets of 2e8 elements in 16 bits take less than this."""
_DTYPES = {
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
}
"""Names of types as DeepSpeed takes them."""
_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_NO_DEFAULT: dict[Key, str] = {
    ("steps_per_print",): "number",
    **{(name,): "integer" for name in _BATCHES},
}
"""Kinds of keys whose default does not tell them."""
_KINDS = {"boolean": "true or false", "integer": "a whole number", "number": "a number"}
_TYPES = {str: "a string", bool: "a boolean", list: "a list", dict: "an object"}
_OFFLOADS = ("offload_optimizer", "offload_param")
_OF_STAGES: dict[tuple[int, ...], str] = {
    (3,): "sub_group_size offload_param zero_hpz_partition_size leaf_module zero_quantized_weights "
    "zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear "
    "pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings "
    "enable_sanity_checks prefetch_bucket_size param_persistence_threshold max_live_parameters "
    "max_reuse_distance model_persistence_threshold",
    (1, 2): "allgather_partitions allgather_bucket_size round_robin_gradients parameter_alignment",
    (2,): "ignore_unused_parameters",
    (1, 2, 3): "overlap_comm offload_optimizer reduce_bucket_size contiguous_gradients",
}
_STAGES = {name: stages for stages, names in _OF_STAGES.items() for name in names.split()}
"""Stages in which a key of ZeRO does something; any other does in all."""
_NVME_ONLY = ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "fast_init")


@dataclass(frozen=True)
class Buckets:
    """The buffers into which gradients are copied before they are reduced."""

    count: int
    num_bytes: int  # of one


def buckets(table: Mapping[str, Any]) -> Buckets | None:
    """Return the buckets that DeepSpeed allocates, whether the model fills them or not.

    Stage 3 allocates one when the engine is made (``runtime/zero/stage3.py``). Stages 1 and 2
    allocate one for every backward, and a second one with ``overlap_comm``
    (``runtime/zero/stage_1_and_2.py``). ``allgather_bucket_size`` allocates nothing.

    Returns:
        None where the configuration does not say how large they are.
    """
    zero = _block(table, ZERO)
    stage, numel = _stage(zero), zero.get("reduce_bucket_size", _BUCKET_ELEMENTS)
    if not _is_number(numel) or stage is None:
        return None
    weights = _weights_type(table)
    summed = _DTYPES.get(str(_block(table, "data_types").get("grad_accum_dtype")), weights)
    sent = _DTYPES.get(str(table.get("communication_data_type")), weights)
    is_offloaded = _block(zero, "offload_optimizer").get("device", "none") != "none"
    is_copied = zero.get("contiguous_gradients", True) or (stage < 3 and is_offloaded)
    if stage == 1 and (weights, summed) == ("bf16", "fp32") and not is_offloaded:
        is_copied = False  # DeepSpeed's BF16_Optimizer, which has no buckets
    if not stage or not is_copied:
        return Buckets(0, 0)
    kind = {1: summed, 2: weights, 3: sent}[stage]
    count = 2 if stage < 3 and zero.get("overlap_comm") is True else 1
    return Buckets(count, int(numel) * (4 if kind == "fp32" else 2))


def _weights_type(table: Mapping[str, Any]) -> str:
    # An enabled that is `auto` counts as 16 bits, since Hugging Face fills it in.
    kinds = ((kind, _block(table, kind).get("enabled", False)) for kind in ("bf16", "fp16"))
    return next((kind for kind, enabled in kinds if enabled), "fp32")


def faults(table: Mapping[str, Any], num_ranks: int | None) -> list[Note]:
    """Return what DeepSpeed's loader takes, and its engine refuses or takes for something else.

    Args:
        table: The configuration.
        num_ranks: Data-parallel ranks, to check batches, if they are known.
    """
    return [*_of_numbers(table), *_of_the_engine(table), *_of_batches(table, num_ranks)]


def is_open(value: Any) -> bool:
    """Return whether a value is still to be filled in, by a framework or by the user."""
    return isinstance(value, Placeholder) or (isinstance(value, str) and value == AUTO)


def of_type(key: Key, value: Any, fact: KeyFact) -> Note | None:
    """Judge the type of a value, and name it.

    Returns:
        None where it is the key's, or where the release takes several.
    """
    kind = fact.kind or _NO_DEFAULT.get(key, "")
    if not kind or value is None or is_open(value) or isinstance(value, int | float):
        return None
    shown = json.dumps(value, default=str)
    text = f"= {shown} is {_TYPES.get(type(value), 'no value')}, where {_KINDS[kind]} belongs"
    plain = value.strip() if isinstance(value, str) else ""
    spelled: Any = {"true": True, "false": False}.get(plain.lower())
    if kind != "boolean":
        spelled = number_of(plain) if plain else None
    if spelled is None:
        return Note(".".join(key), text, f"give {_KINDS[kind]}")
    what = "the number" if kind != "boolean" else json.dumps(spelled)
    remedy = f"write {what} without quotes"
    return Note(".".join(key), text, remedy, Mend("replace", key, value=spelled))


def as_block(key: Key, value: Any, known: Mapping[Key, KeyFact]) -> dict[str, Any] | None:
    """Return the block that is meant by a value in its place; None where that is not clear."""
    is_switch = isinstance(value, bool)
    if key[-1] in _OFFLOADS and key[0] == ZERO:
        device = ("cpu" if value else "none") if is_switch else value
        return {"device": device} if device in ("none", "cpu", "nvme") else None
    if key == (ZERO,) and _stage({"stage": value}) is not None:
        return {"stage": value}
    return {"enabled": value} if is_switch and (*key, "enabled") in known else None


def _of_numbers(table: Mapping[str, Any]) -> Iterator[Note]:
    for name in _BATCHES:
        value = table.get(name)
        if isinstance(value, bool):
            yield Note(
                name, f"= {json.dumps(value)} is a boolean", "give a whole number of 1 or more"
            )
        elif isinstance(value, int | float) and (value < 1 or value % 1):
            yield Note(name, f"= {value!r}", "give a whole number of 1 or more")


def _of_the_engine(table: Mapping[str, Any]) -> Iterator[Note]:
    zero, params = _block(table, ZERO), _block(_block(table, "optimizer"), "params")
    stage, weights = _stage(zero), _weights_type(table)
    summed = _block(table, "data_types").get("grad_accum_dtype")
    is_auto = AUTO in (_block(table, kind).get("enabled") for kind in ("fp16", "bf16"))
    if stage == 0 and not is_auto and _DTYPES.get(str(summed), weights) != weights:
        text = f"= {summed} without ZeRO needs weights of that type, not {weights}"
        yield Note("data_types.grad_accum_dtype", text, "leave it out, or give stage 1, 2 or 3")
    for block in _OFFLOADS if stage == 3 else ():
        offload = _block(zero, block)
        if offload.get("device") == "nvme" and not offload.get("nvme_path"):
            yield Note(f"{ZERO}.{block}.nvme_path", "is missing", "give a folder on the disk")
    ratio = _block(zero, "offload_optimizer").get("ratio", 1)
    if stage in (1, 2) and _is_number(ratio) and ratio < 1:
        text = f"= {ratio:g} goes with stage 3 alone: at stage {stage} DeepSpeed refuses it"
        remedy = "leave it out (all of the state is offloaded), or give stage 3"
        yield Note(f"{ZERO}.offload_optimizer.ratio", text, remedy)
    if all(_block(table, kind).get("enabled") is True for kind in ("fp16", "bf16")):
        text = "= true beside fp16.enabled = true, which DeepSpeed refuses"
        yield Note("bf16.enabled", text, "set one of the two to false, or leave its block out")
    for block in ("optimizer", "scheduler"):
        yield from _of_numbers_as_texts((block, "params"), _block(_block(table, block), "params"))
    if "max_grad_norm" in params:
        text = "is refused where DeepSpeed makes the optimizer"
        remedy = "write gradient_clipping at the top level"
        mend = Mend("move", ("optimizer", "params", "max_grad_norm"), ("gradient_clipping",))
        yield Note("optimizer.params.max_grad_norm", text, remedy, mend)


def _of_numbers_as_texts(at: Key, params: Mapping[str, Any]) -> Iterator[Note]:
    """Judge what is handed on to torch, which compares it with numbers."""
    for name, value in params.items():
        number = number_of(value.strip()) if isinstance(value, str) else None
        if number is not None:
            text = f"= {json.dumps(value)} is a string, where a number belongs"
            mend = Mend("replace", (*at, name), value=number)
            yield Note(".".join((*at, name)), text, "write the number without quotes", mend)


def _of_batches(table: Mapping[str, Any], num_ranks: int | None) -> Iterator[Note]:
    """Judge train_batch_size, which is micro-batch x accumulation x ranks."""
    values = [table.get(name) for name in _BATCHES]
    if values[0] is None and values[1] is None:
        text = "and train_micro_batch_size_per_gpu are both missing"
        yield Note(_BATCHES[0], text, "give one of them")
    if values[0] is None or not all(value is None or _is_number(value) for value in values):
        return
    total, micro, steps = int(values[0]), values[1] or 1, values[2] or 1
    per_update = micro * steps * (num_ranks or 1)
    product = f"micro-batch {micro} x accumulation {steps} x {num_ranks or 'the'} ranks"
    if 1 <= total < micro:
        yield Note(_BATCHES[0], f"= {total} is below the micro-batch", f"give {micro} or more")
    elif num_ranks and None not in values and total != per_update:
        remedy = f"give train_batch_size = {per_update}, or leave one of the three out"
        yield Note(_BATCHES[0], f"= {total} is not {product}", remedy)
    elif total % per_update:
        remedy = f"give a multiple of {per_update}"
        yield Note(_BATCHES[0], f"= {total} is no multiple of {product}", remedy)


def warnings(table: Mapping[str, Any], known: Mapping[Key, KeyFact]) -> Iterator[Note]:
    """Return what DeepSpeed takes and what is probably not meant.

    Args:
        table: The configuration.
        known: Keys of the release.
    """
    zero = _block(table, ZERO)
    stage = _stage(zero)
    if stage == 3 and zero.get("sub_group_size") == 0:
        yield Note(
            f"{ZERO}.sub_group_size",
            "= 0 makes every tensor a subgroup of its own, updated by itself",
            "leave it out (1e9), or give 1e8 where memory is short during the update",
        )
    for block in _OFFLOADS:
        if _block(zero, block).get("device") == "nvme" and stage in (0, 1, 2):
            does = "as cpu does" if block == "offload_optimizer" and stage else "not at all"
            text = f"= nvme works at stage 3 alone, here {does}"
            yield Note(f"{ZERO}.{block}.device", text, "give cpu, or stage 3")
    ratio = _block(zero, "offload_optimizer").get("ratio", 1)
    if stage == 3 and _is_number(ratio) and ratio < 1 and not _uses_plugin(table):
        yield Note(
            f"{ZERO}.offload_optimizer.ratio",
            f"= {ratio:g}: what stays on the GPU is updated by torch's AdamW, at the learning rate "
            "that its first parameter group has when the engine is made, whatever a scheduler says",
            "keep 1 if the learning rate changes, or use this project's engine with policy ratio",
        )
    checkpointing = _block(table, "activation_checkpointing")
    for name in ("contiguous_memory_optimization", "cpu_checkpointing"):
        if checkpointing.get(name) and not checkpointing.get("partition_activations"):
            key, remedy = f"activation_checkpointing.{name}", "set partition_activations to true"
            yield Note(key, "needs partition_activations", remedy)
    found = buckets(table)
    if found and found.count > 1:
        size = found.count * found.num_bytes
        yield Note(
            f"{ZERO}.overlap_comm",
            f"holds two buckets of reduce_bucket_size in backward: {size / 1e9:.1f} GB of the "
            "device",
            "make reduce_bucket_size smaller if memory is short" if size > _MODEST_BYTES else "",
        )
    yield from _ignored(zero, known)


def _ignored(zero: Mapping[str, Any], known: Mapping[Key, KeyFact]) -> Iterator[Note]:
    """Tell keys that this configuration's stage or devices make no use of."""
    stage = _stage(zero)
    for name in zero:
        default_stages = (3,) if name.startswith("stage3_") else None
        stages = _STAGES.get(name.removeprefix("stage3_"), default_stages)
        if (ZERO, name) in known and stages and stage is not None and stage not in stages:
            yield Note(f"{ZERO}.{name}", f"does nothing at stage {stage}")
    for block in _OFFLOADS:
        offload = _block(zero, block)
        device = offload.get("device")
        for name in _NVME_ONLY:
            if name in offload and not is_open(device) and device != "nvme":
                yield Note(f"{ZERO}.{block}.{name}", "does nothing unless device is nvme")


def _stage(zero: Mapping[str, Any]) -> int | None:
    """Return the stage; None where it is no single one."""
    stage = zero.get("stage", 0)
    is_whole = _is_number(stage) and stage in (0, 1, 2, 3)
    return int(stage) if is_whole else None


def _uses_plugin(table: Mapping[str, Any]) -> bool:
    return _block(table, "deep_optimizer_states").get("enabled") is True


def _block(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = table.get(name)
    return value if isinstance(value, Mapping) else {}


def _is_number(value: Any, least: float = -math.inf) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= least
