"""Every array of a run: how large it is, whether on device or host, and when it is there.

Read off DeepSpeed 0.19's source and seen in runs on a CPU. A run takes the most at one of a few
moments, and an array is there at some of them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deep_optimizer_states.core.schedule import Schedule
from deep_optimizer_states.predict.memory.architecture import FP32_BYTES
from deep_optimizer_states.predict.memory.setting import Setting
from deep_optimizer_states.predict.workload import power_of_two

FP64_BYTES = 8
"""Norms are taken of an fp64 copy of each gradient."""
MOMENTS_BYTES = 2 * FP32_BYTES
"""Both moments of Adam."""
SLOTS, STAGING_BUFFERS = 3, 2
"""As the executor has them."""
NVME_BUFFERS = 4
"""DeepSpeed's ``buffer_count`` of an optimizer on NVMe: a subgroup's state each."""
NVME_WEIGHTS_NUMEL = 5 * 100_000_000
"""DeepSpeed's ``buffer_count`` and ``buffer_size`` of weights on NVMe."""
DEVICE, HOST = False, True
"""Where an array lies, as :attr:`Array.on_host` says it."""


class Moment(enum.StrEnum):
    """When a run may take the most."""

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
LOADING = frozenset({M.BUILT, M.INITIALIZED, M.HOOKED})
SAVING = frozenset({M.SAVED})
TRAINING = frozenset(Moment) - LOADING - SAVING
ALWAYS = frozenset(Moment)
READY = ALWAYS - {M.BUILT}
LATER = TRAINING | SAVING
PASSES = TRAINING - {M.NORM, M.STEP}


@dataclass(frozen=True)
class Array:
    """One array, or several of a kind.

    Attributes:
        name: In words.
        num_bytes: Of one rank.
        on_host: It lies in host memory; else on the device.
        when: Moments at which it is there.
    """

    name: str
    num_bytes: float
    on_host: bool
    when: frozenset[Moment]


def arrays_of(setting: Setting, has_gpu: bool) -> list[Array]:
    """Return all arrays of one rank.

    Args:
        setting: What runs.
        has_gpu: On a CPU a buffer takes only the memory that is written to.
    """
    if setting.stage == 3:
        found = [*passes_of_stage3(setting, has_gpu), *_update_of_stage3(setting, has_gpu)]
    else:
        states = _stage12(setting, has_gpu) if setting.stage else _stage0(setting)
        found = [*states, *_activations(setting)]
    tied = setting.size * setting.architecture.tied_numel
    found.append(Array("second embedding, until both are tied", tied, DEVICE, frozenset({M.BUILT})))
    if has_gpu and setting.stage < 3 and not setting.in_flight:
        # As from_pretrained does on every rank; only zero.Init of stage 3 cuts weights at once.
        whole = setting.size * setting.numel
        found.append(Array("model as it is read", whole, HOST, frozenset({M.BUILT})))
    return [array for array in found if array.num_bytes]


def layer_bytes(setting: Setting) -> tuple[float, float]:
    """Return the bytes that all layers keep for backward, and the most that one of them keeps.

    With checkpointing the layers keep their inputs alone, and one at a time all of it.
    """
    model = setting.architecture
    kept = setting.kept
    layer = kept.layer
    if setting.checkpointing:
        layer = float(setting.size * setting.tokens_a_sample * model.hidden)
    return setting.micro_batch * model.num_layers * layer, setting.micro_batch * kept.largest


def _activations(of: Setting) -> Iterator[Array]:
    layers, largest = layer_bytes(of)
    both = frozenset({M.LOSS, M.LAYER})
    head = of.micro_batch * of.kept.head
    yield Array(
        "activations kept for backward", (layers + head) * max(1, of.in_flight), DEVICE, both
    )
    if of.checkpointing:
        yield Array("activations of one layer", largest, DEVICE, frozenset({M.LAYER}))
    if of.stage:
        # Every bucket but the last is reduced while the layers below it wait for their backward.
        left = 1 - min(of.bucket_numel, of.numel) / of.numel
        kept = left * layers + (largest if of.checkpointing and left else 0.0)
        yield Array("activations of the layers left", kept, DEVICE, frozenset({M.FULL}))
    logits = of.micro_batch * of.kept.logits
    yield Array("logits and their gradients", logits, DEVICE, frozenset({M.LOSS}))
    message = of.size * of.micro_batch * of.tokens_a_sample * of.architecture.hidden
    yield Array("messages between stages", 2.0 * message * of.in_flight, DEVICE, both)
    yield Array("errors of compression", of.compression_bytes, DEVICE, TRAINING)


def _stage0(of: Setting) -> Iterator[Array]:
    weights, whole = float(of.size * of.numel), FP32_BYTES * of.numel
    yield Array("weights", weights, DEVICE, ALWAYS)
    yield Array("moments", 2.0 * whole, DEVICE, LATER if of.size == FP32_BYTES else READY)
    if of.size < FP32_BYTES:
        yield Array("master weights", whole, DEVICE, READY)
        yield Array("fp32 gradients", whole, DEVICE, frozenset({M.INITIALIZED, M.STEP}))
        yield Array("gradients while set up", weights, DEVICE, frozenset({M.INITIALIZED}))
    kept = TRAINING if of.accumulation > 1 else TRAINING - {M.LOSS, M.LAYER, M.FULL}
    yield Array("gradients", weights, DEVICE, kept)
    yield Array("gradients laid out to be reduced", weights, DEVICE, frozenset({M.REDUCED}))


def _bucket(of: Setting, has_gpu: bool) -> float:
    """One bucket; no gradients but the model's are ever written to it."""
    return float(of.size * (of.bucket_numel if has_gpu else min(of.bucket_numel, of.numel)))


def _locked(num_bytes: float, has_gpu: bool) -> float:
    """Bytes of an array that is page-locked where there is a GPU: torch rounds it up."""
    return power_of_two(num_bytes) if has_gpu else float(num_bytes)


def _stage12(of: Setting, has_gpu: bool) -> Iterator[Array]:
    weights, part, offloaded = float(of.size * of.numel), of.part, of.optimizer_at != "none"
    yield Array("weights", weights, DEVICE, ALWAYS)
    if not has_gpu:  # on a GPU without room for both DeepSpeed does this on the host
        now = frozenset({M.BUILT})
        yield Array("weights before they are made one array", weights, DEVICE, now)
    if of.plugin:  # what it page-locks is not rounded up
        yield Array("master weights", FP32_BYTES * part, HOST, READY)
        yield Array("moments", MOMENTS_BYTES * part, HOST, READY)
        yield Array("fp32 gradients", FP32_BYTES * part, HOST, READY)
        yield from _tiles_under_way(of, of.schedule, FP32_BYTES, has_gpu)
    else:
        master = _locked(FP32_BYTES * part, has_gpu and offloaded)
        yield Array("master weights", master, offloaded, READY)
        yield Array("moments", MOMENTS_BYTES * part, offloaded, LATER)
    buckets = (2 if of.overlaps and has_gpu else 1) * _bucket(of, has_gpu)
    when = PASSES if has_gpu else PASSES - {M.LOSS, M.LAYER}
    yield Array("bucket of gradients", buckets, DEVICE, when)
    summed = of.accumulation > 1
    if of.stage == 1:
        # It reduces when the last backward has ended; gradients are moved into the bucket.
        left = of.size * (1 - min(of.bucket_numel, of.numel) / of.numel)
        when = PASSES if summed else frozenset({M.REDUCED})
        yield Array("gradients that are not in the bucket yet", left * of.numel, DEVICE, when)
        copy = left * part * (not offloaded)
        yield Array("gradients of the partition, copied", copy, DEVICE, frozenset({M.REDUCED}))
    yield from _gradients_on_host(of, has_gpu) if offloaded else _gradients_on_device(of)


def _gradients_on_host(of: Setting, has_gpu: bool) -> Iterator[Array]:
    """Gradients of stages 1 and 2 whose optimizer is offloaded."""
    part, whole = of.part, of.size * of.largest
    if not of.plugin:
        yield Array("fp32 gradients", _locked(FP32_BYTES * part, has_gpu), HOST, READY)
        weights = _locked(of.size * part, has_gpu)
        yield Array("weights on their way to the device", weights, HOST, READY)
    locks = has_gpu and not of.plugin
    yield Array("gradient on its way", _locked(whole, locks), HOST, READY)
    yield Array("gradient on its way, on the device", whole, DEVICE, READY)
    norm = FP64_BYTES * min(of.largest, part)
    yield Array("fp64 gradient of a tensor", norm, DEVICE, frozenset({M.KEPT}))
    yield Array("sum of gradients", of.size * part * (of.accumulation > 1), HOST, TRAINING)


def _gradients_on_device(of: Setting) -> Iterator[Array]:
    """Gradients of stages 1 and 2 whose optimizer is on the device."""
    part, summed = of.part, of.accumulation > 1
    kept = TRAINING if summed else TRAINING - {M.LOSS, M.LAYER, M.FULL}
    yield Array("gradients of the partition", of.size * part, DEVICE, kept)
    if summed:
        now = frozenset({M.REDUCED})
        yield Array("gradients of the last micro-batch", of.size * part, DEVICE, now)
    else:
        first = of.size * min(of.bucket_numel, part)
        yield Array("gradients of the first bucket", first, DEVICE, frozenset({M.FULL}))
    yield Array("fp32 gradients", FP32_BYTES * part, DEVICE, frozenset({M.INITIALIZED}))
    norm = FP64_BYTES * min(of.largest, part)
    yield Array("fp64 gradient of a tensor", norm, DEVICE, frozenset({M.NORM}))
    yield from _flat_gradients(of, part)


def _flat_gradients(of: Setting, numel: int) -> Iterator[Array]:
    """Gradients made one array, and fp32 of it: one array less where they are fp32 already."""
    step = frozenset({M.STEP})
    if of.size < FP32_BYTES:
        yield Array("gradients as one array", of.size * numel, DEVICE, step)
    yield Array("fp32 gradients of the step", FP32_BYTES * numel, DEVICE, step)


def passes_of_stage3(of: Setting, has_gpu: bool) -> Iterator[Array]:
    """Yield weights, buckets and activations of stage 3: all but what its update holds."""
    on_host = of.weights_at == "cpu"
    weights = Array("weights", _locked(of.size * of.part, has_gpu and on_host), on_host, ALWAYS)
    if of.weights_at == "nvme":
        buffers = of.size * NVME_WEIGHTS_NUMEL
        weights = Array("buffers of weights on NVMe", buffers, HOST, ALWAYS)
    yield weights
    if of.dp > 1 or (of.weights_at != "none" and has_gpu):
        gathered = of.size * min(of.live_numel, of.numel)
        yield Array("gathered weights", gathered, DEVICE, PASSES)
    one = _bucket(of, has_gpu)
    filled = min(one, of.size * of.numel)
    yield Array("bucket of gradients", one, DEVICE, READY if has_gpu else LATER)
    yield Array("bucket's copy", filled, DEVICE, frozenset({M.FULL, M.REDUCED, M.KEPT}))
    # The collective's own, until the reduction is over.
    yield Array("bucket's second copy", filled, DEVICE, frozenset({M.FULL, M.REDUCED}))
    both = 2 * of.size * of.largest
    yield Array("a weight, gathered and cut again", both, DEVICE, frozenset({M.HOOKED}))
    norm = float(FP64_BYTES * -(-of.largest // of.dp))
    when = M.NORM if of.optimizer_at == "none" else M.KEPT
    yield Array("fp64 gradient of a tensor", norm, DEVICE, frozenset({when}))
    yield from _activations(of)


def _update_of_stage3(of: Setting, has_gpu: bool) -> Iterator[Array]:
    if of.plugin:
        yield from update_of_plugin(of, of.schedule, of.subgroups, has_gpu)
    elif of.optimizer_at == "nvme":  # a subgroup's master weights, moments and gradient at a time
        yield Array("gradients", of.size * of.part, HOST, LATER | {M.HOOKED})
        state = (FP32_BYTES + MOMENTS_BYTES + FP32_BYTES) * max(of.subgroups)
        yield Array("buffers of state on NVMe", NVME_BUFFERS * state, HOST, READY)
    else:
        yield from _stock_update(of, has_gpu)


def _stock_update(of: Setting, has_gpu: bool) -> Iterator[Array]:
    part, offloaded, largest = of.part, of.optimizer_at == "cpu", max(of.subgroups)
    first = int((1 - of.ratio) * len(of.subgroups)) * offloaded
    resident = sum(of.subgroups[:first])
    yield Array("master weights", of.master_bytes * (part - resident), offloaded, READY)
    yield Array("moments", of.moments_bytes * (part - resident), offloaded, LATER)
    gradients = _locked(of.sum_bytes * part, has_gpu and offloaded)
    yield Array("gradients", gradients, offloaded, LATER | {M.HOOKED})
    now = frozenset({M.INITIALIZED})
    if offloaded:
        yield resident_state(of, resident)
        each = (_locked(of.master_bytes * numel, has_gpu) for numel in of.subgroups[first:])
        yield Array("fp32 gradients", sum(each), HOST, READY)
        yield Array("gradients of a subgroup, zeros", of.master_bytes * largest, HOST, now)
    else:
        yield Array("fp32 gradients, zeros", FP32_BYTES * largest, DEVICE, now)
        yield from _flat_gradients(of, largest)


def update_of_plugin(
    of: Setting, schedule: Schedule, subgroups: Sequence[int], has_gpu: bool
) -> Iterator[Array]:
    """Yield what this package's engine holds for the update of stage 3.

    Args:
        of: What runs.
        schedule: Its tiles.
        subgroups: Elements of each subgroup of the rank.
        has_gpu: Whether the device is a GPU.
    """
    numel = sum(subgroups)
    resident = sum(subgroups[idx] for idx in schedule.resident_subgroups)
    gradients = of.sum_bytes * numel * (2 if of.accumulation > 1 else 1)
    yield Array("master weights", of.master_bytes * (numel - resident), HOST, READY)
    yield Array("moments", of.moments_bytes * (numel - resident), HOST, READY)
    yield Array("gradients", gradients, HOST, READY)
    part = of.size * -(-of.largest // of.dp)
    yield Array("gradient's slice, set aside", part, DEVICE, frozenset({M.KEPT}))
    yield from _tiles_under_way(of, schedule, of.size, has_gpu)
    yield resident_state(of, resident)


def resident_state(of: Setting, numel: int) -> Array:
    """Return the optimizer state of ``numel`` parameters that stays on the device."""
    state = (of.master_bytes + of.moments_bytes + FP32_BYTES) * numel
    return Array("state that stays on the device", state, DEVICE, READY)


def _tiles_under_way(
    of: Setting, schedule: Schedule, grad_bytes: int, has_gpu: bool
) -> Iterator[Array]:
    """Staging buffers of the CPU lane, and the device's slots and outboxes."""
    staging = of.size * schedule.staging_numel * STAGING_BUFFERS
    staging = staging if has_gpu else min(staging, of.size * of.part)
    yield Array("weights on their way to the device", staging, HOST, LATER)
    weights = of.size if schedule.weights_on_host else 0
    tile = (of.master_bytes + of.moments_bytes + grad_bytes + weights) * schedule.slot_numel
    outboxes = of.size * schedule.outbox_numel * STAGING_BUFFERS
    yield Array("slots", float(SLOTS * tile + outboxes), DEVICE, READY)
