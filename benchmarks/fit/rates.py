"""Fits a machine's rates to published values.

Every rate that is fitted has a physical meaning. What the rows do not determine stays as the
starting profile has it, and is marked ``assumed`` there. The fit is one of least squares on the
logarithms of predicted over published.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.fit.rows import Observation
from deep_optimizer_states.predict.machine import Curve, Machine
from deep_optimizer_states.predict.predict import predict
from deep_optimizer_states.predict.workload import StockOffload
from launch.simulate.workloads import paper_software

BASELINE, HYBRID = paper_software()[""], paper_software()["stride"]
TOLERANCE = 0.05
"""Errors below it count by their square, larger ones by their size: published forwards differ by a
factor of two between runs of the same model."""
Parameter = tuple[str, ...]
"""Keys that share a factor, each with its table: ``rates.h2d_bytes_per_s``."""


@dataclass(frozen=True)
class Stage:
    """Parameters that one kind of row determines.

    Attributes:
        parameters: What is fitted.
        quantities: To which quantities ...
        software: ... of which software.
    """

    parameters: tuple[Parameter, ...]
    quantities: tuple[str, ...]
    software: tuple[StockOffload, ...] = (BASELINE, HYBRID)

    def sees(self, item: Observation) -> bool:
        """Whether it is fitted to a row."""
        return item.quantity in self.quantities and item.workload.software in self.software


HOST_ADAM = ("rates.host_adam_parameters_per_s",)
BLOCKING = ("rates.pageable_h2d_bytes_per_s",)
LINK = ("rates.h2d_bytes_per_s", "rates.d2h_bytes_per_s")
HOST_STREAM = ("rates.host_stream_bytes_per_s",)
STAGES = {
    "h100x4": (
        Stage((HOST_ADAM, BLOCKING, LINK), ("update_s",)),
        # The hybrid update hides its gradients behind backward, the baseline adds them to it.
        Stage(
            (("rates.device_flops_per_s",), ("costs.launch_s",)),
            ("backward_s",),
            (HYBRID,),
        ),
        Stage((("rates.pageable_d2h_bytes_per_s",),), ("backward_s",), (BASELINE,)),
        Stage((("costs.layer_s",),), ("forward_s",), (BASELINE,)),
        Stage((("costs.hybrid_forward_s",),), ("forward_s",), (HYBRID,)),
        Stage((("costs.iteration_s", "costs.micro_batch_s"),), ("iteration_s",), (BASELINE,)),
        Stage((("costs.hybrid_s",),), ("iteration_s",), (HYBRID,)),
    ),
    "a100x4": (Stage((HOST_ADAM, BLOCKING, HOST_STREAM), ("update_s",)),),
}
"""What the rows of each machine determine, in the order it is fitted."""


def fit(machine: Machine, observations: Sequence[Observation], stages: Sequence[Stage]) -> Machine:
    """Fit rates stage by stage, each to the rows that depend on them.

    Args:
        machine: Where to start, and what is not fitted.
        observations: Published values.
        stages: One after the other.

    Returns:
        The fitted machine.
    """
    for stage in stages:
        seen = [item for item in observations if stage.sees(item)]
        if seen:
            machine = _fit_stage(machine, seen, stage.parameters)
    return machine


def _fit_stage(
    start: Machine, seen: Sequence[Observation], parameters: Sequence[Parameter]
) -> Machine:
    def errors(logs: NDArray[np.float64]) -> list[float]:
        trial = _scale(start, parameters, np.exp(logs))
        return [error for _, error in residuals(trial, seen)]

    # A prediction has kinks, where another resource begins to bind: steps must be wide enough.
    found = least_squares(
        errors, np.zeros(len(parameters)), loss="huber", f_scale=TOLERANCE, diff_step=1e-3
    )
    return _scale(start, parameters, np.exp(found.x))


def residuals(
    machine: Machine, observations: Iterable[Observation]
) -> list[tuple[Observation, float]]:
    """Logarithms of predicted over published."""
    found = []
    for item in observations:
        value = getattr(predict(item.workload, machine), item.quantity)
        found.append((item, math.log(value / item.value)))
    return found


def _scale(
    machine: Machine, parameters: Sequence[Parameter], factors: NDArray[np.float64]
) -> Machine:
    for keys, factor in zip(parameters, factors, strict=True):
        for key in keys:
            table, name = key.split(".")
            old = getattr(getattr(machine, table), name)
            new = _times(old, float(factor))
            inner = dataclasses.replace(getattr(machine, table), **{name: new})
            machine = dataclasses.replace(machine, **{table: inner})
    return machine


def _times(value: float | Curve, factor: float) -> float | Curve:
    if isinstance(value, tuple):
        return tuple((threads, rate * factor) for threads, rate in value)
    return value * factor
