"""Fits a machine's rates to published bar heights.

Reads a CSV with the columns figure, group, series, quantity and value, or with those of
``configs/published/middleware24.csv``, and uses the rows of the models 7B, 8.3B and 10B alone.
Every rate that is fitted has a physical meaning; what the rows do not determine stays as the
starting profile has it and is marked ``assumed`` there. Least squares on logarithms of ratios, by
the simplex method of Nelder and Mead. Run it as
``python -m deep_optimizer_states.predict.fit_profile``.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.predict.machine import Curve, Machine
from deep_optimizer_states.predict.model import load_model
from deep_optimizer_states.predict.predict import predict
from deep_optimizer_states.predict.simplex import nelder_mead
from deep_optimizer_states.predict.workload import Workload

MODELS = ("7B", "8.3B", "10B")
RANKS = 4
COLUMNS = ("figure", "group", "series", "quantity", "value")
"""Of a CSV that names what ran in words."""
FIELD_COLUMNS = ("machine", "model", "engine", "stride", "offload_ratio", "quantity", "value")
"""Of a CSV like ``configs/published/middleware24.csv``, with a column for each setting."""
ENGINES = {"vanilla": "zero3-0.13", "hybrid": "paper"}
"""How such a CSV names engines."""
PROFILES = {"H100": "h100x4", "A100": "a100x4"}
"""And machines."""
SUBGROUP_NUMEL = 100_000_000
"""As the authors' logs of these figures have it."""
_SERIES = re.compile(
    r"(?P<engine>ZeRO-3|default|TwinFlow|DOS|k)\s*(?:k?=?(?P<stride>\d+))?"
    r"(?:\s*ratio(?P<ratio>[\d.]+))?"
)
_TOLERANCE = 0.05
"""Ratios that differ by less count by their square, larger ones by their size: published forwards
differ by twice from run to run."""


class FitError(DeepOptimizerStatesError, ValueError):
    """The CSV cannot be read, or holds no row to fit."""


@dataclass(frozen=True)
class Observation:
    """One published value.

    Attributes:
        workload: What ran.
        quantity: ``forward_s``, ``backward_s``, ``update_s`` or ``iteration_s``.
        value: In seconds.
        label: Its row, in words.
    """

    workload: Workload
    quantity: str
    value: float
    label: str


def read_observations(
    path: Path, machine: str, models: Sequence[str] = MODELS
) -> list[Observation]:
    """The rows of one kind of machine.

    Args:
        path: CSV.
        machine: ``H100`` or ``A100``.
        models: Rows of other models are left out.

    Raises:
        FitError: The file cannot be read, lacks columns, or holds no such row.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(line for line in file if not line.startswith("#"))
            rows, columns = list(reader), reader.fieldnames or ()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FitError(f"{path}: cannot be read: {error}") from None
    observe = _observe
    if missing := [name for name in COLUMNS if name not in columns]:
        if not set(FIELD_COLUMNS) <= set(columns):
            raise FitError(
                f"{path}: columns missing: {', '.join(missing)}; expected {','.join(COLUMNS)} or "
                f"{','.join(FIELD_COLUMNS)}"
            )
        observe = _observe_fields
    try:
        found = [item for row in rows for item in observe(row, machine, models)]
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise FitError(f"{path}: a row cannot be read: {error}") from None
    if not found:
        raise FitError(f"{path}: no row of {', '.join(models)} on {machine}")
    return found


def _observe(row: dict[str, str], machine: str, models: Sequence[str]) -> Iterable[Observation]:
    where = f"{row.get('figure', '')} {row.get('group', '')}"
    model = re.search(r"\d+(?:\.\d+)?B\b", f"{row.get('group', '')} {row.get('figure', '')}")
    series = _SERIES.match(row.get("series", ""))
    if model is None or series is None or model[0] not in models or machine not in where:
        return
    stride = int(series["stride"] or 0)
    workload = Workload(
        load_model(model[0])[0],
        "paper" if stride else "zero3-0.13",
        dp=RANKS,
        stride=stride or 2,
        offload_ratio=float(series["ratio"] or 1.0),
        subgroup_numel=SUBGROUP_NUMEL,
    )
    value, quantity = float(row["value"]), row["quantity"]
    label = f"{model[0]} {row['series']} {quantity}"
    if quantity == "Bparam_per_s":
        # The authors divide the model's nominal size, not its parameters, by the update's time.
        yield Observation(workload, "update_s", float(model[0][:-1]) / value, label)
    elif quantity == "s":
        iterations = re.search(r"(\d+)-iteration", row["figure"])
        if iterations:
            yield Observation(workload, "iteration_s", value / int(iterations[1]), label)
    else:
        names = {"fwd_s": "forward_s", "bwd_s": "backward_s", "update_s": "update_s"}
        if quantity in names:
            yield Observation(workload, names[quantity], value, label)


def _observe_fields(
    row: dict[str, str], machine: str, models: Sequence[str]
) -> Iterable[Observation]:
    """A row with a column for each setting."""
    model, quantity, value = row["model"], row["quantity"], float(row["value"])
    if model not in models or row["machine"] != PROFILES.get(machine):
        return
    if row["engine"] not in ENGINES:
        raise FitError(f"engine '{row['engine']}': known: {', '.join(ENGINES)}")
    stride, ratio = int(row["stride"]), float(row["offload_ratio"])
    workload = Workload(
        load_model(model)[0],
        ENGINES[row["engine"]],
        dp=RANKS,
        stride=stride or 2,
        offload_ratio=ratio,
        subgroup_numel=SUBGROUP_NUMEL,
    )
    label = f"{model} {row['engine']} stride {stride} ratio {ratio:g} {quantity}"
    iterations = re.fullmatch(r"iterations_(\d+)_s", quantity)
    if quantity == "update_rate":
        yield Observation(workload, "update_s", float(model[:-1]) / value, label)
    elif iterations:
        yield Observation(workload, "iteration_s", value / int(iterations[1]), label)
    elif quantity in ("forward_s", "backward_s", "update_s"):
        yield Observation(workload, quantity, value, label)


Parameter = tuple[str, ...]
"""Keys that share a factor, each with its table: ``rates.h2d_bytes_per_s``."""


@dataclass(frozen=True)
class Stage:
    """Parameters that one kind of row determines.

    Attributes:
        parameters: What is fitted.
        quantities: To which quantities ...
        engines: ... of which engines.
    """

    parameters: tuple[Parameter, ...]
    quantities: tuple[str, ...]
    engines: tuple[str, ...] = ("zero3-0.13", "paper")

    def sees(self, item: Observation) -> bool:
        """Whether it is fitted to a row."""
        return item.quantity in self.quantities and item.workload.engine in self.engines


HOST_ADAM = ("rates.host_adam_parameters_per_s",)
BLOCKING = ("rates.pageable_h2d_bytes_per_s",)
LINK = ("rates.h2d_bytes_per_s", "rates.d2h_bytes_per_s")
HOST_STREAM = ("rates.host_stream_bytes_per_s",)
STAGES = {
    "H100": (
        Stage((HOST_ADAM, BLOCKING, LINK), ("update_s",)),
        # The paper's engine hides its gradients behind backward, the baseline adds them to it.
        Stage(
            (("rates.device_flops_per_s",), ("costs.launch_s",)),
            ("backward_s",),
            ("paper",),
        ),
        Stage((("rates.pageable_d2h_bytes_per_s",),), ("backward_s",), ("zero3-0.13",)),
        Stage((("costs.layer_s",),), ("forward_s",), ("zero3-0.13",)),
        Stage((("costs.hybrid_forward_s",),), ("forward_s",), ("paper",)),
        Stage((("costs.iteration_s", "costs.micro_batch_s"),), ("iteration_s",), ("zero3-0.13",)),
        Stage((("costs.hybrid_s",),), ("iteration_s",), ("paper",)),
    ),
    "A100": (Stage((HOST_ADAM, BLOCKING, HOST_STREAM), ("update_s",)),),
}
"""What the rows of each kind of machine determine, in the order it is fitted."""


def fit(
    machine: Machine,
    observations: Sequence[Observation],
    stages: Sequence[Stage],
) -> Machine:
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
        if not seen:
            continue
        start, parameters = machine, stage.parameters

        def loss(
            logs: NDArray[np.float64],
            start: Machine = start,
            parameters: tuple[Parameter, ...] = parameters,
            seen: Sequence[Observation] = seen,
        ) -> float:
            trial = _scale(start, parameters, np.exp(logs))
            return float(sum(_huber(error) for _, error in residuals(trial, seen)))

        logs = nelder_mead(loss, np.zeros(len(parameters)))
        machine = _scale(machine, parameters, np.exp(logs))
    return machine


def residuals(
    machine: Machine, observations: Iterable[Observation]
) -> list[tuple[Observation, float]]:
    """Logarithms of predicted over published."""
    found = []
    for item in observations:
        value = getattr(predict(item.workload, machine), item.quantity)
        found.append((item, math.log(value / item.value)))
    return found


def _huber(error: float) -> float:
    size = abs(error)
    return size * size if size <= _TOLERANCE else _TOLERANCE * (2 * size - _TOLERANCE)


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
