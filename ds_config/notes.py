"""What is worth knowing of a chosen configuration, each with its figure."""

from __future__ import annotations

from deep_optimizer_states.predict.memory.architecture import FP32_BYTES
from deep_optimizer_states.predict.memory.peaks import GIB
from deep_optimizer_states.predict.memory.setting import DEFAULT_SUBGROUP_NUMEL
from ds_config.ladder import SUBGROUP_NUMEL, Room, Rung, Task

MULTIPLE = 16
"""Sizes that are divisible by it keep tensor cores and partitions aligned."""
NEAR_STAGE2 = 6
"""Times hidden squared: a persistence threshold above every matrix of a layer but the largest."""


def notes_of(rung: Rung, task: Task, room: Room) -> list[str]:
    """Notes that apply, a sentence each."""
    zero = rung.config["zero_optimization"]
    found = [
        _allocator(room),
        _sizes(task),
        _subgroup(zero, rung, task, room),
        _near_stage2(zero, task, room),
    ]
    return [note for note in found if note]


def _allocator(room: Room) -> str:
    """On a CPU freed arrays count as long as the C library keeps them."""
    if room.device_bytes is not None:
        return ""
    return (
        "glibc gives freed arrays back late: with its own settings predictions were 12% under what "
        "processes took while training (median; worst 17%); with MALLOC_MMAP_THRESHOLD_=65536 and "
        "MALLOC_TRIM_THRESHOLD_=65536 they take what is predicted"
    )


def _sizes(task: Task) -> str:
    model = task.architecture
    odd = [
        f"{name} {value:,} (next: {-(-value // MULTIPLE) * MULTIPLE:,})"
        for name, value in (
            ("vocabulary", model.vocab_size), ("hidden", model.hidden), ("sequence", task.sequence)
        )
        if value % MULTIPLE
    ]  # fmt: skip
    return f"not divisible by {MULTIPLE}: {', '.join(odd)}" if odd else ""


def _subgroup(zero: dict[str, object], rung: Rung, task: Task, room: Room) -> str:
    """The step makes fp32 gradients of a whole subgroup where the optimizer is on the device."""
    if zero["stage"] != 3 or "offload_optimizer" in zero or room.device_bytes is None:
        return ""
    part = task.architecture.numel // room.gpus
    each = (FP32_BYTES + 2) / GIB
    large = min(part, DEFAULT_SUBGROUP_NUMEL) * each
    small = min(part, SUBGROUP_NUMEL) * each
    if large - small < 0.5:
        return ""
    return (
        f"sub_group_size {SUBGROUP_NUMEL:,} in place of the default 1,000,000,000 takes "
        f"{small:.1f} GiB in the step where that takes {large:.1f}"
    )


def _near_stage2(zero: dict[str, object], task: Task, room: Room) -> str:
    """Stage 3 that keeps its weights gathered is as fast as stage 2, for its memory."""
    if zero["stage"] != 3 or room.gpus == 1 or "offload_param" in zero:
        return ""
    model = task.architecture
    threshold = NEAR_STAGE2 * model.hidden**2
    kept = sum(numel for numel in model.tensors if numel < threshold)
    size = 4 if task.dtype == "fp32" else 2
    return (
        f"stage 3 nears stage 2 in speed with stage3_param_persistence_threshold {threshold:,} "
        f"(6 x hidden squared) and no parameter offload: {kept / model.numel:.0%} of the weights, "
        f"{size * kept / GIB:.1f} GiB, then stay gathered on every GPU"
    )
