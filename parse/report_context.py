"""Everything the report's template shows, as plain data."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from parse.compare import COMPARED_PHASES, Timing
from parse.pairs import Pair
from parse.present import log_notes
from parse.records import PHASES
from parse.run_folder import Run
from parse.table import shown_path
from parse.verdict import judge_log

_FIGURES = {"iteration-breakdown": "Iteration by phase", "loss": "Losses over each other"}
_GIB = 1024**3


def report_context(
    sweep_dir: Path, index: dict[str, Any], runs: Sequence[Run], pairs: Sequence[Pair], warmup: int
) -> dict[str, Any]:
    """Collect what the report says.

    Args:
        sweep_dir: Folder that paths are shown relative to.
        index: The object of ``sweep.json``.
        runs: Runs of the sweep, labelled, in their order.
        pairs: Plugin runs with their vanilla runs.
        warmup: First iterations left out of times.
    """
    return {
        "name": str(index.get("name") or sweep_dir.name),
        "description": str(index.get("description") or ""),
        "warmup": warmup,
        "on_cpu": any(run.on_cpu for run in runs),
        "headline": [_headline(pair) for pair in pairs],
        "phases": ("iteration", *PHASES),
        "timings": [_timing_row(run, warmup) for run in runs],
        "verdicts": [_verdict_row(run, pairs) for run in runs],
        "ratios": [_ratio_row(pair) for pair in pairs if pair.result is not None],
        "runs": [_run_row(run, sweep_dir) for run in runs],
        "figures": _figures(runs),
        "versions": _versions(runs),
        "hardware": _hardware(runs),
        "commands": [(run.label, _command(run)) for run in runs if _command(run)],
        "notes": [(run.label, note) for run in runs for note in log_notes(run.log)],
    }


def _headline(pair: Pair) -> str:
    """A pair's verdict; with the speed-up only where a GPU ran it and the verdict allows it."""
    if pair.result is None or pair.run.on_cpu or (pair.vanilla and pair.vanilla.on_cpu):
        return pair.line
    if pair.result.speedup is None or not pair.run.finished:
        return f"{pair.line}; speed-up withheld: {pair.result.withheld or 'the run did not finish'}"
    return f"{pair.line}; speed-up {pair.result.speedup:.3f}x"


def _timing_row(run: Run, warmup: int) -> dict[str, Any]:
    timings = {name: Timing.of(run.log, name, warmup) for name in ("iteration", *PHASES)}
    return {"label": run.label, "timings": timings, "n": timings["iteration"].n}


def _verdict_row(run: Run, pairs: Sequence[Pair]) -> dict[str, str]:
    pair = next((pair for pair in pairs if pair.run is run), None)
    row = {"label": run.label, "loss": judge_log(run.log).text, "pair": "the reference"}
    if pair is None:
        return {**row, "speedup": "the reference"}
    result, on_cpu = pair.result, run.on_cpu
    if result is None:
        speedup = "withheld: not compared"
    elif result.speedup is None:
        speedup = f"withheld: {result.withheld}"
    elif not run.finished:
        speedup = "withheld: the run did not finish"
    elif on_cpu:
        speedup = "none claimed: measured on a CPU"
    else:
        speedup = f"{result.speedup:.3f}x"
    return {**row, "pair": pair.verdict, "speedup": speedup}


def _ratio_row(pair: Pair) -> dict[str, Any]:
    assert pair.result is not None
    phases = pair.result.phases
    return {
        "label": pair.run.label,
        "ratios": {name: phases[name].ratio for name in COMPARED_PHASES},
        "medians": {name: phases[name].median_ratio for name in COMPARED_PHASES},
    }


def _run_row(run: Run, sweep_dir: Path) -> dict[str, Any]:
    path = shown_path(run.log.path, sweep_dir)
    seconds = run.status_json.get("seconds")
    return {
        "label": run.label,
        "status": run.status or "unknown",
        "seconds": f"{seconds:.1f}" if isinstance(seconds, int | float) else "",
        "cause": run.cause,
        "iterations": len(run.log.iterations),
        "rejects": len(run.log.rejects),
        "link": quote(path.replace(os.sep, "/")) if run.log.path.is_file() else "",
        "log": run.log.path.name,
    }


def _figures(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Figures that ``python -m plots`` draws from the tables of these runs."""
    records = [record for run in runs for record in run.log.iterations]
    drawn = {
        "iteration-breakdown": any(r.phase_ms("iteration") is not None for r in records),
        "loss": any(r.loss is not None for r in records),
    }
    return [
        {"title": title, "path": f"figures/{stem}.png", "pdf": f"figures/{stem}.pdf"}
        for stem, title in _FIGURES.items()
        if drawn[stem]
    ]


def _versions(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Package and version; several versions when the runs do not agree."""
    found: dict[str, list[str]] = {}
    for run in runs:
        started = run.log.metrics.start.get("versions") if run.log.metrics else None
        kept = run.provenance.get("versions")
        # What the run itself imported goes before what was installed where it was launched.
        sources = [source for source in (kept, started) if isinstance(source, dict)]
        merged = {key: value for source in sources for key, value in source.items()}
        git = run.provenance.get("git")
        if isinstance(git, dict):
            dirty = " with uncommitted changes" if git.get("dirty") else ""
            merged["commit"] = f"{git.get('commit')}{dirty}"
        for key, value in merged.items():
            text = "not installed" if value is None else str(value)
            if text not in found.setdefault(str(key), []):
                found[str(key)].append(text)
    return [(key, ", ".join(values)) for key, values in found.items()]


def _hardware(runs: Sequence[Run]) -> list[tuple[str, str]]:
    rows: dict[str, str] = {}
    for run in runs:
        kept = run.provenance
        rows.setdefault("model lived on", " ".join((run.log.device or "unknown", run.hardware)))
        cpu = kept.get("cpu")
        if isinstance(cpu, dict):
            rows.setdefault("CPU", f"{cpu.get('model')}, {cpu.get('cores_usable')} usable cores")
        gpus = [gpu for gpu in kept.get("gpus") or [] if isinstance(gpu, dict)]
        names = [f"{g.get('name')} ({g.get('memory')}, driver {g.get('driver')})" for g in gpus]
        if names:
            rows.setdefault("GPU", ", ".join(names))
        memory = kept.get("host_memory_bytes")
        if isinstance(memory, int):
            rows.setdefault("host memory", f"{memory / _GIB:.1f} GiB")
        if kept.get("platform"):
            rows.setdefault("platform", str(kept["platform"]))
        if run.log.world_size:
            rows.setdefault("ranks", str(run.log.world_size))
    return list(rows.items())


def _command(run: Run) -> str:
    command = run.run_json.get("command")
    if not isinstance(command, list):
        return ""
    text = shlex.join(str(part) for part in command)
    return "".join(c if c.isprintable() else "?" for c in text)
