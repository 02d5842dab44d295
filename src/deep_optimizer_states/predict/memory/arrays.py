"""Every array of a run: how large it is, whether on device or host, and when it is there.

Read off DeepSpeed 0.19's source and seen in runs on a CPU. A run takes the most at one of a few
moments, and an array is there at some of them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from deep_optimizer_states.predict.memory.activations import head_bytes, layer_bytes, loss_bytes
from deep_optimizer_states.predict.memory.architecture import FP32_BYTES
from deep_optimizer_states.predict.memory.setting import Setting
from deep_optimizer_states.predict.workload import power_of_two
from deep_optimizer_states.schedule import Schedule

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
TRAINING = frozenset({M.LOSS, M.LAYER, M.FULL, M.REDUCED, M.KEPT, M.NORM, M.STEP})
SAVING = frozenset({M.SAVED})
ALWAYS = LOADING | TRAINING | SAVING
READY = ALWAYS - {M.BUILT}
PASSES = frozenset({M.LOSS, M.LAYER, M.FULL, M.REDUCED, M.KEPT})
LATER = TRAINING | SAVING


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
    """All arrays of one rank.

    Args:
        setting: What runs.
        has_gpu: On a CPU a buffer takes only the memory that is written to.
    """
    make = _whole_stage3 if setting.stage == 3 else _stage12 if setting.stage else _stage0
    found = [*make(setting, has_gpu), *_passes(setting)]
    tied = setting.size * setting.architecture.tied_numel
    found.append(Array("second embedding, until both are tied", tied, False, frozenset({M.BUILT})))
    if has_gpu and setting.stage < 3 and not setting.in_flight:
        # As from_pretrained does on every rank; only zero.Init of stage 3 cuts weights at once.
        whole = setting.size * setting.numel
        found.append(Array("model as it is read", whole, True, frozenset({M.BUILT})))
    return [array for array in found if array.num_bytes]


def passes_of_stage3(setting: Setting, has_gpu: bool) -> list[Array]:
    """Those of a stage 3 whose update is somebody else's: weights, buckets and activations."""
    return [*_stage3(setting, has_gpu), *_passes(setting)]


def _passes(setting: Setting) -> Iterator[Array]:
    layers, largest = layer_bytes(setting)
    both = frozenset({M.LOSS, M.LAYER})
    kept = (layers + head_bytes(setting)) * max(1, setting.in_flight)
    yield Array("activations kept for backward", kept, False, both)
    if setting.checkpointing:
        yield Array("activations of one layer", largest, False, frozenset({M.LAYER}))
    if setting.stage:
        # Every bucket but the last is reduced while the layers below it wait for their backward.
        left = 1 - min(setting.bucket_numel, setting.numel) / setting.numel
        kept = left * layers + (largest if setting.checkpointing and left else 0.0)
        yield Array("activations of the layers left", kept, False, frozenset({M.FULL}))
    yield Array("logits and their gradients", loss_bytes(setting), False, frozenset({M.LOSS}))
    message = setting.size * setting.tokens * setting.architecture.hidden
    yield Array("messages between stages", 2.0 * message * setting.in_flight, False, both)
    yield Array("errors of compression", setting.compression_bytes, False, TRAINING)


def _stage0(of: Setting, has_gpu: bool) -> Iterator[Array]:
    weights = float(of.size * of.numel)
    whole = FP32_BYTES * of.numel
    yield Array("weights", weights, False, ALWAYS)
    yield Array("moments", 2.0 * whole, False, LATER if of.size == FP32_BYTES else READY)
    if of.size < FP32_BYTES:
        yield Array("master weights", whole, False, READY)
        now = frozenset({M.INITIALIZED, M.STEP})
        yield Array("fp32 gradients", whole, False, now)
        yield Array("gradients while set up", weights, False, frozenset({M.INITIALIZED}))
    kept = frozenset({M.REDUCED, M.KEPT, M.NORM, M.STEP})
    kept |= PASSES if of.accumulation > 1 else frozenset()
    yield Array("gradients", weights, False, kept)
    yield Array("gradients laid out to be reduced", weights, False, frozenset({M.REDUCED}))


def _bucket(of: Setting, has_gpu: bool) -> float:
    """One bucket; no gradients but the model's are ever written to it."""
    largest = min(of.bucket_numel, of.numel)
    return float(of.size * (of.bucket_numel if has_gpu else largest))


def _locked(num_bytes: float, has_gpu: bool) -> float:
    """Bytes of an array that is page-locked where there is a GPU: torch rounds it up."""
    return power_of_two(num_bytes) if has_gpu else float(num_bytes)


def _stage12(of: Setting, has_gpu: bool) -> Iterator[Array]:
    weights, part = float(of.size * of.numel), of.part
    offloaded = of.optimizer_at != "none"
    yield Array("weights", weights, False, ALWAYS)
    if not has_gpu:  # on a GPU without room for both DeepSpeed does this on the host
        now = frozenset({M.BUILT})
        yield Array("weights before they are made one array", weights, False, now)
    if of.plugin:
        yield from _flat_update(of, has_gpu)
    else:
        master = _locked(FP32_BYTES * part, has_gpu and offloaded)
        yield Array("master weights", master, offloaded, READY)
        yield Array("moments", MOMENTS_BYTES * part, offloaded, LATER)
    overlaps = 2 if of.overlaps and has_gpu else 1
    yield Array("bucket of gradients", overlaps * _bucket(of, has_gpu), False,
                PASSES if has_gpu else PASSES - {M.LOSS, M.LAYER})  # fmt: skip
    norm = float(FP64_BYTES * min(of.largest, part))
    summed = of.accumulation > 1
    if of.stage == 1:
        # It reduces when the last backward has ended; gradients are moved into the bucket.
        left = of.size * (1 - min(of.bucket_numel, of.numel) / of.numel)
        when = PASSES if summed else frozenset({M.REDUCED})
        yield Array("gradients that are not in the bucket yet", left * of.numel, False, when)
        copy = left * part * (not offloaded)
        yield Array("gradients of the partition, copied", copy, False, frozenset({M.REDUCED}))
    if offloaded:
        if not of.plugin:
            yield Array("fp32 gradients", _locked(FP32_BYTES * part, has_gpu), True, READY)
            yield Array("weights on their way to the device", _locked(of.size * part, has_gpu),
                        True, READY)  # fmt: skip
        locks = has_gpu and not of.plugin
        yield Array("gradient on its way", _locked(of.size * of.largest, locks), True, READY)
        yield Array("gradient on its way, on the device", of.size * of.largest, False, READY)
        yield Array("fp64 gradient of a tensor", norm, False, frozenset({M.KEPT}))
        yield Array("sum of gradients", of.size * part * summed, True, TRAINING)
        return
    kept = TRAINING - ({M.LOSS, M.LAYER, M.FULL} if not summed else set())
    first = 0 if summed else of.size * min(of.bucket_numel, part)
    yield Array("gradients of the first bucket", first, False, frozenset({M.FULL}))
    yield Array("gradients of the partition", of.size * part, False, kept)
    yield Array("gradients of the last micro-batch", of.size * part * summed, False,
                frozenset({M.REDUCED}))  # fmt: skip
    yield Array("fp32 gradients", FP32_BYTES * part, False, frozenset({M.INITIALIZED}))
    yield Array("fp64 gradient of a tensor", norm, False, frozenset({M.NORM}))
    yield from _flat_gradients(of, part)


def _flat_update(of: Setting, has_gpu: bool) -> Iterator[Array]:
    """The plugin's at stages 1 and 2; what it locks is not rounded up."""
    yield Array("master weights", FP32_BYTES * of.part, True, READY)
    yield Array("moments", MOMENTS_BYTES * of.part, True, READY)
    yield Array("fp32 gradients", FP32_BYTES * of.part, True, READY)
    yield from _tiles_under_way(of, FP32_BYTES, has_gpu)


def _tiles_under_way(of: Setting, grad_bytes: int, has_gpu: bool) -> Iterator[Array]:
    """Staging buffers of the CPU lane, and slots of the device, for gradients of so many bytes."""
    schedule = of.schedule
    staging = of.size * schedule.staging_numel * STAGING_BUFFERS
    staging = staging if has_gpu else min(staging, of.size * of.part)
    yield Array("weights on their way to the device", staging, True, LATER)
    state = of.master_bytes + of.moments_bytes
    slots = device_buffers_bytes(schedule, of.size, grad_bytes, state)
    yield Array("slots", slots, False, READY)


def _flat_gradients(of: Setting, numel: int) -> Iterator[Array]:
    """Gradients made one array, and fp32 of it: one array less where they are fp32 already."""
    step = frozenset({M.STEP})
    if of.size < FP32_BYTES:
        yield Array("gradients as one array", of.size * numel, False, step)
    yield Array("fp32 gradients of the step", FP32_BYTES * numel, False, step)


def _stage3(of: Setting, has_gpu: bool) -> Iterator[Array]:
    if of.weights_at == "nvme":
        yield Array("buffers of weights on NVMe", of.size * NVME_WEIGHTS_NUMEL, True, ALWAYS)
    else:
        on_host = of.weights_at == "cpu"
        weights = _locked(of.size * of.part, has_gpu and on_host)
        yield Array("weights", weights, on_host, ALWAYS)
    if of.dp > 1 or (of.weights_at != "none" and has_gpu):
        gathered = of.size * min(of.live_numel, of.numel)
        yield Array("gathered weights", gathered, False, PASSES)
    one = _bucket(of, has_gpu)
    filled = min(one, of.size * of.numel)
    yield Array("bucket of gradients", one, False, READY if has_gpu else LATER)
    yield Array("bucket's copy", filled, False, frozenset({M.FULL, M.REDUCED, M.KEPT}))
    # The collective's own, until the reduction is over.
    yield Array("bucket's second copy", filled, False, frozenset({M.FULL, M.REDUCED}))
    whole = 2 * of.size * of.largest
    yield Array("a weight, gathered and cut again", whole, False, frozenset({M.HOOKED}))
    norm = float(FP64_BYTES * -(-of.largest // of.dp))
    when = M.NORM if of.optimizer_at == "none" else M.KEPT
    yield Array("fp64 gradient of a tensor", norm, False, frozenset({when}))


def _whole_stage3(of: Setting, has_gpu: bool) -> Iterator[Array]:
    yield from _stage3(of, has_gpu)
    if of.plugin:
        yield from _plugin(of, has_gpu)
    elif of.optimizer_at == "nvme":
        yield from _nvme(of)
    else:
        yield from _stock_update(of, has_gpu)


def _stock_update(of: Setting, has_gpu: bool) -> Iterator[Array]:
    part, offloaded = of.part, of.optimizer_at == "cpu"
    largest, first = max(of.subgroups), int((1 - of.ratio) * len(of.subgroups)) * offloaded
    resident = sum(of.subgroups[:first])
    yield Array("master weights", of.master_bytes * (part - resident), offloaded, READY)
    yield Array("moments", of.moments_bytes * (part - resident), offloaded, LATER)
    gradients = _locked(of.sum_bytes * part, has_gpu and offloaded)
    yield Array("gradients", gradients, offloaded, LATER | {M.HOOKED})
    if offloaded:
        yield from _resident(of, resident)
        each = (_locked(of.master_bytes * numel, has_gpu) for numel in of.subgroups[first:])
        yield Array("fp32 gradients", sum(each), True, READY)
        yield Array("gradients of a subgroup, zeros", of.master_bytes * largest, True,
                    frozenset({M.INITIALIZED}))  # fmt: skip
        return
    yield Array("fp32 gradients, zeros", FP32_BYTES * largest, False, frozenset({M.INITIALIZED}))
    yield from _flat_gradients(of, largest)


def _nvme(of: Setting) -> Iterator[Array]:
    """A subgroup's master weights, moments and gradient at a time."""
    largest = max(of.subgroups)
    yield Array("gradients", of.size * of.part, True, LATER | {M.HOOKED})
    state = (FP32_BYTES + MOMENTS_BYTES + FP32_BYTES) * largest
    yield Array("buffers of state on NVMe", NVME_BUFFERS * state, True, READY)


def device_buffers_bytes(
    schedule: Schedule,
    size: int,
    grad_bytes: int = 0,
    state_bytes: float = FP32_BYTES + MOMENTS_BYTES,
) -> float:
    """Slots of the plugin, and outboxes for weights that live in host memory, in bytes.

    Args:
        schedule: Its tiles.
        size: Bytes of a weight.
        grad_bytes: Of a gradient; 0: as many.
        state_bytes: Of master weight and moments.
    """
    weights = size if schedule.weights_on_host else 0
    slots = (state_bytes + (grad_bytes or size) + weights) * schedule.slot_numel * SLOTS
    return float(slots + size * schedule.outbox_numel * STAGING_BUFFERS)


def _plugin(of: Setting, has_gpu: bool) -> Iterator[Array]:
    schedule = of.schedule
    resident = sum(of.subgroups[idx] for idx in schedule.resident_subgroups)
    on_host = sum(of.subgroups) - resident
    grads = of.sum_bytes * of.part * (2 if of.accumulation > 1 else 1)
    yield Array("master weights", of.master_bytes * on_host, True, READY)
    yield Array("moments", of.moments_bytes * on_host, True, READY)
    yield Array("gradients", grads, True, READY)
    yield Array("gradient's slice, set aside", of.size * -(-of.largest // of.dp), False,
                frozenset({M.KEPT}))  # fmt: skip
    yield from _tiles_under_way(of, of.size, has_gpu)
    yield from _resident(of, resident)


def _resident(of: Setting, numel: int) -> Iterator[Array]:
    state = of.master_bytes + of.moments_bytes + FP32_BYTES
    yield Array("state that stays on the device", state * numel, False, READY)
