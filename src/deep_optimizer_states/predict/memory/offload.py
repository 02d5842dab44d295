"""Memory of the performance model's workloads: stage 3 with an optimizer that is offloaded.

What the passes take is the sum of the arrays of :mod:`arrays`; beside it lies the state of whoever
updates it, other software than today's included. Checked against the authors' logs (0.13) and
against DeepSpeed 0.19's source.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from deep_optimizer_states.predict.machine import Machine
from deep_optimizer_states.predict.memory.architecture import architecture_of_shape
from deep_optimizer_states.predict.memory.arrays import (
    DEVICE,
    HOST,
    READY,
    TRAINING,
    Array,
    passes_of_stage3,
    resident_state,
    update_of_plugin,
)
from deep_optimizer_states.predict.memory.peaks import (
    CONTEXT_BYTES,
    CPU_PROCESS_BYTES,
    CUDA_PROCESS_BYTES,
    GIB,
    MIB,
    WORKSPACE_BYTES,
    bytes_at,
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
PAGEABLE = "state that is not page-locked"


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
    """Predict the memory of one rank, under a policy of this package's engine where that runs."""
    arrays = _arrays(workload, machine, policy)
    device = _most(arrays, DEVICE)
    host = _most(arrays, HOST)
    if not machine.gpus:
        lanes = CPU_LANES_BYTES if workload.software is None else 0
        return Memory(0.0, host + device + lanes + CPU_PROCESS_BYTES, 0.0)
    pageable = sum(array.num_bytes for array in arrays if array.name == PAGEABLE)
    kept = kept_subgroups(workload, machine, policy)
    grads = float(workload.weight_bytes * sum(workload.subgroups[idx] for idx in kept))
    return Memory(
        device + WORKSPACE_BYTES + grads, host + CUDA_PROCESS_BYTES, host - pageable, grads
    )


def kept_subgroups(workload: Workload, machine: Machine, policy: str) -> frozenset[int]:
    """Return the subgroups whose gradients stay on the device: as many of the first as fit.

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
    used = _most(_arrays(workload, machine, policy), DEVICE) + WORKSPACE_BYTES
    assert machine.device_memory_bytes is not None
    room = GRADS_HEADROOM * machine.device_memory_bytes - CONTEXT_BYTES - used
    ordered = sorted(candidates)
    ends = itertools.accumulate(workload.weight_bytes * numels[idx] for idx in ordered)
    return frozenset(idx for idx, end in zip(ordered, ends, strict=True) if end <= room)


def _most(arrays: Sequence[Array], on_host: bool) -> float:
    return max(bytes_at(arrays, moment, on_host) for moment in TRAINING)


def _arrays(workload: Workload, machine: Machine, policy: str) -> list[Array]:
    """Return the arrays of the passes and of the update, this package's or other software's."""
    setting, has_gpu = setting_of_workload(workload), bool(machine.gpus)
    software = workload.software
    passes = _passes(setting, has_gpu)
    if software is None:
        schedule = schedule_of(workload, policy)
        return [*passes, *update_of_plugin(setting, schedule, workload.subgroups, has_gpu)]
    resident = software.resident_subgroups(workload)
    host_numels = [n for idx, n in enumerate(workload.subgroups) if idx not in resident]
    gradients = float(workload.weight_bytes * sum(workload.subgroups))
    if has_gpu:
        locked, pageable = software.host_state_bytes(host_numels)
        locked += power_of_two(gradients)
    else:
        locked, pageable = 0.0, gradients + (STATE_BYTES + FP32_BYTES) * sum(host_numels)
    slots = float((STATE_BYTES + FP32_BYTES) * software.slots * max(workload.subgroups))
    return [
        *passes,
        Array("page-locked state", locked, HOST, READY),
        Array(PAGEABLE, pageable, HOST, READY),
        Array("slots", slots, DEVICE, READY),
        resident_state(setting, sum(workload.subgroups[idx] for idx in resident)),
    ]


@functools.lru_cache(maxsize=64)
def _passes(setting: Setting, has_gpu: bool) -> tuple[Array, ...]:
    return tuple(passes_of_stage3(setting, has_gpu))


def setting_of_workload(workload: Workload) -> Setting:
    """Return the same run as the other stages' model knows it, of one tensor-parallel rank."""
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


def shortages(workload: Workload, machine: Machine, memory: Memory) -> list[str]:
    """Return what the machine lacks, a sentence each with what to change; empty when it fits."""
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
