"""Memory of one rank: every array of a run, where it is and when, and the most at one time.

Read off DeepSpeed 0.19's source and seen in runs on a CPU. A run takes the most at one of a few
moments, and an array is there at some of them.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import dataclass

from deep_optimizer_states.core.host import DEVICE_MARGIN, HEADROOM, bytes_of_gradients
from deep_optimizer_states.core.plan import Tile, choose_resident_subgroups
from deep_optimizer_states.core.policies import SHARED
from deep_optimizer_states.core.schedule import (
    NUM_OUTBOXES,
    NUM_SLOTS,
    Schedule,
    separate_ranges,
)
from deep_optimizer_states.predict.machine import Machine
from deep_optimizer_states.predict.model import FP32_BYTES
from deep_optimizer_states.predict.workload import AUTO, BYTES, Workload
from deep_optimizer_states.units import GIB, MIB

FP64_BYTES = 8
"""Norms are taken of an fp64 copy of each gradient."""
MOMENTS_BYTES = 2 * FP32_BYTES
"""Both moments of Adam."""
NVME_BUFFERS = 4
"""DeepSpeed's ``buffer_count`` of an optimizer on NVMe: a subgroup's state each."""
NVME_WEIGHTS_NUMEL = 5 * 100_000_000
"""DeepSpeed's ``buffer_count`` and ``buffer_size`` of weights on NVMe."""
CUDA_PROCESS_BYTES = 5 * GIB
"""Host memory of a rank with CUDA's libraries and context, before the model."""
CPU_PROCESS_BYTES = 430 * MIB
"""The same on a machine without a GPU: Python, torch, transformers and DeepSpeed."""
ZERO_BYTES = 45 * MIB
"""Modules that ZeRO's optimizers import when they are made."""
STEPPED_BYTES = 16 * MIB
"""Libraries' own memory once an iteration has run."""
EXPERTS_BYTES = 160 * MIB
"""Left behind by torch's products of experts on a CPU."""
CPU_LANES_BYTES = 45 * MIB
"""Arenas and stacks of the threads that stand for a GPU's streams on a machine without one."""
CONTEXT_BYTES = 1.5 * GIB
"""CUDA's context and what its allocator cannot use: beside what torch counts as allocated."""
WORKSPACE_BYTES = 0.6 * GIB
"""Taken by the GPU's libraries."""
PERSISTENT_NUMEL = 100_000
"""DeepSpeed's ``stage3_param_persistence_threshold``."""
PAGEABLE = "state that is not page-locked"
DEVICE, HOST = False, True
"""Where an array lies, as :attr:`Array.on_host` says it."""


class Moment(enum.StrEnum):
    """When a run may take the most."""

    READ = "the checkpoint is read"
    BUILT = "the model is built"
    INITIALIZED = "DeepSpeed sets up the optimizer"
    HOOKED = "ZeRO-3 gathers each weight once, to watch its gradient"
    LOSS = "backward begins"
    LAYER = "backward computes a layer again"
    FULL = "the first bucket of gradients is full"
    REDUCED = "backward ends, gradients are reduced"
    KEPT = "a reduced gradient goes to where it is kept"
    NORM = "gradients' norm is taken"
    STEP = "the optimizer steps"
    SAVED = "a checkpoint is written"


M = Moment
UNREADY = frozenset({M.READ, M.BUILT})
LOADING = UNREADY | {M.INITIALIZED, M.HOOKED}
SAVING = frozenset({M.SAVED})
TRAINING = frozenset(Moment) - LOADING - SAVING
ALWAYS = frozenset(Moment)
READY = ALWAYS - UNREADY
LATER = TRAINING | SAVING
PASSES = TRAINING - {M.NORM, M.STEP}


@dataclass(frozen=True)
class Array:
    """One array, or several of a kind."""

    name: str  # in words
    num_bytes: float  # of one rank
    on_host: bool  # else on the device
    when: frozenset[Moment]  # moments at which it is there
    is_shared: bool = False  # one of a node's ranks has it, and the others do not


@dataclass(frozen=True)
class Peak:
    """The most at one time, of one rank."""

    device_bytes: float  # on its GPU, context and workspaces included; 0 without one
    host_bytes: float  # of its process
    when: Moment  # the moment at which device and host together hold the most
    arrays: tuple[Array, ...]  # what is there then
    shared_bytes: float = 0.0  # part of host_bytes that one of a node's ranks takes alone

    def node_bytes(self, ranks: int) -> float:
        """Return the host memory of all ranks of a node."""
        return ranks * (self.host_bytes - self.shared_bytes) + self.shared_bytes


@dataclass(frozen=True)
class Peaks:
    """The most of one rank while it loads, trains and saves a checkpoint."""

    load: Peak
    train: Peak
    save: Peak

    @property
    def phases(self) -> tuple[tuple[str, Peak], ...]:
        """Return the peaks by what the rank does meanwhile."""
        return ("load", self.load), ("train", self.train), ("save", self.save)

    def node_bytes(self, ranks: int) -> float:
        """Return the host memory of all ranks of a node, at the most of all."""
        return max(peak.node_bytes(ranks) for _, peak in self.phases)

    @property
    def device_bytes(self) -> float:
        """Return the most of all."""
        return max(peak.device_bytes for _, peak in self.phases)

    @property
    def host_bytes(self) -> float:
        """Return the most of all."""
        return max(peak.host_bytes for _, peak in self.phases)


@dataclass(frozen=True)
class Memory:
    """Memory of one rank while it trains, in bytes."""

    device_bytes: float  # peak of what torch allocates on its GPU; 0 without one
    host_bytes: float  # of its process
    page_locked_bytes: float  # part of it that is page-locked; 0 without a GPU


def peaks_of(of: Workload, has_gpu: bool) -> Peaks:
    """Predict the memory of one rank; without a GPU the host holds everything."""
    arrays = arrays_of(of, has_gpu)
    loaded = ZERO_BYTES if of.stage else 0.0
    stepped = loaded + STEPPED_BYTES
    if of.model.has_experts and not has_gpu:
        stepped += EXPERTS_BYTES
    return Peaks(
        load=_most(arrays, LOADING, has_gpu, loaded),
        train=_most(arrays, TRAINING, has_gpu, stepped),
        save=_most(arrays, SAVING, has_gpu, stepped),
    )


def _most(arrays: list[Array], when: frozenset[Moment], has_gpu: bool, libraries: float) -> Peak:
    """Return the largest sums of arrays that are there at once, with the process's own memory."""
    device, host = (
        {m: sum(a.num_bytes for a in arrays if m in a.when and a.on_host is place) for m in when}
        for place in (DEVICE, HOST)
    )
    most = max(sorted(when), key=lambda moment: device[moment] + host[moment])
    there = tuple(array for array in arrays if most in array.when)
    at = most if not has_gpu else max(sorted(when), key=lambda moment: host[moment])
    shared = sum(array.num_bytes for array in arrays if array.is_shared and at in array.when)
    if not has_gpu:
        own = CPU_PROCESS_BYTES + libraries
        return Peak(0.0, device[most] + host[most] + own, most, there, shared)
    return Peak(
        max(device.values()) + CONTEXT_BYTES + WORKSPACE_BYTES,
        host[at] + CUDA_PROCESS_BYTES + libraries,
        most,
        there,
        shared,
    )


def memory_of(of: Workload, machine: Machine) -> Memory:
    """Predict what one rank takes while it trains."""
    arrays = arrays_of(of, bool(machine.gpus))
    if not machine.gpus:
        lanes = CPU_LANES_BYTES if of.software is None else 0.0
        return Memory(0.0, _most(arrays, TRAINING, False, lanes).host_bytes, 0.0)
    peak = _most(arrays, TRAINING, True, 0.0)
    pageable = sum(array.num_bytes for array in arrays if array.name == PAGEABLE)
    locked = (peak.host_bytes - CUDA_PROCESS_BYTES - pageable) * of.locks_state
    return Memory(peak.device_bytes - CONTEXT_BYTES, peak.host_bytes, locked)


def shortages(of: Workload, machine: Machine, memory: Memory) -> list[str]:
    """Return what the machine lacks, a sentence each with what to change; empty when it fits."""
    found, per_node = [], ranks_a_node(of, machine)
    need = memory.host_bytes * per_node
    if need > machine.host_memory_bytes * HEADROOM:
        found.append(
            f"host memory: {need / GIB:.1f} GiB needed by {per_node} "
            f"rank{'s' if per_node > 1 else ''} of a node, it has "
            f"{machine.host_memory_bytes / GIB:.1f}; {_remedy(of, machine)}"
        )
    need = memory.device_bytes + CONTEXT_BYTES
    if machine.device_memory_bytes and need > machine.device_memory_bytes * HEADROOM:
        found.append(
            f"GPU memory: {need / GIB:.1f} GiB needed, a GPU has "
            f"{machine.device_memory_bytes / GIB:.1f}; use more ranks (dp), a smaller "
            "micro-batch (with more accumulation), or a larger offload ratio"
        )
    return found


def _remedy(of: Workload, machine: Machine) -> str:
    if machine.gpus:
        remedies = ["use more nodes (dp)", "an offload ratio below 1"]
    else:  # every rank is on this one host, which holds all state whatever the ratio
        remedies = ["use a smaller model, or fewer ranks (dp)"]
    if of.software is not None:
        ours = dataclasses.replace(of, software=None, policy="all-host")
        need = memory_of(ours, machine).host_bytes * ranks_a_node(of, machine)
        remedies.insert(0, f"engine 'plugin' needs {need / GIB:.1f} GiB")
    nodes = -(-of.ranks // machine.gpus) if machine.gpus else 1
    return " or ".join(remedies) + (f" (now {nodes} nodes)" if nodes > 1 else "")


def ranks_a_node(of: Workload, machine: Machine) -> int:
    """Return how many ranks share a node."""
    return min(of.ranks, machine.gpus) if machine.gpus else of.ranks


# The arrays.


def arrays_of(of: Workload, has_gpu: bool) -> list[Array]:
    """Return all arrays of one rank; on a CPU a buffer takes only the memory that is written to."""
    if of.stage == 3:
        found = [*_passes_of_stage3(of, has_gpu), *_update_of_stage3(of, has_gpu)]
    else:
        states = _stage12(of, has_gpu) if of.stage else _stage0(of)
        found = [*states, *_activations(of)]
    tied = of.weight_bytes * of.model.tied_numel
    found.append(Array("second embedding, until both are tied", tied, DEVICE, frozenset({M.BUILT})))
    if has_gpu and of.stage < 3:
        # As from_pretrained does on every rank; only zero.Init of stage 3 cuts weights at once.
        found.append(Array("model as it is read", of.weight_bytes * of.numel, HOST, UNREADY))
    kind, is_cut = of.model.checkpoint, of.stage == 3
    if kind and (is_cut or kind != of.dtype):
        # Without a conversion the file's own pages are the model. At stage 3 one rank reads them.
        file = float(BYTES[kind] * of.numel)
        found.append(Array(f"checkpoint in {kind}", file, HOST, frozenset({M.READ}), is_cut))
    return [array for array in found if array.num_bytes]


def layer_bytes(of: Workload) -> tuple[float, float]:
    """Return the bytes that all layers keep for backward, and the most that one of them keeps.

    With checkpointing the layers keep their inputs alone, and one at a time all of it.
    """
    layer = of.kept.layer
    if of.activation_checkpointing:
        layer = float(of.weight_bytes * of.sequence * of.model.hidden)
    return of.micro_batch_size * of.model.layers * layer, of.micro_batch_size * of.kept.largest


def _activations(of: Workload) -> Iterator[Array]:
    layers, largest = layer_bytes(of)
    both = frozenset({M.LOSS, M.LAYER})
    kept = layers + of.micro_batch_size * of.kept.head
    yield Array("activations kept for backward", kept, DEVICE, both)
    if of.activation_checkpointing:
        yield Array("activations of one layer", largest, DEVICE, frozenset({M.LAYER}))
    if of.stage:
        # Every bucket but the last is reduced while the layers below it wait for their backward.
        left = 1 - min(of.bucket_numel, of.numel) / of.numel
        kept = left * layers + (largest if of.activation_checkpointing and left else 0.0)
        yield Array("activations of the layers left", kept, DEVICE, frozenset({M.FULL}))
    logits = of.micro_batch_size * of.kept.logits
    yield Array("logits and their gradients", logits, DEVICE, frozenset({M.LOSS}))


def _stage0(of: Workload) -> Iterator[Array]:
    weights, whole = float(of.weight_bytes * of.numel), FP32_BYTES * of.numel
    is_fp32 = of.weight_bytes == FP32_BYTES
    yield Array("weights", weights, DEVICE, ALWAYS)
    yield Array("moments", 2.0 * whole, DEVICE, LATER if is_fp32 else READY)
    if not is_fp32:
        yield Array("master weights", whole, DEVICE, READY)
        yield Array("fp32 gradients", whole, DEVICE, frozenset({M.INITIALIZED, M.STEP}))
        yield Array("gradients while set up", weights, DEVICE, frozenset({M.INITIALIZED}))
    kept = TRAINING if of.accumulation > 1 else TRAINING - {M.LOSS, M.LAYER, M.FULL}
    yield Array("gradients", weights, DEVICE, kept)
    yield Array("gradients laid out to be reduced", weights, DEVICE, frozenset({M.REDUCED}))


def _bucket(of: Workload, has_gpu: bool) -> float:
    """One bucket; no gradients but the model's are ever written to it."""
    return float(of.weight_bytes * (of.bucket_numel if has_gpu else min(of.bucket_numel, of.numel)))


def power_of_two(num_bytes: float) -> float:
    """Return the size to which torch rounds up a page-locked allocation of ``num_bytes``."""
    return float(1 << max(0, int(num_bytes) - 1).bit_length()) if num_bytes else 0.0


def _locked(num_bytes: float, is_locked: bool) -> float:
    """Bytes of an array that torch page-locks, if it does."""
    return power_of_two(num_bytes) if is_locked else float(num_bytes)


def _stage12(of: Workload, has_gpu: bool) -> Iterator[Array]:
    weights, part, offloaded = float(of.weight_bytes * of.numel), of.part, of.optimizer_at != "none"
    yield Array("weights", weights, DEVICE, ALWAYS)
    if not has_gpu:  # on a GPU without room for both DeepSpeed does this on the host
        now = frozenset({M.BUILT})
        yield Array("weights before they are made one array", weights, DEVICE, now)
    if of.software is None:  # what this package page-locks is not rounded up
        yield Array("master weights", FP32_BYTES * part, HOST, READY)
        yield Array("moments", MOMENTS_BYTES * part, HOST, READY)
        yield Array("gradients", float(of.final_grad_bytes * part), HOST, READY)
        yield from _tiles_under_way(of, of.final_grad_bytes, has_gpu)
        yield _kept_state(of)
    else:
        master = _locked(FP32_BYTES * part, has_gpu and offloaded and of.locks_state)
        yield Array("master weights", master, offloaded, READY)
        yield Array("moments", MOMENTS_BYTES * part, offloaded, LATER)
    buckets = (2 if of.overlaps and has_gpu else 1) * _bucket(of, has_gpu)
    when = PASSES if has_gpu else PASSES - {M.LOSS, M.LAYER}
    yield Array("bucket of gradients", buckets, DEVICE, when)
    summed = of.accumulation > 1
    if of.stage == 1:
        # It reduces when the last backward has ended; gradients are moved into the bucket.
        left = of.weight_bytes * (1 - min(of.bucket_numel, of.numel) / of.numel)
        when = PASSES if summed else frozenset({M.REDUCED})
        yield Array("gradients that are not in the bucket yet", left * of.numel, DEVICE, when)
        copy = left * part * (not offloaded)
        yield Array("gradients of the partition, copied", copy, DEVICE, frozenset({M.REDUCED}))
    yield from _gradients_on_host(of, has_gpu) if offloaded else _gradients_on_device(of)


def _gradients_on_host(of: Workload, has_gpu: bool) -> Iterator[Array]:
    """Gradients of stages 1 and 2 whose optimizer is offloaded."""
    part, largest, is_stock = of.part, max(of.tensors), of.software is not None
    whole, locks = of.weight_bytes * largest, has_gpu and of.locks_state
    if is_stock:
        yield Array("fp32 gradients", _locked(FP32_BYTES * part, locks), HOST, READY)
        weights = _locked(of.weight_bytes * part, locks)
        yield Array("weights on their way to the device", weights, HOST, READY)
    elif has_gpu:
        bucket = float(of.final_grad_bytes * min(of.bucket_numel, part))
        when = frozenset({M.FULL, M.REDUCED, M.KEPT})
        yield Array("gradients on their way", bucket, DEVICE, when)
    yield Array("gradient on its way", _locked(whole, locks and is_stock), HOST, READY)
    yield Array("gradient on its way, on the device", whole, DEVICE, READY)
    norm = FP64_BYTES * min(largest, part)
    yield Array("fp64 gradient of a tensor", norm, DEVICE, frozenset({M.KEPT}))
    if of.accumulation > 1 and of.stage == 2:  # a tensor for each parameter that has some here
        each = sum(_locked(of.weight_bytes * numel, locks) for numel in of.tensors)
        yield Array("sum of gradients", each * part / of.numel, HOST, TRAINING)


def _gradients_on_device(of: Workload) -> Iterator[Array]:
    """Gradients of stages 1 and 2 whose optimizer is on the device."""
    part, summed = of.part, of.accumulation > 1
    kept = TRAINING if summed else TRAINING - {M.LOSS, M.LAYER, M.FULL}
    yield Array("gradients of the partition", of.weight_bytes * part, DEVICE, kept)
    if summed:
        now = frozenset({M.REDUCED})
        yield Array("gradients of the last micro-batch", of.weight_bytes * part, DEVICE, now)
    else:
        first = of.weight_bytes * min(of.bucket_numel, part)
        yield Array("gradients of the first bucket", first, DEVICE, frozenset({M.FULL}))
    yield Array("fp32 gradients", FP32_BYTES * part, DEVICE, frozenset({M.INITIALIZED}))
    norm = FP64_BYTES * min(max(of.tensors), part)
    yield Array("fp64 gradient of a tensor", norm, DEVICE, frozenset({M.NORM}))
    yield from _flat_gradients(of, part)


def _flat_gradients(of: Workload, numel: int) -> Iterator[Array]:
    """Gradients made one array, and fp32 of it: one array less where they are fp32 already."""
    step = frozenset({M.STEP})
    if of.weight_bytes < FP32_BYTES:
        yield Array("gradients as one array", of.weight_bytes * numel, DEVICE, step)
    yield Array("fp32 gradients of the step", FP32_BYTES * numel, DEVICE, step)


def _passes_of_stage3(of: Workload, has_gpu: bool) -> Iterator[Array]:
    """Weights, buckets and activations of stage 3: all but what its update holds."""
    on_host, largest = of.weights_at == "cpu", max(of.tensors)
    weights = _locked(of.weight_bytes * of.part, has_gpu and on_host and of.locks_weights)
    if of.weights_at == "nvme":
        buffers = of.weight_bytes * NVME_WEIGHTS_NUMEL
        yield Array("buffers of weights on NVMe", buffers, HOST, ALWAYS)
    else:
        yield Array("weights", weights, on_host, ALWAYS)
    if of.dp > 1 or (of.weights_on_host and has_gpu):
        gathered = of.weight_bytes * min(of.live_numel, of.numel)
        yield Array("gathered weights", gathered, DEVICE, PASSES)
    one = _bucket(of, has_gpu)
    filled = min(one, of.weight_bytes * of.numel)
    yield Array("bucket of gradients", one, DEVICE, READY if has_gpu else LATER)
    yield Array("bucket's copy", filled, DEVICE, frozenset({M.FULL, M.REDUCED, M.KEPT}))
    # The collective's own, until the reduction is over.
    yield Array("bucket's second copy", filled, DEVICE, frozenset({M.FULL, M.REDUCED}))
    both = 2 * of.weight_bytes * largest
    yield Array("a weight, gathered and cut again", both, DEVICE, frozenset({M.HOOKED}))
    norm = float(FP64_BYTES * -(-largest // of.dp))
    when = M.NORM if of.optimizer_at == "none" else M.KEPT
    yield Array("fp64 gradient of a tensor", norm, DEVICE, frozenset({when}))
    yield from _activations(of)


def _update_of_stage3(of: Workload, has_gpu: bool) -> Iterator[Array]:
    if of.software is None:
        yield from _own_update(of, has_gpu)
    elif of.optimizer_at == "nvme":  # a subgroup's master weights, moments and gradient at a time
        yield Array("gradients", of.weight_bytes * of.part, HOST, LATER | {M.HOOKED})
        state = (FP32_BYTES + MOMENTS_BYTES + FP32_BYTES) * max(of.subgroups)
        yield Array("buffers of state on NVMe", NVME_BUFFERS * state, HOST, READY)
    else:
        yield from _stock_update(of, has_gpu)


def _stock_update(of: Workload, has_gpu: bool) -> Iterator[Array]:
    assert of.software
    software, numels, offloaded = of.software, of.subgroups, of.optimizer_at == "cpu"
    stays = software.resident_subgroups(of) if offloaded else frozenset()
    moved = [numel for idx, numel in enumerate(numels) if idx not in stays]
    resident, largest, now = sum(numels) - sum(moved), max(numels), frozenset({M.INITIALIZED})
    exact = sum(moved) if software.locked_arrays else 0
    yield Array("master weights", of.master_bytes * exact, offloaded, READY)
    yield Array("moments", of.moments_bytes * exact, offloaded, LATER)
    locks = has_gpu and offloaded and of.locks_state
    gradients = _locked(of.sum_bytes * sum(numels), locks)
    yield Array("gradients", gradients, offloaded, LATER | {M.HOOKED})
    if not offloaded:
        yield Array("fp32 gradients, zeros", FP32_BYTES * largest, DEVICE, now)
        yield from _flat_gradients(of, largest)
        return
    yield _resident_state(of, resident)
    each = sum(_locked(of.master_bytes * numel, locks) for numel in moved)
    yield Array("fp32 gradients", software.rounded_arrays * each, HOST, READY)
    yield Array("gradients of a subgroup, zeros", of.master_bytes * largest, HOST, now)
    pageable = FP32_BYTES * sum(moved) * software.pageable_arrays
    yield Array(PAGEABLE, pageable, HOST, READY)
    slot = of.master_bytes + of.moments_bytes + FP32_BYTES
    yield Array("slots", float(slot * software.slots * largest), DEVICE, READY)


def _own_update(of: Workload, has_gpu: bool) -> Iterator[Array]:
    """Arrays that this package's engine holds for the update of stage 3."""
    numel = sum(of.subgroups)
    homes = choose_resident_subgroups(of.subgroups, of.offload_ratio)
    resident = sum(of.subgroups[idx] for idx in homes)
    gradients = bytes_of_gradients(of.sum_bytes, of.accumulation) * numel
    yield Array("master weights", of.master_bytes * (numel - resident), HOST, READY)
    yield Array("moments", of.moments_bytes * (numel - resident), HOST, READY)
    yield Array("gradients", gradients, HOST, READY)
    part = of.weight_bytes * -(-max(of.tensors) // of.dp)
    yield Array("gradient's slice, set aside", part, DEVICE, frozenset({M.KEPT}))
    yield from _tiles_under_way(of, of.weight_bytes, has_gpu)
    yield _resident_state(of, resident)
    yield _kept_state(of)


def with_share_for_host(
    of: Workload, host_bytes: float, device_bytes: float, ranks: int
) -> Workload:
    """Return a workload whose device holds for good what host memory lacks, as the engine does.

    It is unchanged where nothing lacks, and where the engine refuses such state.

    Args:
        of: One run.
        host_bytes: Host memory that the ranks of a node may take together.
        device_bytes: Memory of a GPU that its rank may take.
        ranks: Ranks of a node.
    """
    is_ours = of.software is None and of.optimizer_at == "cpu" and of.stage == 3
    is_open = of.policy in SHARED and of.offload_ratio == 1.0 and of.device_memory_bytes
    if not (is_ours and is_open):
        return of
    alone = dataclasses.replace(of, device_share=0.0)
    lacking = (peaks_of(alone, True).node_bytes(ranks) - host_bytes) / ranks
    total, moved = sum(of.subgroups), 0
    for numel in of.subgroups:
        if moved * of.state_bytes >= lacking:
            break
        moved += numel
    limit = of.device_memory_bytes
    has_limit = isinstance(limit, str) or moved * _kept_bytes(of) <= limit
    # Master weights are all made in host memory, before a share of them moves.
    if not (moved and has_limit and moved * of.state_bytes <= total * of.moments_bytes):
        return of
    found = dataclasses.replace(alone, offload_ratio=1 - moved / total)
    peaks = peaks_of(found, True)
    fits = peaks.node_bytes(ranks) <= host_bytes and peaks.device_bytes <= device_bytes
    return found if fits else of


def with_device_share(of: Workload, machine: Machine) -> Workload:
    """Return a workload with the shares of state that stay on the device.

    What host memory lacks stays for good, and more while there is room: a tenth of the device is
    left alone, and what a rank takes there without such state.
    """
    is_ours = of.software is None and of.optimizer_at == "cpu"
    if not (of.device_memory_bytes and is_ours and machine.gpus):
        return of
    assert machine.device_memory_bytes is not None
    host, device = machine.host_memory_bytes * HEADROOM, machine.device_memory_bytes * HEADROOM
    of = with_share_for_host(of, host, device, ranks_a_node(of, machine))
    alone = dataclasses.replace(of, device_memory_bytes=0, device_share=0.0)
    peak = peaks_of(alone, True).train.device_bytes
    room = (1 - DEVICE_MARGIN) * machine.device_memory_bytes - peak
    if of.device_memory_bytes != AUTO:
        room = min(room, float(of.device_memory_bytes))
    homes = choose_resident_subgroups(of.subgroups, of.offload_ratio)
    numel = sum(n for idx, n in enumerate(of.subgroups) if idx not in homes)
    share = room / (_kept_bytes(of) * numel) if numel else 0.0
    return dataclasses.replace(of, device_share=min(1.0, max(0.0, share)))


def _kept_bytes(of: Workload) -> int:
    """Return the bytes of a parameter's state with its gradient."""
    return of.state_bytes + of.final_grad_bytes


def _kept_state(of: Workload) -> Array:
    homes = choose_resident_subgroups(of.subgroups, of.offload_ratio)
    stays = sum(of.subgroups[idx] for idx in of.schedule.resident_subgroups - homes)
    return Array("state kept on the device", float(_kept_bytes(of) * stays), DEVICE, LATER)


def _resident_state(of: Workload, numel: int) -> Array:
    state = (of.master_bytes + of.moments_bytes + FP32_BYTES) * numel
    return Array("state that stays on the device", state, DEVICE, READY)


def _tiles_under_way(of: Workload, grad_bytes: int, has_gpu: bool) -> Iterator[Array]:
    """Staging buffers of the CPU lane, and the device's slots and outboxes."""
    schedule = _schedule(of)
    staging = of.weight_bytes * schedule.staged_numel
    staging = staging if has_gpu else min(staging, of.weight_bytes * of.part)
    yield Array("weights on their way to the device", staging, HOST, LATER)
    weights = of.weight_bytes if schedule.weights_on_host else 0
    tile = (of.master_bytes + of.moments_bytes + grad_bytes + weights) * schedule.slot_numel
    outboxes = of.weight_bytes * schedule.outbox_numel * NUM_OUTBOXES
    yield Array("slots", float(NUM_SLOTS * tile + outboxes), DEVICE, READY)


def _schedule(of: Workload) -> Schedule:
    """This package's tiles, with those of few persistent parameters apart."""
    persistent: list[Tile] = []
    subgroup, held = 0, 0
    for numel in of.tensors if of.stage == 3 and not of.subgroup_numels else ():
        part = -(-numel // of.dp)
        if numel < PERSISTENT_NUMEL:
            persistent.append(Tile(subgroup, held, part))
        held += part
        if held >= of.subgroup_numel:
            subgroup, held = subgroup + 1, 0
    return of.schedule_with(separate_ranges(persistent, of.part))
