"""Reads samples that were taken beside a run: our ``monitor.jsonl`` or the paper's CSV.

Standard library alone. The paper's CSV names the unit of its time only; the other units are NVML's:
``txpci`` and ``rxpci`` in KB/s (1 KB = 1000 bytes), ``gpu_util`` and ``mem_util`` in percent,
``mem_used`` and ``mem_free`` in bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

MONITOR_FILE = "monitor.jsonl"
_CSV_COLUMNS = [
    *("device_id", "timestamp(ns)", "txpci", "rxpci"),
    *("gpu_util", "mem_util", "mem_used", "mem_free"),
]
_CSV_FIGURES = (
    *(("pcie_tx_bytes_per_s", 1000), ("pcie_rx_bytes_per_s", 1000)),
    *(("gpu_util_percent", 1), ("gpu_memory_util_percent", 1)),
    *(("gpu_memory_used_bytes", 1), ("gpu_memory_free_bytes", 1)),
)
"""Our names of the CSV's figures behind its time, and what they are multiplied by."""

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

Sample = tuple[float | int | None, ...]
"""One sample of a device, in the order of ``SAMPLE_COLUMNS``."""


def is_monitor_csv(path: Path) -> bool:
    """Whether the first line of a file is that of the paper's monitor."""
    if path.suffix != ".csv":
        return False
    try:
        with path.open("rb") as file:
            first = file.readline(200)
    except OSError:
        return False
    return first.strip().replace(b" ", b"") == ",".join(_CSV_COLUMNS).encode()


def read_samples(path: Path) -> tuple[list[Sample], int]:
    """Read a file of either form.

    Returns:
        The samples in the file's order, and how many lines cannot be read. A figure that a sample
        lacks is None; a missing file has no samples.
    """
    parse = _csv_rows if path.suffix == ".csv" else _json_rows
    try:
        rows = list(parse(path))
    except OSError:
        return [], 0
    samples = [row for row in rows if row is not None]
    return samples, len(rows) - len(samples)


def monitor_files(log_path: Path, own_folder: bool) -> list[Path]:
    """Find the files of samples that belong to a log.

    They are the ``monitor.jsonl`` of its run folder, and CSV files beside it with the log's name,
    or with any name if no other log lies there.

    Args:
        log_path: The log.
        own_folder: Whether the folder holds this run alone.
    """
    found = []
    ours = log_path.parent / MONITOR_FILE
    if own_folder and ours.is_file():
        found.append(ours)
    beside = sorted(log_path.parent.glob("*.csv"))
    if beside:
        alone = sum(1 for _ in log_path.parent.glob("*.log")) == 1
        found += [
            path
            for path in beside
            if (alone or path.stem == log_path.stem) and is_monitor_csv(path)
        ]
    return found


def _json_rows(path: Path) -> Iterator[Sample | None]:
    with path.open("rb") as file:
        for line in filter(bytes.strip, file):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            timed = isinstance(row, dict) and _number(row.get("time_s")) is not None
            yield _sample(row) if timed else None


def _csv_rows(path: Path) -> Iterator[Sample | None]:
    start_ns: int | None = None
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            cells = [cell.strip() for cell in line.split(",")]
            if cells[:2] == _CSV_COLUMNS[:2] or not any(cells):
                continue
            device, time_ns, *figures = map(_text_number, [*cells, "", ""])
            sound = len(cells) == len(_CSV_COLUMNS) and isinstance(device, int)
            if not sound or not isinstance(time_ns, int):
                yield None
                continue
            start_ns = time_ns if start_ns is None else start_ns
            row = {"time_s": (time_ns - start_ns) / 1e9, "device_id": device}
            for (name, factor), value in zip(_CSV_FIGURES, figures, strict=False):
                row[name] = None if value is None else value * factor
            yield _sample(row)


def _sample(row: Mapping[str, object]) -> Sample:
    return tuple(
        _number(row.get(name), whole=kind == "Int64") for name, kind in SAMPLE_COLUMNS.items()
    )


def _text_number(text: str) -> float | None:
    if not text.replace(".", "", 1).isdecimal() or not text.isascii() or len(text) > 20:
        return None
    return float(text) if "." in text else int(text)


def _number(value: object, *, whole: bool = False) -> float | int | None:
    """A JSON number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    if whole:
        return int(value) if value == int(value) and abs(value) < 2**63 else None
    return float(value)
