"""The model that ``make bench-gpu`` trains: as large as memory and time allow. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.gpu_rows import STOCK_HOST_BYTES
from benchmarks.report import BenchmarkError
from configs.schema import Model, Point
from configs.study import default_study
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
ROUNDS = 1.5
"""Every row is to have time once, and the first half of them again."""
UNMEASURED_PARAMETERS = 1_000_000_000
"""Trained where no rates are known, unless memory allows less."""
_HALVINGS = 24
_SHAPES = (  # up to this many parameters: hidden, inner size, heads, vocabulary
    (20e6, 256, 688, 4, 512),
    (200e6, 768, 2048, 12, 8192),
    (1e9, 1536, 4096, 16, 32000),
    (3e9, 2560, 6912, 20, 32000),
    (float("inf"), 4096, 11008, 32, 32000),
)


def choose_parameters(
    host_bytes: int,
    device_bytes: int | None,
    row_limit_s: float,
    row_s: Callable[[int], float] | None,
) -> tuple[int, str]:
    """How many parameters to train, and what limits them.

    Args:
        host_bytes: Free host memory.
        device_bytes: Free device memory; None without a device of its own.
        row_limit_s: What one row may take.
        row_s: Seconds that a row takes with so many parameters, rising; None where no rates of
            this machine are known.
    """
    limits = {"host memory": (SHARE_OF_FREE * host_bytes - HOST_SPARE_BYTES) / HOST_BYTES}
    if device_bytes is not None:
        limits["device memory"] = (SHARE_OF_FREE * device_bytes - DEVICE_SPARE_BYTES) / DEVICE_BYTES
    name = min(limits, key=lambda limit: limits[limit])
    most = max(LEAST_PARAMETERS, int(limits[name]))
    if row_s is None:
        if most <= UNMEASURED_PARAMETERS:
            return most, name
        return UNMEASURED_PARAMETERS, "rates of this machine that could not be measured"
    if row_s(most) <= row_limit_s:
        return most, name
    least = LEAST_PARAMETERS
    for _ in range(_HALVINGS):
        middle = (least + most) // 2
        least, most = (middle, most) if row_s(middle) <= row_limit_s else (least, middle)
    return least, "time"


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
    return default_study().make_point(
        {
            "model": chosen.model_dump(),
            "iterations": iterations,
            "subgroup_numel": max(1, min(100_000_000, total // 8)),
            "attention": "sdpa",
            "activation_checkpointing": device != "cpu",
            "device": "cpu" if device == "cpu" else "cuda",
        }
    )


def stock_config(point: Point, clip_grad: float) -> Mapping[str, Any]:
    """DeepSpeed's config of the stock row: the harness's own, without its timers."""
    config = deepspeed_config(point.model_copy(update={"clip_grad": clip_grad}))
    config.update(wall_clock_breakdown=False, memory_breakdown=False, steps_per_print=10**9)
    return config
