"""What a study argues with: its columns of ``runs.csv``, a row a point, as reports open with them.

``study.toml`` says which columns these are, in which unit and which way is better; a sweep may name
others of them. What others published stands below, in rows of its own. A point that has none of a
column has an empty cell, and where the runs, or a prediction, say why, so does the table.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from configs.cli import COLUMNS
from configs.errors import ConfigError
from configs.published import published_of, published_runs, read_published
from configs.sources import MEASURED, PUBLISHED, SIMULATED
from configs.study import Result, Study
from parse.compare import PointComparison
from parse.records import as_number, as_table, finite
from parse.run import PointRuns, Run
from parse.stats import spread
from parse.tables import SPEEDUP, run_row
from parse.verdict import ON_CPU

NOT_PREDICTED = "not predicted: a prediction is of an iteration's times and of peaks of memory"
NOT_MEASURED = "in none of these runs"
MARKS = {MEASURED: "", SIMULATED: " sim.", PUBLISHED: " publ."}
"""What stands behind a number that was not measured here."""
_MEDIAN = "_median_ms"
_SPEEDS = ("ms", "s", "samples/s", "x", "TFLOP/s")
"""Units of what a processor tells nothing about a GPU by."""
_LEAST_WIDTH, _MOST_WIDTH, _LABEL_WIDTH, _MOST_ROWS = 11, 20, 34, 20


class Cell(NamedTuple):
    """A column's value for a point: the mean over its runs, of times the median."""

    value: float
    least: float
    """Of the runs; with ``most`` the value itself where there is one run, and of times."""
    most: float
    source: str = MEASURED

    @property
    def text(self) -> str:
        """``0.781 (0.772 to 0.789)``; ``650 sim.`` and ``650 publ.`` of what was not measured."""
        several = f" ({_digits(self.least)} to {_digits(self.most)})"
        several = "" if self.least == self.most else several
        return f"{_digits(self.value)}{several}{MARKS[self.source]}"


class ResultRow(NamedTuple):
    """A point, or what others published of a run."""

    label: str
    source: str
    """``measured``, ``simulated`` or ``published``."""
    runs: int
    """How many its cells are of: those that finished."""
    cells: list[Cell | None]
    lost: str = ""
    """How those ended that did not finish, as ``1 oom-device``."""


@dataclass(frozen=True)
class Results:
    """The table that a report opens with."""

    columns: dict[str, Result]
    """By their names in ``runs.csv``; those of which some point has a value."""
    rows: list[ResultRow]
    absent: dict[str, list[str]]
    """Why a column is empty, to the titles of those that are."""
    answer: str
    """The study's question and what these runs say to it; empty where it asks none."""
    notes: list[str]
    """Where published values come from."""

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
        return {"columns": columns, "rows": rows, "absent": self.absent, "answer": self.answer}

    def lines(self) -> list[str]:
        """Return table and answer for a terminal of 100 columns, in as many parts as that takes."""
        names, shown = list(self.columns), self.rows[:_MOST_ROWS]
        # A name too long for one line goes on below: cut, names of neighbours would be the same.
        labels = [
            textwrap.wrap(row.label, _LABEL_WIDTH, subsequent_indent="  ") or [""] for row in shown
        ]
        first = max((len(line) for label in labels for line in label), default=0)
        texts = [[cell.text if cell else row.lost for cell in row.cells] for row in shown]
        found = []
        for part in _parts([[row[n] for row in texts] for n in range(len(names))], COLUMNS - first):
            least = [max(_LEAST_WIDTH, *(len(row[n]) for row in texts)) for n in part]
            spare = (COLUMNS - first - 2 * len(part) - sum(least)) // len(part)
            widths = [max(width, min(width + spare, _MOST_WIDTH)) for width in least]
            heads = [
                textwrap.wrap(_heading(self.columns[names[n]]), width)
                for n, width in zip(part, widths, strict=True)
            ]
            height = max(map(len, heads))
            heads = [[*[""] * (height - len(head)), *head] for head in heads]
            found += [_line("", cells, first, widths) for cells in zip(*heads, strict=True)]
            for label, row in zip(labels, texts, strict=True):
                found.append(_line(label[0], [row[n] for n in part], first, widths))
                found += label[1:]
        if len(self.rows) > _MOST_ROWS:
            found.append(f"... and {len(self.rows) - _MOST_ROWS} more in the report")
        texts_below = [self.answer, *self.notes]
        return [*found, *(line for text in texts_below for line in textwrap.wrap(text, COLUMNS))]


def _heading(column: Result) -> str:
    better = {"lower": "less is better", "higher": "more is better", "": ""}[column.better]
    return ", ".join(filter(None, (column.title, column.unit, better)))


def _parts(columns: Sequence[Sequence[str]], room: int) -> Iterator[list[int]]:
    """Yield the places of columns that fit beside each other."""
    part: list[int] = []
    taken = 0
    for number, cells in enumerate(columns):
        width = 2 + max(_LEAST_WIDTH, *map(len, cells))
        if part and taken + width > room:
            yield part
            part, taken = [], 0
        part.append(number)
        taken += width
    if part:
        yield part


def _line(label: str, cells: Sequence[str], first: int, widths: Sequence[int]) -> str:
    texts = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"{label:<{first}}  {'  '.join(texts)}".rstrip()


def results_of(
    points: Sequence[PointRuns],
    asked: Sequence[str],
    warmup: int,
    comparisons: Sequence[PointComparison] = (),
) -> Results:
    """Make the table of a sweep's points.

    Args:
        points: All of one study.
        asked: Columns that the sweep names; none for the study's own.
        warmup: First iterations left out of times.
        comparisons: The points against the reference, for speed-ups and for the answer.
    """
    study = points[0].study
    names = [name for name in asked if name in study.results]
    names = names or [name for name, row in study.results.items() if row.better]
    compared = {id(item.ours.runs[0]): item for item in comparisons}
    rows = [
        ResultRow(
            point.label,
            point.runs[0].source,
            len(_counted(point)),
            [_cell(point, name, warmup, compared.get(id(point.runs[0]))) for name in names],
            _lost(point),
        )
        for point in points
    ]
    shown = [n for n in range(len(names)) if any(row.cells[n] for row in rows)]
    rows += _published_rows(points, names)
    rows = [row._replace(cells=[row.cells[n] for n in shown]) for row in rows]
    rows = [row for row in rows if row.source != PUBLISHED or any(row.cells)]
    missing = [name for n, name in enumerate(names) if n not in shown]
    absent: dict[str, list[str]] = {}
    for name, text in _why_absent(points, missing, asked, comparisons):
        absent.setdefault(text, []).append(study.results[name].title)
    columns = {names[n]: study.results[names[n]] for n in shown}
    notes = []
    if study.published and any(row.source == PUBLISHED for row in rows):
        notes.append(f"publ.: {study.published.source}; not measured here")
    return Results(columns, rows, absent, _answer(study, comparisons, warmup), notes)


def _why_absent(
    points: Sequence[PointRuns],
    missing: Sequence[str],
    asked: Sequence[str],
    comparisons: Sequence[PointComparison],
) -> Iterator[tuple[str, str]]:
    """Yield the columns that are empty and worth a word, and why they are."""
    gone = NOT_MEASURED if any(p.runs[0].source == MEASURED for p in points) else NOT_PREDICTED
    reasons = dict(_reasons(points, points[0].study))
    for name in missing:
        if name == SPEEDUP and comparisons:
            yield name, _usual([item.withheld for item in comparisons])
        elif name in reasons:
            yield name, reasons[name]
        elif name in asked:  # what a study has for some of its sweeps is missed in no other
            yield name, gone


def _reasons(points: Sequence[PointRuns], study: Study) -> Iterator[tuple[str, str]]:
    """What runs say of results that they do not have: ``reasons`` of the end of their metrics."""
    for run in (run for point in points for run in point.runs):
        end = run.log.metrics.end if run.log.metrics else {}
        for name, text in as_table(end.get("reasons")).items():
            if name in study.results:
                yield name, str(text)


def _published_rows(points: Sequence[PointRuns], names: Sequence[str]) -> Iterator[ResultRow]:
    """Yield a row for each whole run that was published, and for each point that was."""
    study = points[0].study
    values: dict[str, dict[str, float]] = {}
    for name, by_label in published_runs(study).items():
        for label, value in by_label.items():
            values.setdefault(label, {})[name] = value
    for label, found in _published_points(points, study):
        values[label] = found
    for label, found in values.items():
        known = [found.get(name) for name in names]
        cells = [None if value is None else Cell(value, value, value, PUBLISHED) for value in known]
        yield ResultRow(f"{label}, published", PUBLISHED, 0, cells)


def _published_points(
    points: Sequence[PointRuns], study: Study
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield what was published of points that were measured here; predictions have it with them."""
    every = read_published(study)
    for point in points if every else ():
        run = point.runs[0]
        if run.source != MEASURED or not run.point:
            continue
        try:
            same = [study.make_point(run.point).model_copy(update={"name": point.label})]
        except ConfigError:  # of another release of the schema
            continue
        for machine in dict.fromkeys(value.machine for value in every):
            found = published_of(same, "", machine, every).get(point.label, {})
            times = {name.replace("_ms", _MEDIAN): ms for name, ms in found.items()}
            numbers = {name: ms for name, ms in times.items() if isinstance(ms, float)}
            if numbers:
                yield f"{point.label} on {machine}", numbers


def _counted(point: PointRuns) -> list[Run]:
    # A prediction of what does not fit has no time, and says what memory it would take.
    return point.runs if point.runs[0].source == SIMULATED else point.finished


def _lost(point: PointRuns) -> str:
    words = Counter(run.status or "no end" for run in point.runs if not run.finished)
    return ", ".join(f"{n} {word}" for word, n in words.items())


def _cell(
    point: PointRuns, name: str, warmup: int, comparison: PointComparison | None
) -> Cell | None:
    source = point.runs[0].source
    if name == SPEEDUP:
        ratio = comparison and comparison.ratios["iteration"]
        if comparison is None or not ratio or (comparison.withheld and source == MEASURED):
            return None
        return Cell(ratio.ratio, ratio.ratio, ratio.ratio, source)
    phase = name.removesuffix(_MEDIAN)
    if name.endswith(_MEDIAN) and phase in ("iteration", *point.study.phases):
        found = spread(point.times_ms(phase, warmup))
        middle = found.median_ms if found else 0.0
        return Cell(middle, middle, middle, source) if found else None
    values = finite([as_number(run_row(run, warmup).get(name)) for run in _counted(point)])
    return Cell(fmean(values), min(values), max(values), source) if values else None


def _digits(value: float) -> str:
    """Return four digits, or all before the point."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


# The answer


def _answer(study: Study, comparisons: Sequence[PointComparison], warmup: int) -> str:
    """Return the question with what the runs say to it, or with why they say nothing."""
    question = study.question
    if question is None:
        return ""
    source = comparisons[0].ours.runs[0].source if comparisons else MEASURED
    best, why = [], dict[str, list[str]]()
    for name in question.by:
        column = study.results[name]
        said, reason = _best(name, column, comparisons, warmup)
        if said:
            best.append(f"{column.title}: {said}")
        else:
            why.setdefault(reason, []).append(column.title)
    gaps = [f"{', '.join(titles)}: {reason}" for reason, titles in why.items()]
    if not best:
        return (
            f"{question.text} These runs do not answer it. {_sentence(gaps)}{_valid(comparisons)}"
        )
    rest = f" Not answered by these runs: {_sentence(gaps)}" if gaps else ""
    kind = "Predicted, not measured: " if source == SIMULATED else ""
    return f"{question.text} {kind}{_sentence(best)}{rest}{_valid(comparisons)}"


def _best(
    name: str, column: Result, comparisons: Sequence[PointComparison], warmup: int
) -> tuple[str, str]:
    """The point that is best by a column, beside its reference; else why none is known."""
    found, reasons = [], []
    is_speed = column.unit in _SPEEDS
    for item in comparisons:
        source = item.ours.runs[0].source
        ours, theirs = (
            point and _cell(point, name, warmup, item) for point in (item.ours, item.reference)
        )
        if is_speed and item.withheld and source == MEASURED:
            reasons.append(item.withheld)
        elif not (ours and theirs and ours.value > 0 and theirs.value > 0):
            reasons.append(NOT_MEASURED if source == MEASURED else NOT_PREDICTED)
        else:
            gain = ours.value / theirs.value
            found.append((gain if column.better == "higher" else 1 / gain, item, ours, theirs))
    if not found:
        return "", _usual(reasons) if reasons else "nothing is compared with the reference"
    gain, item, ours, theirs = max(found, key=lambda one: one[0])
    assert item.reference
    unit = f" {column.unit}" if column.unit else ""
    # What has no unit, or is a logarithm, is told apart by its difference.
    is_ratio = bool(column.unit) and column.unit != "nats"
    by = f"{gain:.2f}x" if is_ratio else f"{ours.value - theirs.value:+.3g}"
    none = "" if gain > 1 else "nothing better than the reference; nearest "
    return (
        f"{none}{item.ours.label} {_digits(ours.value)}{unit} against {_digits(theirs.value)}{unit}"
        f" of {item.reference.label} ({by})",
        "",
    )


def _valid(comparisons: Sequence[PointComparison]) -> str:
    """How many of the points the gate lets pass."""
    measured = [item for item in comparisons if item.ours.runs[0].source == MEASURED]
    if not measured:
        return ""
    holding = sum(all(finding.holds for finding in item.findings) for item in measured)
    words, name = measured[0].ours.study.gate.words, measured[0].ours.study.reference
    return f" {holding} of {len(measured)} points beside {name} pass the gate ({words})."


def _sentence(parts: Iterable[str]) -> str:
    return f"{'; '.join(parts)}."


def _usual(reasons: Sequence[str]) -> str:
    """The reason that most have, in short."""
    reason = Counter(reasons).most_common(1)[0][0]
    if ON_CPU in reason.split("; "):
        return f"{ON_CPU}, which tells nothing about a GPU"
    return reason if len(reason) <= 160 else f"{reason[:157]}..."
