"""Fit a shipped profile again to published values: ``python -m benchmarks.fit [-o FILE]``.

It prints what the fit leaves over, and writes the profile. Every fitted rate has a physical
meaning. What the rows do not determine stays as the starting profile has it, and is marked
``assumed``. The fit is one of least squares on the logarithms of predicted over published.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.cli import Parser, run_command, say
from configs.published import read_published
from configs.study import default_study
from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.predict.cli import residual_lines
from deep_optimizer_states.predict.machine import (
    Curve,
    Kind,
    Machine,
    load_machine,
    profile_text,
)
from deep_optimizer_states.predict.model import load_model
from deep_optimizer_states.predict.predict import predict
from deep_optimizer_states.predict.workload import StockOffload, Workload
from deep_optimizer_states.toml_io import write_whole
from launch.simulate.workloads import paper_software

BASELINE, HYBRID = paper_software()[""], paper_software()["stride"]
MODELS = ("7B", "8.3B", "10B")
RANKS = 4
SUBGROUP_NUMEL = 100_000_000
"""As the authors' logs of these figures have it."""
TOLERANCE = 0.05
"""Errors below it count by their square, larger ones by their size: published forwards differ by a
factor of two between runs of the same model."""


@dataclass(frozen=True)
class Observation:
    """One published value, in seconds, of a quantity that is predicted."""

    workload: Workload
    quantity: str  # forward_s, backward_s, update_s or iteration_s
    value: float
    label: str


@dataclass(frozen=True)
class Stage:
    """Parameters of a profile, and the rows that determine them.

    Keys of a profile that share one factor form a parameter.
    """

    parameters: tuple[tuple[str, ...], ...]
    quantity: str
    software: tuple[StockOffload, ...] = (BASELINE, HYBRID)

    def sees(self, item: Observation) -> bool:
        """Return whether the parameters are fitted to this row."""
        return item.quantity == self.quantity and item.workload.software in self.software


HOST_ADAM = ("rates.host_adam_parameters_per_s",)
BLOCKING = ("rates.pageable_h2d_bytes_per_s",)
LINK = ("rates.h2d_bytes_per_s", "rates.d2h_bytes_per_s")
HOST_STREAM = ("rates.host_stream_bytes_per_s",)
STAGES = {
    "h100x4": (
        Stage((HOST_ADAM, BLOCKING, LINK), "update_s"),
        # The hybrid update hides its gradients behind backward, the baseline adds them to it.
        Stage((("rates.device_flops_per_s",), ("costs.launch_s",)), "backward_s", (HYBRID,)),
        Stage((("rates.pageable_d2h_bytes_per_s",),), "backward_s", (BASELINE,)),
        Stage((("costs.layer_s",),), "forward_s", (BASELINE,)),
        Stage((("costs.iteration_s", "costs.micro_batch_s"),), "iteration_s", (BASELINE,)),
    ),
    "a100x4": (Stage((HOST_ADAM, BLOCKING, HOST_STREAM), "update_s"),),
}
"""Rates that the rows of each machine determine, in the order in which they are fitted."""


def observations_of(machine: str) -> list[Observation]:
    """Return the published values of one machine, of the models that profiles are fitted to."""
    found = []
    for value in read_published(default_study()):
        model, stride = str(value.fields["model"]), int(value.fields["stride"])
        if value.machine != machine or model not in MODELS:
            continue
        workload = Workload(
            load_model(model)[0],
            HYBRID if stride else BASELINE,
            dp=RANKS,
            stride=stride or 2,
            offload_ratio=value.fields["offload_ratio"],
            subgroup_numel=SUBGROUP_NUMEL,
        )
        label = f"{model} stride {stride} ratio {workload.offload_ratio:g} {value.quantity}"
        quantity, seconds = value.column().replace("_ms", "_s"), value.milliseconds(model) / 1000
        found.append(Observation(workload, quantity, seconds, label))
    return found


def fit(machine: Machine, observations: Sequence[Observation], stages: Sequence[Stage]) -> Machine:
    """Fit rates stage by stage, each to the rows that depend on them.

    Args:
        machine: Where to start, and what is not fitted.
        observations: Published values.
        stages: One after the other.
    """
    for stage in stages:
        seen = [item for item in observations if stage.sees(item)]
        if seen:
            machine = _fit_stage(machine, seen, stage)
    return machine


def _fit_stage(start: Machine, seen: Sequence[Observation], stage: Stage) -> Machine:
    from scipy.optimize import least_squares  # a second, which whoever only predicts need not wait

    def errors(logs: NDArray[np.float64]) -> list[float]:
        return [error for _, error in residuals(_scaled(start, stage, np.exp(logs)), seen)]

    # A prediction has kinks, where another resource begins to bind: steps must be wide enough.
    begin = np.zeros(len(stage.parameters))
    found = least_squares(errors, begin, loss="huber", f_scale=TOLERANCE, diff_step=1e-3)
    return _scaled(start, stage, np.exp(found.x))


def residuals(
    machine: Machine, observations: Iterable[Observation]
) -> list[tuple[Observation, float]]:
    """Return each row with the logarithm of predicted over published."""
    return [
        (item, math.log(getattr(predict(item.workload, machine), item.quantity) / item.value))
        for item in observations
    ]


def _scaled(machine: Machine, stage: Stage, factors: NDArray[np.float64]) -> Machine:
    for keys, factor in zip(stage.parameters, factors, strict=True):
        for key in keys:
            table, name = key.split(".")
            values = getattr(machine, table)
            new = _times(getattr(values, name), float(factor))
            inner = dataclasses.replace(values, **{name: new})
            machine = dataclasses.replace(machine, **{table: inner})
    return machine


def _times(value: float | Curve, factor: float) -> float | Curve:
    if isinstance(value, tuple):
        return tuple((threads, rate * factor) for threads, rate in value)
    return value * factor


def refit(start: Machine, observations: Sequence[Observation]) -> Machine:
    """Return the machine fitted to published values, with its residuals and kinds of rates."""
    machine = fit(start, observations, STAGES[start.name])
    fitted = {key for stage in STAGES[start.name] for keys in stage.parameters for key in keys}
    kinds: dict[str, Kind] = {
        name: "fitted" if {f"rates.{name}", f"costs.{name}"} & fitted else "assumed"
        for name in machine.known
    }
    errors = residuals(machine, observations)
    median, worst = summary([error for _, error in errors])
    found: dict[str, Any] = {"rows": len(errors), "median": median, "worst": worst}
    for quantity in dict.fromkeys(item.quantity for item in observations):
        found[quantity] = list(summary([e for item, e in errors if item.quantity == quantity]))
    return dataclasses.replace(machine, kinds=kinds, residuals=found)


def summary(errors: Sequence[float]) -> tuple[float, float]:
    """Return median and worst of ``|predicted / published - 1|``."""
    sizes = [abs(math.exp(error) - 1) for error in errors]
    return round(statistics.median(sizes), 4), round(max(sizes), 4)


def report(machine: Machine, observations: Sequence[Observation]) -> str:
    """Return every row and the summaries as text."""
    lines = [f"{'row':42s} {'published':>10s} {'predicted':>10s}   error"]
    for item, error in residuals(machine, observations):
        predicted = item.value * math.exp(error)
        lines.append(
            f"{item.label:42s} {item.value:9.3f}s {predicted:9.3f}s {math.exp(error) - 1:+7.1%}"
        )
    return "\n".join([*lines, "", *residual_lines(machine.residuals)])


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, print and write; returns the exit status."""
    text = "Fit a shipped profile again to published values, and print what is left over."
    parser = Parser("python -m benchmarks.fit", text)
    machine_help = "the profile to begin with, and whose rows (default: %(default)s)"
    parser.add_argument("--machine", choices=sorted(STAGES), default="h100x4", help=machine_help)
    parser.add_argument("-o", "--out", type=Path, help="where to write the profile")
    given = parser.read(argv)
    observations = observations_of(given.machine)
    machine = refit(load_machine(given.machine), observations)
    if given.out is not None:
        write_whole(given.out, profile_text(dataclasses.asdict(machine)))
    say(report(machine, observations))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main, DeepOptimizerStatesError))
