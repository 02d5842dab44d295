"""What the report of a simulated sweep shows: predictions, beside published values where known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from configs.files import read_json
from configs.naming import Namer
from parse.compare.comparisons import PointComparison, timed_phases
from parse.compare.stats import Ratio
from parse.report.context import study_words
from parse.run_folder import Run
from parse.unmeasured import PUBLISHED, SIMULATED

_GIB = 1024**3
_NOT_SHOWN = ("iterations", "seed", "data_prefix")
"""Fields that no prediction depends on."""


def simulated_context(
    index: Mapping[str, Any], runs: Sequence[Run], comparisons: Sequence[PointComparison]
) -> dict[str, Any]:
    """Collect what the templates ``simulated`` show, figures aside.

    Args:
        index: The object of ``sweep.json``.
        runs: Simulated and published ones, labelled.
        comparisons: Points with the reference engine's points, predicted ones alone.
    """
    about = index.get(SIMULATED)
    about = about if isinstance(about, dict) else {}
    ratios = {id(item.ours.runs[0]): item.ratio("iteration") for item in comparisons}
    simulated = [run for run in runs if run.source == SIMULATED]
    beside = _beside(simulated, [run for run in runs if run.source == PUBLISHED])
    phases = timed_phases(runs[0].study)
    return {
        "study": study_words(runs[0].study),
        "machine": str(about.get("machine") or "an unknown machine"),
        "about": [*_about_rows(about), *_shared_rows(simulated)],
        "phases": phases,
        "points": [_point_row(run, phases, ratios.get(id(run))) for run in simulated],
        "beside": beside,
        "deviation": _deviation(beside, phases),
        "is_fitted": "fitted" in _kinds(about).values(),
    }


def _about_rows(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Machine and software, which rates were not measured, what a fit left over."""
    rows = [
        ("machine", str(about.get("machine") or "")),
        ("rates", str(about.get("machine_source") or "")),
        ("software", str(about.get("software") or "")),
    ]
    for kind in ("fitted", "assumed"):
        names = [name for name, own in _kinds(about).items() if own == kind]
        rows.append((f"{kind} rates", ", ".join(names)))
    fit = about.get("residuals")
    if isinstance(fit, dict) and {"rows", "median", "worst"} <= fit.keys():
        errors = f"{fit['median']:.1%} in the median, {fit['worst']:.1%} at worst"
        rows.append(("fit", f"{fit['rows']} rows off by {errors}"))
    return [(name, text) for name, text in rows if text]


def _kinds(about: Mapping[str, Any]) -> dict[str, Any]:
    kinds = about.get("kinds")
    return kinds if isinstance(kinds, dict) else {}


def _shared_rows(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Settings that all points share; what differs is in their names."""
    if not runs:
        return []
    study = runs[0].study
    rows = study.all_fields.items()
    names = [n for n, row in rows if not row.only_some_engines and n not in _NOT_SHOWN]
    found = {name: {run.settings.get(name) for run in runs} for name in names}
    namer = Namer(study)
    same = [
        namer.setting(name, value)
        for name, values in found.items()
        if len(values) == 1
        and (value := next(iter(values))) is not None
        and (value or not study.all_fields[name].zero)
    ]
    return [("all points", ", ".join(same))] if same else []


def _point_row(run: Run, phases: Sequence[str], ratio: Ratio | None) -> dict[str, Any]:
    values = read_json(run.log.path)
    return {
        "label": run.label,
        "times": [_text(_ms(run, phase)) for phase in phases],
        "bound": _text(values.get("bound_ms")),
        "ratio": f"{ratio.ratio:.2f}" if ratio else "",
        "binding": str(values.get("binding") or ""),
        "policy": str(values.get("policy") or ""),
        "memory": [_gib(values.get(f"{where}_memory_bytes")) for where in ("device", "host")],
        "ok": run.status == "ok",
        "fits": "yes" if run.status == "ok" else run.cause or run.status,
    }


def _beside(simulated: Sequence[Run], published: Sequence[Run]) -> list[dict[str, Any]]:
    """A row a published value: predicted, published, and by how much the first is off."""
    own = {run.label: run for run in simulated}
    rows = []
    for run in published:
        predicted = own.get(run.label)
        for phase in timed_phases(run.study):
            theirs, ours = _ms(run, phase), _ms(predicted, phase) if predicted else None
            if theirs and ours is not None:
                off = ours / theirs - 1
                shown = (f"{ours:.0f}", f"{theirs:.0f}", f"{off:+.0%}")
                rows.append(
                    {"label": run.label, "phase": phase, "shown": shown, "off": off}
                    | {"where": run.hardware}
                )
    return rows


def _deviation(rows: Sequence[Mapping[str, Any]], phases: Sequence[str]) -> list[str]:
    """Median and worst deviation, a sentence a phase."""
    found = []
    for phase in phases:
        off = [abs(row["off"]) for row in rows if row["phase"] == phase]
        if off:
            found.append(
                f"{phase}: off by {median(off):.0%} in the median and {max(off):.0%} at worst over "
                f"{len(off)} published value{'' if len(off) == 1 else 's'}"
            )
    return found


def _ms(run: Run, phase: str) -> float | None:
    return next(iter(run.times_ms(phase, 0)), None)


def _text(value: object) -> str:
    return f"{value:.0f}" if isinstance(value, int | float) else ""


def _gib(value: object) -> str:
    return f"{value / _GIB:.1f}" if isinstance(value, int | float) else ""
