"""What a study argues with: its columns of ``runs.csv``, a row a point, as reports open with them.

``study.toml`` says which columns these are, in which unit and which way is better; a sweep may name
others of them. A point that has none of a column has an empty cell, and where the runs, or a
prediction, say why, so does the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from configs.study import Result, Study
from parse.records import as_number, as_table, finite
from parse.run import MEASURED, SIMULATED, PointRuns, Run
from parse.stats import spread
from parse.tables import run_row

NOT_PREDICTED = "not predicted: a prediction is of an iteration's times and of peaks of memory"
NOT_MEASURED = "in none of these runs"
_MEDIAN = "_median_ms"


class Cell(NamedTuple):
    """A column's value for a point: the mean over its runs, of times the median."""

    value: float
    least: float
    """Of the runs; with ``most`` the value itself where there is one run, and of times."""
    most: float

    @property
    def text(self) -> str:
        """``0.781 (0.772 to 0.789)``."""
        if self.least == self.most:
            return _digits(self.value)
        return f"{_digits(self.value)} ({_digits(self.least)} to {_digits(self.most)})"


class ResultRow(NamedTuple):
    """A point."""

    label: str
    source: str
    """``measured``, ``simulated`` or ``published``."""
    runs: int
    """How many its cells are of: those that finished."""
    cells: list[Cell | None]


@dataclass(frozen=True)
class Results:
    """The table that a report opens with."""

    columns: dict[str, Result]
    """By their names in ``runs.csv``; those of which some point has a value."""
    rows: list[ResultRow]
    absent: dict[str, list[str]]
    """Why a column is empty, to the titles of those that are."""

    def as_table(self) -> dict[str, Any]:
        """Return the same as ``findings.json`` has it."""
        columns = {name: row.model_dump() for name, row in self.columns.items()}
        rows = [
            {
                "label": row.label,
                "source": row.source,
                "runs": row.runs,
                "values": [cell and cell.value for cell in row.cells],
            }
            for row in self.rows
        ]
        return {"columns": columns, "rows": rows, "absent": self.absent}


def results_of(points: Sequence[PointRuns], asked: Sequence[str], warmup: int) -> Results:
    """Make the table of a sweep's points.

    Args:
        points: All of one study.
        asked: Columns that the sweep names; none for the study's own.
        warmup: First iterations left out of times.
    """
    study = points[0].study
    names = [name for name in asked if name in study.results]
    names = names or [name for name, row in study.results.items() if row.better]
    cells = {name: [_cell(point, name, warmup) for point in points] for name in names}
    shown = [name for name in names if any(cells[name])]
    rows = [
        ResultRow(
            point.label,
            point.runs[0].source,
            len(_counted(point)),
            [cells[name][number] for name in shown],
        )
        for number, point in enumerate(points)
    ]
    reasons = dict(_reasons(points, study))
    gone = NOT_MEASURED if any(p.runs[0].source == MEASURED for p in points) else NOT_PREDICTED
    # What a study has for some of its sweeps is missed in none of the others.
    missed = {name: gone for name in names if name in asked and name not in shown}
    absent: dict[str, list[str]] = {}
    for name, text in {**missed, **reasons}.items():
        if name in names:
            absent.setdefault(text, []).append(study.results[name].title)
    return Results({name: study.results[name] for name in shown}, rows, absent)


def _reasons(points: Sequence[PointRuns], study: Study) -> Iterator[tuple[str, str]]:
    """What runs say of results that they do not have: ``reasons`` of the end of their metrics."""
    for run in (run for point in points for run in point.runs):
        end = run.log.metrics.end if run.log.metrics else {}
        for name, text in as_table(end.get("reasons")).items():
            if name in study.results:
                yield name, str(text)


def _counted(point: PointRuns) -> list[Run]:
    # A prediction of what does not fit has no time, and says what memory it would take.
    return point.runs if point.runs[0].source == SIMULATED else point.finished


def _cell(point: PointRuns, name: str, warmup: int) -> Cell | None:
    phase = name.removesuffix(_MEDIAN)
    if name.endswith(_MEDIAN) and phase in ("iteration", *point.study.phases):
        found = spread(point.times_ms(phase, warmup))
        return Cell(found.median_ms, found.median_ms, found.median_ms) if found else None
    values = finite([as_number(run_row(run, warmup).get(name)) for run in _counted(point)])
    return Cell(fmean(values), min(values), max(values)) if values else None


def _digits(value: float) -> str:
    """Return four digits, or all before the point."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
