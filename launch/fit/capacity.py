"""How much memory a run needs, and whether a machine has it: pure arithmetic, done beforehand.

The figures follow DeepSpeed 0.19's ZeRO-3 with the optimizer offloaded. They are upper estimates:
a run that is let through should not die of memory after an hour.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from configs.errors import ConfigError
from configs.schema import Engine, Point, model_names
from launch.ds_json import DEFAULT_REDUCE_BUCKET_NUMEL
from launch.fit.machine import Machine

GIB = 2**30
STATE_BYTES = 12
"""fp32 master weight and two moments, a parameter."""
FP32_GRADIENT_BYTES = 4
"""A parameter, in host memory; the plugin keeps no such copy."""
PINNED_ROUNDING = 1.45
"""torch rounds a pinned allocation up to a power of two: by 1 / ln 2 on the mean over sizes."""
LIVE_NUMEL = 1_000_000_000
"""Parameters DeepSpeed keeps gathered at most (``stage3_max_live_parameters``)."""
SLOTS = 3
"""Subgroups in flight on the device under the hybrid update."""
SLOT_BYTES = 16
"""fp32 master weight, moments, 16-bit gradient and weight, a parameter of a slot."""
CPU_PROCESS_BYTES = GIB
"""A rank with torch, DeepSpeed and Megatron loaded, before the model."""
CUDA_PROCESS_BYTES = 5 * GIB
"""The same with CUDA's libraries and context, in host memory."""
CUDA_CONTEXT_BYTES = 3 * GIB // 2
"""CUDA's context and what its allocator cannot use, in device memory."""
USABLE = 0.95
"""Share of the free memory that a run may count on."""


@dataclass(frozen=True)
class Need:
    """Memory a point needs."""

    host_bytes: int
    """All ranks together."""
    device_bytes: int
    """On each GPU; 0 on a CPU, where the host holds everything."""


def runs_on_gpu(point: Point, machine: Machine) -> bool:
    """Whether the point's ranks use CUDA on this machine."""
    return point.device == "cuda" or (point.device == "auto" and bool(machine.gpu_free_bytes))


def predict(point: Point, on_gpu: bool) -> Need:
    """Memory that ``point`` needs on GPUs or on a CPU alone."""
    rank_numel = point.model.num_parameters(point.tp) / point.num_ranks
    host = _host_rank_bytes(point, rank_numel)
    device = _device_rank_bytes(point, rank_numel)
    if on_gpu:
        return Need(
            host_bytes=int(point.num_ranks * (host + CUDA_PROCESS_BYTES)),
            device_bytes=int(device + CUDA_CONTEXT_BYTES),
        )
    return Need(int(point.num_ranks * (host + device + CPU_PROCESS_BYTES)), 0)


def _host_rank_bytes(point: Point, rank_numel: float) -> float:
    """Optimizer state, fp32 gradients and the flat buffer of gradients of one rank."""
    offloaded = rank_numel * point.offload_ratio
    flat = rank_numel * (4 if point.grad_accum_dtype == "fp32" else 2)
    # The plugin pins the state too, but in allocations of exact size.
    state = float(STATE_BYTES)
    if point.engine is Engine.VANILLA:
        state += PINNED_ROUNDING * FP32_GRADIENT_BYTES
    return offloaded * state + _power_of_two(flat)


def _device_rank_bytes(point: Point, rank_numel: float) -> float:
    """16-bit weights, the bucket of gradients, gathered parameters, activations and slots.

    Gradients leave for the host as the bucket fills, so the device never holds all of them.
    """
    whole = point.model.num_parameters(point.tp) / point.tp
    weights = 2 * rank_numel
    bucket = 2 * min(DEFAULT_REDUCE_BUCKET_NUMEL, whole)
    gathered = 2 * min(LIVE_NUMEL, whole)
    resident = (1 - point.offload_ratio) * rank_numel * (STATE_BYTES + FP32_GRADIENT_BYTES)
    slots = 0.0
    if point.engine is Engine.HYBRID:
        slots = SLOTS * SLOT_BYTES * min(rank_numel, _largest_subgroup_numel(point))
    return weights + bucket + gathered + resident + slots + _activation_bytes(point)


def _largest_subgroup_numel(point: Point) -> float:
    """A subgroup closes after ``subgroup_numel``, and holds its last parameter whole."""
    model = point.model
    largest = max(2 * model.hidden * model.ffn, model.padded_vocab_size(point.tp) * model.hidden)
    return point.subgroup_numel + largest / point.num_ranks


def _activation_bytes(point: Point) -> float:
    """Activations of one micro-batch on one rank, a layer's gradients and the logits.

    Per token and layer about ``15 h + 8 f`` bytes for the 16-bit tensors and ``9 a s`` for the
    materialised scores (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
    Models", equation 1, with SwiGLU's inner size and fp32 softmax).
    """
    model = point.model
    tokens = point.micro_batch_size * model.seq_length
    layer = tokens * (15 * model.hidden + 8 * model.ffn / point.tp)
    if point.attention == "local":
        layer += tokens * 9 * model.heads * model.seq_length / point.tp
    logits = 14 * tokens * model.padded_vocab_size(point.tp) / point.tp
    if point.activation_checkpointing:
        return 2 * tokens * model.hidden * model.layers + 2 * layer + logits
    return layer * (model.layers + 1) + logits


def _power_of_two(num_bytes: float) -> int:
    return 1 << max(0, int(num_bytes) - 1).bit_length()


def shortages(point: Point, machine: Machine) -> list[str]:
    """Why the point cannot run here, a line each; empty when it can."""
    on_gpu = runs_on_gpu(point, machine)
    gpus = machine.gpu_free_bytes
    if on_gpu and len(gpus) < point.num_ranks:
        return [f"tp {point.tp} x dp {point.dp} needs {point.num_ranks} GPUs, {len(gpus)} found"]
    need = predict(point, on_gpu)
    lines = []
    if need.host_bytes > USABLE * machine.host_free_bytes:
        lines.append(_short("host memory", need.host_bytes, machine.host_free_bytes))
    if on_gpu and need.device_bytes > USABLE * min(gpus[: point.num_ranks]):
        lines.append(_short("GPU memory", need.device_bytes, min(gpus[: point.num_ranks])))
    return lines


def _short(what: str, need_bytes: int, free_bytes: int) -> str:
    return f"about {need_bytes / GIB:.1f} GiB of {what} needed, {free_bytes / GIB:.1f} GiB free"


def refuse_if_short(point: Point, machine: Machine) -> None:
    """Stop before a run that cannot end well.

    Raises:
        ConfigError: memory or GPUs are missing; says how much is needed and free.
    """
    lines = shortages(point, machine)
    if lines:
        raise ConfigError(
            f"{point.model.name} with engine {point.engine.value} does not fit: "
            f"{'; '.join(lines)}. Choose a smaller model, more ranks or a smaller micro-batch, "
            "or pass --no-memory-check"
        )


def largest_model_that_fits(points_of: Callable[[str], Sequence[Point]], machine: Machine) -> str:
    """Name of the largest shipped model all of whose points fit the machine.

    Args:
        points_of: the points to run with a model of this name.
        machine: what is free.

    Raises:
        ConfigError: not even the smallest fits.
    """
    names = model_names()
    for name in reversed(names):
        if not any(shortages(point, machine) for point in points_of(name)):
            return name
    for point in points_of(names[0]):
        refuse_if_short(point, machine)
    raise AssertionError("a model that does not fit was not refused")
