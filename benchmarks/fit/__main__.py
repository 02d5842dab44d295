"""``python -m benchmarks.fit CSV --machine h100x4 [-o FILE]``.

Fits a shipped profile again to a CSV of published values, prints what is left over and how well
each model is predicted from the others alone, and writes the profile.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fit.rates import STAGES, fit, residuals
from benchmarks.fit.rows import COLUMNS, FitError, Observation, read_observations
from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.files import write_whole
from deep_optimizer_states.predict.cli import residual_lines
from deep_optimizer_states.predict.machine import RATE_NAMES, Kind, Machine, load_machine


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, print and write; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fit",
        description="Fit a shipped profile again to published values, and print what is left over.",
    )
    parser.add_argument(
        "csv",
        type=Path,
        help=f"published values, with the columns {','.join(COLUMNS)}",
    )
    parser.add_argument(
        "--machine",
        choices=sorted(STAGES),
        default="h100x4",
        help="the profile to begin with, and whose rows (default: %(default)s)",
    )
    parser.add_argument("-o", "--out", type=Path, help="where to write the profile")
    given = parser.parse_args(argv)
    try:
        start = load_machine(given.machine)
        observations = read_observations(given.csv, given.machine)
        machine = refit(start, observations)
        if given.out is not None:
            if given.out.exists():
                raise FitError(f"{given.out} is there already; give another name")
            write_whole(given.out, profile_text(machine))
    except (DeepOptimizerStatesError, OSError) as error:
        sys.stderr.write(f"benchmarks.fit: {error}\n")
        return 2
    sys.stdout.write(report(machine, observations) + "\n")
    return 0


def refit(start: Machine, observations: Sequence[Observation]) -> Machine:
    """The machine fitted to ``observations``, with its residuals and kinds."""
    machine = fit(start, observations, STAGES[start.name])
    fitted = {key for stage in STAGES[start.name] for keys in stage.parameters for key in keys}
    kinds: dict[str, Kind] = {
        name: "fitted" if f"rates.{name}" in fitted else "assumed"
        for name in RATE_NAMES
        if getattr(machine.rates, name) is not None
    }
    errors = [error for _, error in residuals(machine, observations)]
    median, worst = summary(errors)
    found: dict[str, Any] = {"rows": len(errors), "median": median, "worst": worst}
    quantities = dict.fromkeys(item.quantity for item in observations)
    for quantity in quantities:
        some = [e for item, e in residuals(machine, observations) if item.quantity == quantity]
        found[quantity] = list(summary(some))
    left_out = leave_one_out(start, observations)
    if left_out:
        found["left_out"] = {model: list(pair) for model, pair in left_out.items()}
    return dataclasses.replace(machine, kinds=kinds, residuals=found)


def leave_one_out(
    start: Machine, observations: Sequence[Observation]
) -> dict[str, tuple[float, float]]:
    """Median and worst error of each model, predicted from a fit to the others alone."""
    models = dict.fromkeys(item.workload.model.name for item in observations)
    found = {}
    for model in models if len(models) > 1 else ():
        others = [item for item in observations if item.workload.model.name != model]
        own = [item for item in observations if item.workload.model.name == model]
        machine = fit(start, others, STAGES[start.name])
        found[model] = summary([error for _, error in residuals(machine, own)])
    return found


def summary(errors: Sequence[float]) -> tuple[float, float]:
    """Median and worst of ``|predicted / published - 1|``."""
    sizes = [abs(math.exp(error) - 1) for error in errors]
    return round(statistics.median(sizes), 4), round(max(sizes), 4)


def report(machine: Machine, observations: Sequence[Observation]) -> str:
    """Every row, and the summaries, as text."""
    lines = [f"{'row':42s} {'published':>10s} {'predicted':>10s}   error"]
    for item, error in residuals(machine, observations):
        predicted = item.value * math.exp(error)
        lines.append(
            f"{item.label:42s} {item.value:9.3f}s {predicted:9.3f}s {math.exp(error) - 1:+7.1%}"
        )
    return "\n".join([*lines, "", *residual_lines(machine.residuals)])


def profile_text(machine: Machine) -> str:
    """A profile as TOML."""
    fields = {item.name: getattr(machine, item.name) for item in dataclasses.fields(machine)}
    tables = {name: vars(fields.pop(name)) for name in ("rates", "costs")}
    tables |= {name: fields.pop(name) for name in ("kinds", "residuals")}
    inner = {key: value for key, value in tables["residuals"].items() if isinstance(value, dict)}
    tables |= {f"residuals.{key}": value for key, value in inner.items()}
    lines = _pairs(fields)
    for name, values in tables.items():
        lines += ["", f"[{name}]", *_pairs(values)] if _pairs(values) else []
    return "\n".join(lines) + "\n"


def _pairs(values: Mapping[str, Any]) -> list[str]:
    """Lines of a table; what is not known, or a table of its own is left out."""
    return [
        f"{json.dumps(key) if '.' in key else key} = {_value(value)}"
        for key, value in values.items()
        if value is not None and not isinstance(value, dict)
    ]


def _value(value: Any) -> str:  # noqa: ANN401 - a number, text, or a list of them
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    sys.exit(main())
