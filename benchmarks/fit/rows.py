"""Published values as what the performance model predicts, read from a CSV.

Of its rows those of one machine and of the models 7B, 8.3B and 10B count. Lines that begin with #
are comments.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.predict.model import load_model
from deep_optimizer_states.predict.workload import Workload
from launch.simulate.workloads import paper_software

MODELS = ("7B", "8.3B", "10B")
RANKS = 4
COLUMNS = ("machine", "model", "stride", "offload_ratio", "quantity", "value")
"""Others are not read. Without a stride a row is of the baseline, with one of the hybrid update."""
SUBGROUP_NUMEL = 100_000_000
"""As the authors' logs of these figures have it."""


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
    """The rows of one machine.

    Args:
        path: CSV.
        machine: Name of its profile.
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
    if missing := [name for name in COLUMNS if name not in columns]:
        raise FitError(
            f"{path}: columns missing: {', '.join(missing)}; expected {','.join(COLUMNS)}"
        )
    try:
        own = [row for row in rows if row["machine"] == machine and row["model"] in models]
        found = [item for row in own if (item := _observe(row))]
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise FitError(f"{path}: a row cannot be read: {error}") from None
    if not found:
        raise FitError(f"{path}: no row of {', '.join(models)} on {machine}")
    return found


def _observe(row: Mapping[str, str]) -> Observation | None:
    """What a row says; None for a quantity that is not predicted."""
    model, quantity, value = row["model"], row["quantity"], float(row["value"])
    stride, ratio = int(row["stride"]), float(row["offload_ratio"])
    workload = Workload(
        load_model(model)[0],
        paper_software()["stride" if stride else ""],
        dp=RANKS,
        stride=stride or 2,
        offload_ratio=ratio,
        subgroup_numel=SUBGROUP_NUMEL,
    )
    label = f"{model} stride {stride} ratio {ratio:g} {quantity}"
    if quantity == "update_rate":
        # The authors divide the model's nominal size, not its parameters, by the update's time.
        return Observation(workload, "update_s", float(model[:-1]) / value, label)
    if iterations := re.fullmatch(r"iterations_(\d+)_s", quantity):
        return Observation(workload, "iteration_s", value / int(iterations[1]), label)
    if quantity in ("forward_s", "backward_s", "update_s"):
        return Observation(workload, quantity, value, label)
    return None
