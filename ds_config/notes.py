"""What is worth knowing of a chosen configuration, each with its figure."""

from __future__ import annotations

import math
from dataclasses import replace

from deep_optimizer_states.predict.memory.architecture import FP32_BYTES
from deep_optimizer_states.predict.memory.peaks import GIB
from deep_optimizer_states.predict.memory.setting import DEFAULT_SUBGROUP_NUMEL
from ds_config.ladder import SUBGROUP_NUMEL, USABLE, Room, Rung, Task, chosen, is_narrow, ladder

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
        _narrow(rung),
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


def _narrow(rung: Rung) -> str:
    if not is_narrow(rung.config):
        return ""
    return (
        "16-bit states round master weights and moments in every update: losses differ from those "
        "of fp32 states"
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


def ways_out(rungs: list[Rung], task: Task, room: Room) -> list[str]:
    """Say, where no rung fits, which memory is short by how much, and what would help.

    That is told of the rung that is nearest to fitting; other ways are told where they do fit.
    """
    usable = {"host": USABLE * room.host_bytes, "device": USABLE * (room.device_bytes or 0)}
    words = {"host": "host memory", "device": "GPU memory"}

    def excess(rung: Rung) -> float:
        return max(short / usable[place] if usable[place] else math.inf
                   for place, short in rung.short_bytes.items())  # fmt: skip

    nearest = min(rungs, key=excess)
    short = (
        f"{words[place]} is short by {lack / GIB:.1f} GiB "
        f"({(usable[place] + lack) / GIB:.1f} needed, {usable[place] / GIB:.1f} may be taken)"
        for place, lack in nearest.short_bytes.items()
    )
    lines = [f"'{nearest.name}' comes nearest: {' and '.join(short)}"]
    room = replace(room, machine=None)  # times are not asked for
    ways: list[tuple[str, Task, Room]] = []
    if not room.nvme:
        ways.append(("--nvme FOLDER on a local disk", task, replace(room, nvme="FOLDER")))
    if task.micro_batch > 1:
        way = "--micro-batch 1, which keeps no sums of gradients"
        ways.append((way, replace(task, micro_batch=1), room))
    half = max(1, task.sequence // 2)
    ways.append((f"--sequence-length {half}", replace(task, sequence=half), room))
    for times in (2, 4, 8):
        way = f"{times} times as many such machines (--gpus {times * room.gpus})"
        ways.append((way, task, replace(room, gpus=times * room.gpus)))
    for way, other, place in ways:
        found = ladder(other, place)
        if (best := chosen(found)) is not None:
            lines.append(f"would help: {way}: '{found[best].name}' fits")
            if place.gpus > room.gpus:
                break
    needs = [
        f"{nearest.peaks.host_bytes * room.ranks_a_node / USABLE / GIB:.0f} GiB of host memory"
    ]
    if room.device_bytes is not None:
        needs.append(f"GPUs of {nearest.peaks.device_bytes / USABLE / GIB:.0f} GiB")
    return [*lines, f"would help: a machine with {' and '.join(needs)}, for '{nearest.name}'"]
