"""Pieces ``lanes``, ``4b`` and ``7b``: rows of bench-gpu with timelines.

``python -m benchmarks.gpu_check.rows FOLDER --parameters N --seconds S --rows NAME ...``. Each row
is a process of its own. Its result says how long an iteration took, and its timeline how long each
lane was busy in the last update.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.budget import Budget
from benchmarks.gpu import measure_start, too_large
from benchmarks.gpu_model import GIB, make_point, stock_config
from benchmarks.gpu_rows import ROWS, STOCK, Row, config_of
from benchmarks.process import run_worker
from benchmarks.report import BenchmarkError
from benchmarks.verdict import compare
from configs.schema import Point

SEQ_LENGTH, SMALL_SEQ_LENGTH = 2048, 64
WARM_UP, ITERATIONS = 2, 5
LEAST_S = 20.0
"""With less time left no row is started."""


def run_row(row: Row, point: Point, folder: Path, limit_s: float, subgroup: int) -> dict[str, Any]:
    """Train one row.

    Args:
        row: Which.
        point: What.
        folder: Gets the row's job, result, log and timeline.
        limit_s: After which it is ended.
        subgroup: DeepSpeed's ``sub_group_size`` in elements; 0 for the point's.

    Returns:
        What :func:`benchmarks.gpu_worker.run` found, or ``error``.
    """
    config = config_of(row, stock_config(point, 1.0))
    if subgroup:
        config["zero_optimization"]["sub_group_size"] = subgroup
    timeline = folder / f"{row.name}-timeline"
    if row.block is not None:
        config["deep_optimizer_states"]["timeline"] = str(timeline)
    job = {
        "point": point.model_dump(mode="json"),
        "ds_config": config,
        "warm_up": WARM_UP,
        "ends_update": row.ends_update,
        "zero_init": row.zero_init,
    }
    seconds, found = run_worker(job, folder / row.name, limit_s)
    return {"process_s": seconds, **found, "last_update": last_update(timeline)}


def last_update(timeline: Path) -> dict[str, Any] | None:
    """The summary of a timeline's last update: busy seconds by lane; None without one."""
    path = timeline / "rank-0.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines if '"bound_by"' in line]
    return rows[-1] if rows else None


def told(found: Mapping[str, Any], stock: Mapping[str, Any] | None) -> list[str]:
    """Lines on one row for a person.

    Args:
        found: What :func:`run_row` returned.
        stock: The same of stock; None while there is none to compare with.
    """
    if "error" in found:
        return [f"failed: {found['error']} ({found['process_s']:.0f} s)"]
    parts = [f"iteration {median(found['iteration_s']):.3f} s"]
    for name in ("compute", "update"):
        if found.get(f"{name}_s"):
            parts.append(f"{name} {median(found[f'{name}_s']):.3f}")
    parts.append(f"set-up {found['set_up_s']:.0f} s")
    parts.append(f"resident {found['resident_bytes'] / GIB:.1f} GiB")
    if found["device_bytes"]:
        parts.append(f"device {found['device_bytes'] / GIB:.1f} GiB")
    parts.append(compare(found, stock).text)
    lines = [", ".join(parts)]
    last = found["last_update"]
    if last:
        busy = ", ".join(f"{lane} {seconds:.3f}" for lane, seconds in last["busy_s"].items())
        length = last["end_s"] - last["begin_s"]
        lines.append(f"  last update {length:.3f} s, busy: {busy}")
    return lines


def run_rows(given: argparse.Namespace) -> int:
    """Train all rows; returns 1 when one of ours failed or differs from stock.

    Raises:
        BenchmarkError: There is no GPU, or the model is too small.
    """
    device = "cpu" if given.small else "cuda"
    seq_length = SMALL_SEQ_LENGTH if given.small else SEQ_LENGTH
    point = make_point(given.parameters, seq_length, WARM_UP + ITERATIONS, device)
    device_bytes = None if given.small else measure_start(device).device_bytes
    numel = point.model.num_parameters()
    _say(f"{numel:,} parameters, {point.model.layers} layers, {seq_length} tokens an iteration")
    budget, found = Budget(given.seconds), dict[str, dict[str, Any]]()
    by_name = {row.name: row for row in ROWS}
    for name in given.rows:
        refusal = too_large(by_name[name], numel, device_bytes)
        if refusal or budget.left_s < LEAST_S or not budget.fits(name):
            _say(f"{name}: left out, {refusal or f'{budget.left_s:.0f} s are left'}")
            continue
        found[name] = run_row(by_name[name], point, given.folder, budget.left_s, given.subgroup)
        budget.took(name, found[name]["process_s"])
        stock = found.get(STOCK, {"error": "not run"})
        lines = told(found[name], None if "error" in stock else stock)
        _say(f"{name}: " + "\n* ".join(lines))
        (given.folder / "rows.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    failed = ours_that_failed(found)
    if failed:
        _say(f"FAILED OR DIFFERENT: {', '.join(failed)}")
    return 1 if failed else 0


def ours_that_failed(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Rows of ours that ended in an error, or differ from stock, or from our first without it."""
    ours = {row.name for row in ROWS if row.block is not None} & found.keys()
    trained = {name: row for name, row in found.items() if "error" not in row}
    first = trained.get(STOCK) or next((trained[name] for name in found if name in trained), None)
    return [
        name
        for name in found
        if name in ours and (name not in trained or compare(trained[name], first).equal is False)
    ]


def _say(line: str) -> None:
    sys.stdout.write(f"* {line}\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Train and print; returns 0, 1 when a row of ours failed or differs, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check.rows")
    add = parser.add_argument
    add("folder", type=Path)
    add("--parameters", type=int, required=True)
    add("--seconds", type=float, required=True)
    add("--subgroup", type=int, default=0)
    add("--small", action="store_true")
    add("--rows", nargs="+", choices=[row.name for row in ROWS], required=True)
    try:
        return run_rows(parser.parse_args(argv))
    except BenchmarkError as error:
        sys.stderr.write(f"{error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
