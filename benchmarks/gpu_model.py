"""The model that ``make bench-gpu`` trains: as large as memory and time allow. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu_rows import STOCK_HOST_BYTES
from benchmarks.report import BenchmarkError
from configs.schema import Model, Point
from launch.ds_json import deepspeed_config

GIB = 2**30
LEAST_PARAMETERS = 1_000_000
HOST_BYTES = STOCK_HOST_BYTES * 4 // 3
"""A parameter of stock with what it wastes: torch rounds page-locked memory up to powers of two."""
HOST_SPARE_BYTES = 8 * GIB
DEVICE_BYTES = 5
"""A parameter on the device: weights, and gradients while they are reduced."""
DEVICE_SPARE_BYTES = 8 * GIB
"""On the device beside that: activations, buckets, device slots."""
SHARE_OF_FREE = 0.85
START_S, SECONDS_PER_1E9 = 15.0, 15.0
"""Guess of what one process of a row takes, to choose a model that all rows have time for."""
_SHAPES = (  # up to this many parameters: hidden, inner size, heads, vocabulary
    (20e6, 256, 688, 4, 512),
    (200e6, 768, 2048, 12, 8192),
    (1e9, 1536, 4096, 16, 32000),
    (3e9, 2560, 6912, 20, 32000),
    (float("inf"), 4096, 11008, 32, 32000),
)


def choose_parameters(
    host_bytes: int, device_bytes: int | None, seconds: float, num_rows: int
) -> tuple[int, str]:
    """How many parameters to train, and what limits them.

    Args:
        host_bytes: Free host memory.
        device_bytes: Free device memory; None without a device of its own.
        seconds: For all rows.
        num_rows: Rows that are to have two rounds.
    """
    each_s = seconds / (2 * num_rows) - START_S
    limits = {
        "host memory": (SHARE_OF_FREE * host_bytes - HOST_SPARE_BYTES) / HOST_BYTES,
        "time": each_s / SECONDS_PER_1E9 * 1e9,
    }
    if device_bytes is not None:
        limits["device memory"] = (SHARE_OF_FREE * device_bytes - DEVICE_SPARE_BYTES) / DEVICE_BYTES
    name = min(limits, key=lambda limit: limits[limit])
    return max(LEAST_PARAMETERS, int(limits[name])), name


def make_point(parameters: int, seq_length: int, iterations: int, device: str) -> Point:
    """A GPT of about ``parameters``, one sample an iteration.

    Raises:
        BenchmarkError: Fewer parameters than one layer has.
    """
    if parameters < LEAST_PARAMETERS:
        raise BenchmarkError(f"--parameters {parameters:,}: give {LEAST_PARAMETERS:,} or more")
    _, hidden, ffn, heads, vocabulary = next(shape for shape in _SHAPES if parameters <= shape[0])

    def model(layers: int) -> Model:
        return Model(
            name="bench",
            hidden=hidden,
            ffn=ffn,
            layers=layers,
            heads=heads,
            kv_heads=heads // 2,
            seq_length=seq_length,
            vocab_size=vocabulary,
        )

    layer = model(2).num_parameters() - model(1).num_parameters()
    layers = 1 + max(0, (parameters - model(1).num_parameters()) // layer)
    chosen = model(layers)
    total = chosen.num_parameters()
    return Point(
        model=chosen,
        iterations=iterations,
        subgroup_numel=max(1, min(100_000_000, total // 8)),
        attention="sdpa",
        activation_checkpointing=device != "cpu",
        device="cpu" if device == "cpu" else "cuda",
    )


def stock_config(point: Point, clip_grad: float) -> Mapping[str, Any]:
    """DeepSpeed's config of the stock row: the harness's own, without its timers."""
    config = deepspeed_config(point.model_copy(update={"clip_grad": clip_grad}))
    config.update(wall_clock_breakdown=False, memory_breakdown=False, steps_per_print=10**9)
    return config
