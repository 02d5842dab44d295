"""What came out of one run, in about ten lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from parse.run import Run, label_runs, read_run
from parse.tables import run_row


def summary(log: Path, warmup: int = 1) -> list[str]:
    """Return a run's medians, rates, loss and peaks of memory; nothing of a log that has none.

    Args:
        log: The run's log, in its run folder.
        warmup: First iterations left out of times.
    """
    try:
        run = read_run(log)
    except ConfigError:
        return []
    label_runs([run])
    return [f"  {title:<12} {text}" for title, text in _rows(run, run_row(run, warmup))]


def _rows(run: Run, row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for phase in ("iteration", *run.study.phases):
        if (median_ms := row.get(f"{phase}_median_ms")) is not None:
            about = f" (median of {row['timed_iterations']})" if phase == "iteration" else ""
            yield phase.replace("_", " "), f"{median_ms:,.1f} ms{about}"
    rates = {
        "tokens/s": row.get("tokens_per_s"),
        "samples/s": row.get("samples_per_s"),
        "TFLOP/s a rank": row.get("tflops"),
    }
    if known := [f"{rate:,.4g} {unit}" for unit, rate in rates.items() if rate]:
        yield "rate", ", ".join(known)
    if row["loss_first"]:
        first, last = (float(row[f"loss_{end}"]) for end in ("first", "last"))
        yield (
            "loss",
            f"{first:.4f} to {last:.4f} in {row['iterations']} iterations, {run.loss.text}",
        )
    peaks = {"all ranks on the host": row["host_peak_gib"], "fullest GPU": row["gpu_peak_gib"]}
    if known := [f"{gib:.2f} GiB {where}" for where, gib in peaks.items() if gib]:
        yield "peak memory", ", ".join(known)
    files = sorted(path.name for path in run.log.path.parent.glob("*.json*"))
    yield "files", f"its log, {', '.join(files)}"
