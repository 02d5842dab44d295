"""What the report of a simulated sweep shows: predictions, beside published values where known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from parse.compare.comparisons import TIMED_PHASES, PointComparison
from parse.log.records import Log
from parse.report.context import TABLES, figure_entry
from parse.report.figures import find_figures
from parse.run_folder import Run, read_json
from parse.unmeasured import PUBLISHED, SIMULATED

_GIB, _MILLION = 1024**3, 1_000_000
_SETTINGS = {
    "model": "model",
    "dp": "DP",
    "tp": "TP",
    "micro_batch_size": "micro-batch",
    "global_batch_size": "global batch",
    "subgroup_numel": "subgroup",
    "offload_ratio": "offload ratio",
}
"""What a report names where it does not vary."""


def simulated_context(
    sweep_dir: Path,
    index: Mapping[str, Any],
    runs: Sequence[Run],
    comparisons: Sequence[PointComparison],
) -> dict[str, Any]:
    """Collect what the templates ``simulated`` show.

    Args:
        sweep_dir: Folder that paths are shown relative to.
        index: The object of ``sweep.json``.
        runs: Simulated and published ones, labelled.
        comparisons: Plugin points with their vanilla points, predicted ones alone.
    """
    about = index.get(SIMULATED)
    about = about if isinstance(about, dict) else {}
    wanted = index.get("figures")
    wanted = [str(name) for name in wanted] if isinstance(wanted, list) else []
    figures = find_figures(sweep_dir / "figures", wanted)
    ratios = {id(item.ours.runs[0]): item.ratio("iteration") for item in comparisons}
    simulated = [run for run in runs if run.source == SIMULATED]
    values = [(run, read_json(run.log.path)) for run in simulated]
    beside = _beside(simulated, [run for run in runs if run.source == PUBLISHED])
    return {
        "name": str(index.get("name") or sweep_dir.name),
        "description": str(index.get("description") or ""),
        "machine": str(about.get("machine") or "an unknown machine"),
        "about": [*_about_rows(about), *_shared_rows(simulated)],
        "phases": TIMED_PHASES,
        "points": [_point_row(run, own, ratios.get(id(run))) for run, own in values],
        "beside": beside,
        "deviation": _deviation(beside),
        "is_fitted": "fitted" in _kinds(about).values(),
        "figures": [figure_entry(figure) for figure in figures],
        "not_drawn": [name for name in wanted if name not in {f.stem for f in figures}],
        "tables": [name for name in TABLES if (sweep_dir / "tables" / f"{name}.csv").is_file()],
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
    rows += _residual_rows("fit, ", about.get("residuals"))
    return [(name, text) for name, text in rows if text]


def _kinds(about: Mapping[str, Any]) -> dict[str, Any]:
    kinds = about.get("kinds")
    return kinds if isinstance(kinds, dict) else {}


def _residual_rows(head: str, residuals: object) -> list[tuple[str, str]]:
    """What a fit left over, by name: shares, or pairs of the median one and the worst."""
    rows = []
    for name, value in residuals.items() if isinstance(residuals, dict) else ():
        title = f"{head}{name}".replace("_", " ")
        if isinstance(value, dict):
            rows += _residual_rows(f"{title} ", value)
        elif isinstance(value, list | tuple) and len(value) == 2:
            rows.append((title, f"off by {value[0]:.1%} in the median, {value[1]:.1%} at worst"))
        else:
            rows.append((title, f"{value:.1%}" if isinstance(value, float) else str(value)))
    return rows


def _shared_rows(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Settings that all points share; what differs is in their names."""
    names = {name for run in runs for name in run.log.settings} & set(_SETTINGS)
    found = {name: {_short(run.log.settings.get(name)) for run in runs} for name in names}
    same = [f"{_SETTINGS[n]} {min(found[n])}" for n in _SETTINGS if len(found.get(n, ())) == 1]
    if not same:
        return []
    return [("all points", ", ".join(same))]


def _short(value: object) -> str:
    whole = isinstance(value, int) and value >= _MILLION and value % _MILLION == 0
    return f"{value // _MILLION}M" if whole and isinstance(value, int) else str(value)


def _point_row(run: Run, values: Mapping[str, Any], ratio: Any) -> dict[str, Any]:  # noqa: ANN401
    memory = [_gib(values.get(f"{where}_memory_bytes")) for where in ("device", "host")]
    return {
        "label": run.label,
        "times": [_ms(run.log, phase) for phase in TIMED_PHASES],
        "bound": _text(values.get("bound_ms")),
        "resident": _text(values.get("all_resident_iteration_ms")),
        "ratio": f"{ratio.ratio:.2f}" if ratio else "",
        "binding": str(values.get("binding") or ""),
        "policy": str(values.get("policy") or ""),
        "memory": memory,
        "ok": run.status == "ok",
        "fits": "yes" if run.status == "ok" else run.cause or run.status,
    }


def _beside(simulated: Sequence[Run], published: Sequence[Run]) -> list[dict[str, Any]]:
    """A row a published value: predicted, published, and by how much the first is off."""
    own = {run.label: run for run in simulated}
    rows = []
    for run in published:
        predicted = own.get(run.label)
        for phase in TIMED_PHASES:
            theirs = _ms_or_none(run.log, phase)
            ours = _ms_or_none(predicted.log, phase) if predicted else None
            if theirs and ours is not None:
                off = ours / theirs - 1
                shown = (f"{ours:.0f}", f"{theirs:.0f}", f"{off:+.0%}")
                rows.append(
                    {"label": run.label, "phase": phase, "shown": shown, "off": off}
                    | {"where": run.hardware}
                )
    return rows


def _deviation(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Median and worst deviation, a sentence a phase."""
    found = []
    for phase in TIMED_PHASES:
        off = [abs(row["off"]) for row in rows if row["phase"] == phase]
        if off:
            found.append(
                f"{phase}: off by {median(off):.0%} in the median and {max(off):.0%} at worst over "
                f"{len(off)} published value{'' if len(off) == 1 else 's'}"
            )
    return found


def _ms_or_none(log: Log, phase: str) -> float | None:
    return log.iterations[0].phase_ms(phase) if log.iterations else None


def _ms(log: Log, phase: str) -> str:
    value = _ms_or_none(log, phase)
    return "" if value is None else f"{value:.0f}"


def _text(value: object) -> str:
    return f"{value:.0f}" if isinstance(value, int | float) else ""


def _gib(value: object) -> str:
    return f"{value / _GIB:.1f}" if isinstance(value, int | float) else ""
