"""Reads samples that were taken while a run lasted: our ``monitor.jsonl`` or the paper's CSV.

Standard library alone. The paper's CSV names the unit of its time only; the other units are NVML's:
``txpci`` and ``rxpci`` in KB/s (1 KB = 1000 bytes), ``gpu_util`` and ``mem_util`` in percent,
``mem_used`` and ``mem_free`` in bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MONITOR_FILE = "monitor.jsonl"
SAMPLE_COLUMNS = {
    "time_s": "Float64",
    "host_used_bytes": "Int64",
    "host_free_bytes": "Int64",
    "cpu_percent": "Float64",
    "device_id": "Int64",
    "gpu_util_percent": "Float64",
    "gpu_memory_used_bytes": "Int64",
    "pcie_tx_bytes_per_s": "Int64",
    "pcie_rx_bytes_per_s": "Int64",
    "gpu_memory_free_bytes": "Int64",
    "gpu_memory_util_percent": "Float64",
    "host_pss_bytes": "Int64",
    "machine_used_bytes": "Int64",
    "gpu_memory_run_bytes": "Int64",
}
"""Columns of a sample, those of ``monitor.jsonl`` first. ``time_s`` counts from the run's start in
our file, and from the first sample in the paper's CSV. Memory of the run's own processes is
``host_used_bytes`` (resident), ``host_pss_bytes`` (pages that they share counted once; not in every
sample) and ``gpu_memory_run_bytes``; that of the whole machine ``machine_used_bytes`` and
``gpu_memory_used_bytes``."""
_CSV_COLUMNS = {
    "device_id": ("device_id", 1),
    "timestamp(ns)": ("", 1),
    "txpci": ("pcie_tx_bytes_per_s", 1000),
    "rxpci": ("pcie_rx_bytes_per_s", 1000),
    "gpu_util": ("gpu_util_percent", 1),
    "mem_util": ("gpu_memory_util_percent", 1),
    "mem_used": ("gpu_memory_used_bytes", 1),
    "mem_free": ("gpu_memory_free_bytes", 1),
}
"""Of the paper's CSV, in its order: our name, and what the figure is multiplied by."""

Sample = dict[str, float | int | None]
"""One sample of a device, with all of :data:`SAMPLE_COLUMNS`."""


def read_samples(path: Path) -> tuple[list[Sample], int]:
    """Read a file of either form.

    Returns:
        The samples in the file's order, and how many lines cannot be read. A figure that a sample
        lacks is None; a missing file has no samples.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = [line for line in file if line.strip()]
    except OSError:
        return [], 0
    rows = _csv_rows(lines) if path.suffix == ".csv" else map(_json_row, lines)
    found = [_sample(row) for row in rows]
    samples = [sample for sample in found if sample["time_s"] is not None]
    return samples, len(found) - len(samples)


def monitor_files(log_path: Path, own_folder: bool) -> list[Path]:
    """Find the files of samples that belong to a log.

    They are the ``monitor.jsonl`` of its run folder, and CSV files beside it with the log's name,
    or with any name if no other log lies there.

    Args:
        log_path: The log.
        own_folder: Whether the folder holds this run alone.
    """
    ours = log_path.parent / MONITOR_FILE
    found = [ours] if own_folder and ours.is_file() else []
    tables = sorted(path for path in log_path.parent.glob("*.csv") if is_monitor_csv(path))
    alone = not tables or sum(1 for _ in log_path.parent.glob("*.log")) == 1
    return found + [path for path in tables if alone or path.stem == log_path.stem]


def is_monitor_csv(path: Path) -> bool:
    """Return whether the first line of a file is that of the paper's monitor."""
    try:
        with path.open("rb") as file:
            first = file.readline(200)
    except OSError:
        return False
    return path.suffix == ".csv" and first.replace(b" ", b"").strip() == _CSV_HEAD.encode()


_CSV_HEAD = ",".join(_CSV_COLUMNS)


def _json_row(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def _csv_rows(lines: list[str]) -> Iterator[dict[str, Any]]:
    start_ns: float | None = None
    for line in lines:
        if line.replace(" ", "").strip() == _CSV_HEAD:
            continue
        numbers = [_text_number(cell.strip()) for cell in line.split(",")]
        device, time_ns = [*numbers, None, None][:2]
        if len(numbers) != len(_CSV_COLUMNS) or device is None or time_ns is None:
            yield {}
            continue
        start_ns = time_ns if start_ns is None else start_ns
        row: dict[str, Any] = {"time_s": (time_ns - start_ns) / 1e9}
        for (name, factor), value in zip(_CSV_COLUMNS.values(), numbers, strict=True):
            row[name] = None if value is None else value * factor
        yield row


def _text_number(text: str) -> float | None:
    if not text.replace(".", "", 1).isdecimal() or not text.isascii() or len(text) > 20:
        return None
    return float(text) if "." in text else int(text)


def _sample(row: dict[str, Any]) -> Sample:
    return {name: _number(row.get(name), kind) for name, kind in SAMPLE_COLUMNS.items()}


def _number(value: object, kind: str) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    if kind == "Float64":
        return float(value)
    return int(value) if value == int(value) and abs(value) < 2**63 else None
