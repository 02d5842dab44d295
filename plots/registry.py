"""Every figure by its name: what it shows, how it is drawn, when it is worth drawing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from plots import accumulation, breakdown, loss, memory, models, swept, update_rates, utilisation
from plots.tables import Tables


@dataclass(frozen=True)
class Drawing:
    """A figure that can be asked for."""

    shows: str
    """In a sentence."""
    needs: str
    """Tables and columns without which it cannot be drawn."""
    draw: Callable[[Tables], Figure]
    unsupported: Callable[[Tables], str]
    """Why it is not drawn unasked; empty when it is."""


def _swept(name: str, shows: str, needs: str) -> Drawing:
    figure = swept.FIGURES[name]
    return Drawing(shows, needs, figure.draw, figure.unsupported)


FIGURES = {
    "iteration-breakdown": Drawing(
        "Forward, backward and update of an iteration, engine by engine",
        "runs: iteration_ms, forward_ms, backward_ms, update_ms",
        breakdown.draw, breakdown.unsupported,
    ),
    "loss": Drawing(
        "Loss of every iteration, engines over each other", "iterations: iteration, loss",
        loss.draw, loss.unsupported,
    ),
    "stride": _swept(
        "stride", "Update throughput and iteration time against the stride",
        "runs: stride, parameters; update_ms or iteration_ms",
    ),
    "models": Drawing(
        "Iteration breakdown, update throughput and time of 100 iterations of each model",
        "runs: model; iteration_ms; update_ms and parameters for the throughput",
        models.draw, models.unsupported,
    ),
    "micro-batch": _swept(
        "micro-batch", "Iteration time and TFLOP/s against the micro-batch",
        "runs: micro_batch_size; iteration_ms or tflops",
    ),
    "subgroup-size": _swept(
        "subgroup-size", "Update and iteration time against the subgroup size",
        "runs: subgroup_numel; update_ms or iteration_ms",
    ),
    "data-parallel": _swept(
        "data-parallel", "Weak scaling: iteration time and samples a second against the ranks",
        "runs: dp; iteration_ms; global_batch_size for samples a second",
    ),
    "offload-ratio": _swept(
        "offload-ratio", "Iteration and update time against the share of the state on the device",
        "runs: offload_ratio; iteration_ms or update_ms",
    ),
    "accumulation": Drawing(
        "Iteration time and allowed speed-ups against gradient accumulation",
        "runs: accumulation, or global_batch_size, micro_batch_size, dp; iteration_ms. "
        "comparisons: case, engine, stride, phase, ratio, speedup, withheld for the speed-ups",
        accumulation.draw, accumulation.unsupported,
    ),
    "gpu-hogging": _swept(
        "gpu-hogging", "Iteration and update time while a co-process takes a share of the device",
        "runs: hog_share; iteration_ms or update_ms",
    ),
    "update-rates": Drawing(
        "Update throughput of each engine and offload ratio",
        "runs: parameters, offload_ratio; update_ms",
        update_rates.draw, update_rates.unsupported,
    ),
    "memory": Drawing(
        "Memory of device and host over the phases of an iteration",
        "memory: iteration, title; allocated_gib, cached_gib or host_used_gib",
        memory.draw, memory.unsupported,
    ),
    "utilisation": Drawing(
        "CPU, memory, GPU and PCIe over the time of a run",
        "monitor: time_s; cpu_percent, host_used_bytes, gpu_* or pcie_*",
        utilisation.draw, utilisation.unsupported,
    ),
}  # fmt: skip
