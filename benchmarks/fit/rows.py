"""Published values as what the performance model predicts.

Reads a CSV with the columns figure, group, series, quantity and value, or with those of
``FIELD_COLUMNS``, and of it the rows of the models 7B, 8.3B and 10B alone.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.predict.model import load_model
from deep_optimizer_states.predict.workload import Workload
from launch.simulate.paper_software import BASELINE, HYBRID

MODELS = ("7B", "8.3B", "10B")
RANKS = 4
COLUMNS = ("figure", "group", "series", "quantity", "value")
"""Of a CSV that names what ran in words."""
FIELD_COLUMNS = ("machine", "model", "stride", "offload_ratio", "quantity", "value")
"""Of a CSV with a column for each setting, as the harness keeps published values; other columns are
not read."""
PROFILES = {"H100": "h100x4", "A100": "a100x4"}
"""And machines."""
SUBGROUP_NUMEL = 100_000_000
"""As the authors' logs of these figures have it."""
_SERIES = re.compile(
    r"(?P<engine>ZeRO-3|default|TwinFlow|DOS|k)\s*(?:k?=?(?P<stride>\d+))?"
    r"(?:\s*ratio(?P<ratio>[\d.]+))?"
)


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
    workload = _workload(model[0], int(series["stride"] or 0), float(series["ratio"] or 1.0))
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
    stride, ratio = int(row["stride"]), float(row["offload_ratio"])
    workload = _workload(model, stride, ratio)
    label = f"{model} stride {stride} ratio {ratio:g} {quantity}"
    iterations = re.fullmatch(r"iterations_(\d+)_s", quantity)
    if quantity == "update_rate":
        yield Observation(workload, "update_s", float(model[:-1]) / value, label)
    elif iterations:
        yield Observation(workload, "iteration_s", value / int(iterations[1]), label)
    elif quantity in ("forward_s", "backward_s", "update_s"):
        yield Observation(workload, quantity, value, label)


def _workload(model: str, stride: int, ratio: float) -> Workload:
    """A published run: without a stride that of the baseline, with one that of the hybrid."""
    return Workload(
        load_model(model)[0],
        HYBRID if stride else BASELINE,
        dp=RANKS,
        stride=stride or 2,
        offload_ratio=ratio,
        subgroup_numel=SUBGROUP_NUMEL,
    )
