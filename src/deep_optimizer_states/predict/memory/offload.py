"""Memory of the performance model's workloads: stage 3 with an optimizer that is offloaded.

What the passes take is the sum of the arrays of :mod:`arrays`; beside it lies the state of whoever
updates it, other software than today's included. Checked against the authors' logs (0.13) and
against DeepSpeed 0.19's source. torch rounds each page-locked allocation up to a power of two; this
package does not, since it locks exact sizes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass

from deep_optimizer_states.predict.machine import Machine
from deep_optimizer_states.predict.memory.architecture import architecture_of_shape
from deep_optimizer_states.predict.memory.arrays import (
    STAGING_BUFFERS,
    TRAINING,
    Moment,
    device_buffers_bytes,
    passes_of_stage3,
)
from deep_optimizer_states.predict.memory.peaks import (
    CONTEXT_BYTES,
    CPU_PROCESS_BYTES,
    CUDA_PROCESS_BYTES,
    GIB,
    MIB,
    WORKSPACE_BYTES,
)
from deep_optimizer_states.predict.memory.setting import Setting
from deep_optimizer_states.predict.rank import num_nodes, rank_of
from deep_optimizer_states.predict.workload import (
    FP32_BYTES,
    STATE_BYTES,
    Workload,
    power_of_two,
    schedule_of,
)

CPU_LANES_BYTES = 45 * MIB
"""Arenas and stacks of the threads that stand for a GPU's streams on a machine without one."""
HEADROOM = 0.97
"""Share of a memory that may be taken."""
GRADS_HEADROOM = 0.9
"""The same where gradients are kept on the device, which is never needed."""


@dataclass(frozen=True)
class Memory:
    """Of one rank, in bytes.

    Attributes:
        device_bytes: Peak of what torch allocates on its GPU; 0 without one.
        host_bytes: Of its process.
        page_locked_bytes: Part of it that is page-locked; 0 without a GPU.
        device_grads_bytes: Part of ``device_bytes`` that holds gradients which the update then need
            not fetch; 0 where they are not kept.
    """

    device_bytes: float
    host_bytes: float
    page_locked_bytes: float
    device_grads_bytes: float = 0.0


def memory_of(workload: Workload, machine: Machine, policy: str) -> Memory:
    """Memory of one rank.

    Args:
        workload: What runs.
        machine: Where.
        policy: Of this package's engine.
    """
    numel = sum(workload.subgroups)
    resident, _, staging = _placement(workload, policy)
    host_numels = [n for idx, n in enumerate(workload.subgroups) if idx not in resident]
    gradients = float(workload.weight_bytes * numel)
    if workload.software is None and workload.accumulation > 1:
        gradients *= 2  # the sum of a window that is not over has a home of its own
    if workload.software is None:
        locked = STATE_BYTES * sum(host_numels) + gradients
        locked += workload.weight_bytes * staging * STAGING_BUFFERS
        pageable = 0.0
    else:
        locked, pageable = workload.software.host_state_bytes(host_numels)
        locked += power_of_two(gradients)
    if workload.weights_on_host and machine.gpus:
        locked += power_of_two(workload.weight_bytes * numel)  # DeepSpeed's own allocation
    device = _needed_device_bytes(workload, policy, bool(machine.gpus))
    if machine.gpus:
        kept = kept_subgroups(workload, machine, policy)
        grads = float(workload.weight_bytes * sum(workload.subgroups[idx] for idx in kept))
        return Memory(device + grads, locked + pageable + CUDA_PROCESS_BYTES, locked, grads)
    state = STATE_BYTES * sum(host_numels) + gradients
    if workload.software is not None:
        state += FP32_BYTES * sum(host_numels)
    lanes = CPU_LANES_BYTES if workload.software is None else 0
    return Memory(0.0, state + device - WORKSPACE_BYTES + lanes + CPU_PROCESS_BYTES, 0.0)


def kept_subgroups(workload: Workload, machine: Machine, policy: str) -> frozenset[int]:
    """Subgroups whose gradients stay on the device: as many of the first as it has room for.

    Only those count of which tiles may pass through a slot; gradients of resident ones are there
    anyway.
    """
    if workload.software is not None or not workload.keeps_device_grads or not machine.gpus:
        return frozenset()
    schedule, numels = schedule_of(workload, policy), workload.subgroups
    if schedule.dynamic:  # which tiles it will be is not known in backward
        candidates = set(range(len(numels))) - schedule.resident_subgroups
    else:
        candidates = {schedule.tiles[idx].subgroup for idx in schedule.device_tiles}
    assert machine.device_memory_bytes is not None
    room = GRADS_HEADROOM * machine.device_memory_bytes - CONTEXT_BYTES
    room -= _needed_device_bytes(workload, policy, has_gpu=True)
    ordered = sorted(candidates)
    ends = itertools.accumulate(workload.weight_bytes * numels[idx] for idx in ordered)
    return frozenset(idx for idx, end in zip(ordered, ends, strict=True) if end <= room)


def ahead_room_bytes(workload: Workload, machine: Machine, policy: str) -> tuple[float, float]:
    """Device memory into which state may be sent during backward, in bytes.

    Returns:
        What is free at any time, and what activations leave by the end of backward.
    """
    if not machine.gpus:
        return 0.0, 0.0
    assert machine.device_memory_bytes is not None
    used = memory_of(workload, machine, policy).device_bytes + CONTEXT_BYTES
    arrays = passes_of_stage3(setting_of_workload(workload), has_gpu=True)
    sizes = [(array.num_bytes, array.when) for array in arrays if not array.on_host]
    at_end = sum(num_bytes for num_bytes, when in sizes if Moment.REDUCED in when)
    most = _passes_bytes(setting_of_workload(workload), has_gpu=True)
    always = max(0.0, GRADS_HEADROOM * machine.device_memory_bytes - used)
    return always, max(0.0, most - at_end)


def _needed_device_bytes(workload: Workload, policy: str, has_gpu: bool) -> float:
    """Device memory without gradients that are kept there."""
    resident, slots, _ = _placement(workload, policy)
    staying = sum(workload.subgroups[idx] for idx in resident)
    passes = _passes_bytes(setting_of_workload(workload), has_gpu)
    return passes + slots + (STATE_BYTES + FP32_BYTES) * staying + WORKSPACE_BYTES


def _placement(workload: Workload, policy: str) -> tuple[frozenset[int], float, int]:
    """Resident subgroups, bytes of device slots, and elements of a staging buffer."""
    software = workload.software
    if software is not None:
        slot_bytes = float((STATE_BYTES + FP32_BYTES) * software.slot_numel(workload))
        return software.resident_subgroups(workload), slot_bytes, 0
    schedule = schedule_of(workload, policy)
    slot_bytes = device_buffers_bytes(schedule, workload.weight_bytes)
    return schedule.resident_subgroups, slot_bytes, schedule.staging_numel


def setting_of_workload(workload: Workload) -> Setting:
    """The same run as the other stages' model knows it, of one tensor-parallel rank."""
    return Setting(
        architecture=architecture_of_shape(workload.model, workload.tp),
        dtype=workload.dtype,
        dp=workload.dp,
        micro_batch=workload.micro_batch_size,
        sequence=workload.sequence,
        accumulation=workload.accumulation,
        checkpointing=workload.activation_checkpointing,
        is_flash=not workload.materialized_attention,
        optimizer_at="cpu",
        weights_at="cpu" if workload.weights_on_host else "none",
        subgroup_numel=workload.subgroup_numel,
    )


@functools.lru_cache(maxsize=64)
def _passes_bytes(setting: Setting, has_gpu: bool) -> float:
    """The most that weights, gathered weights, buckets and activations take at one time.

    On a GPU without weights that live in host memory; without one all is host memory.
    """
    arrays = [a for a in passes_of_stage3(setting, has_gpu) if not (has_gpu and a.on_host)]
    return max(
        sum(array.num_bytes for array in arrays if moment in array.when) for moment in TRAINING
    )


def shortages(workload: Workload, machine: Machine, memory: Memory) -> list[str]:
    """What the machine lacks, a sentence each with what to change; empty when the run fits."""
    per_node = rank_of(workload, machine).ranks_a_node
    found = []
    need = memory.host_bytes * per_node
    if need > machine.host_memory_bytes * HEADROOM:
        found.append(
            f"host memory: {need / GIB:.1f} GiB needed by {per_node} "
            f"rank{'s' if per_node > 1 else ''} of a node, it has "
            f"{machine.host_memory_bytes / GIB:.1f}; {_remedy(workload, machine)}"
        )
    if machine.gpus:
        assert machine.device_memory_bytes is not None
        need = memory.device_bytes + CONTEXT_BYTES
        if need > machine.device_memory_bytes * HEADROOM:
            found.append(
                f"GPU memory: {need / GIB:.1f} GiB needed, a GPU has "
                f"{machine.device_memory_bytes / GIB:.1f}; use more ranks (dp), a smaller "
                "micro-batch (with more accumulation), or a larger offload ratio"
            )
    return found


def _remedy(workload: Workload, machine: Machine) -> str:
    if machine.gpus:
        remedies = ["use more nodes (dp)", "an offload ratio below 1"]
    else:  # every rank is on this one host, which holds all state whatever the ratio
        remedies = ["use a smaller model, or fewer ranks (dp)"]
    if workload.software is not None:
        ours = dataclasses.replace(workload, software=None)
        need = memory_of(ours, machine, "all-host").host_bytes * rank_of(ours, machine).ranks_a_node
        remedies.insert(0, f"engine 'ours' needs {need / GIB:.1f} GiB")
    nodes = num_nodes(workload, machine)
    return " or ".join(remedies) + (f" (now {nodes} nodes)" if nodes > 1 else "")
