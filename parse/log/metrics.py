"""The trainer's ``metrics.jsonl``: full-precision figures beside a log.

The file counts as the log's own only if its losses round to the digits that the log prints, so
that a stray file never lends one run the exactness of another.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from parse.log.records import PHASES, Log, Metrics, as_number

_PRINTED_DIGITS = 1e-5
"""Relative difference up to which a printed loss (7 digits) can be the exact one."""


def read_metrics(path: Path) -> Metrics:
    """Read a ``metrics.jsonl``; lines that are not an event are counted and left out.

    Raises:
        OSError: the file cannot be read.
    """
    metrics = Metrics(path)
    for line in path.read_bytes().decode(errors="replace").splitlines():
        event = _event(line)
        if event is None:
            metrics.rejected_lines += bool(line.strip())
        elif event["event"] == "start":
            # A second start is a second run in the same file: the last one is the log's.
            metrics.start, metrics.iterations, metrics.end = event, {}, {}
            metrics.evaluations = []
        elif event["event"] == "end":
            metrics.end = event
        elif event["event"] == "evaluation":
            metrics.evaluations.append(event)
        elif isinstance(event.get("iteration"), int):
            metrics.iterations[event["iteration"]] = event
    return metrics


def attach_metrics(log: Log) -> None:
    """Attach the ``metrics.jsonl`` of the log's folder, if there is one and it fits the log."""
    path = log.path.parent / "metrics.jsonl"
    try:
        metrics = read_metrics(path)
    except OSError:
        return
    if not _fits(log, metrics):
        log.notes.append(f"{path.name} beside {log.path.name} does not fit it; left out")
        return
    if metrics.rejected_lines:
        log.notes.append(f"{path.name}: {metrics.rejected_lines} unreadable lines left out")
    log.metrics = metrics
    for record in log.iterations:
        record.exact_loss = metrics.loss(record.iteration)
        event = metrics.iterations.get(record.iteration, {})
        for name in (*(f"{phase}_ms" for phase in PHASES), "grad_norm", "learning_rate"):
            if getattr(record, name) is None:
                setattr(record, name, as_number(event.get(name)))
    _take_start(log, metrics.start)


def _take_start(log: Log, start: dict[str, Any]) -> None:
    """Take over what the trainer knows of its run as a whole."""
    parameters, padded, ranks = (
        value if isinstance(value := start.get(key), int) else None
        for key in ("parameters", "padded_vocab_size", "num_ranks")
    )
    # The log counts what tensor-parallel ranks share once a rank, the start event once.
    log.parameters = parameters or log.parameters
    log.vocab_size = log.vocab_size or padded
    log.world_size = log.world_size or ranks
    device = start.get("device")
    if isinstance(device, str) and device:
        # DeepSpeed's line says which accelerator it found; the start event, which one was used.
        log.device = "cpu" if device == "cpu" else "cuda"
        log.device_name = None if device in ("cpu", "cuda") else device


def _fits(log: Log, metrics: Metrics) -> bool:
    """Whether the printed losses are the exact ones, rounded."""
    pairs = [(record.loss, metrics.loss(record.iteration)) for record in log.iterations]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return bool(known) and all(
        math.isclose(printed, exact, rel_tol=_PRINTED_DIGITS, abs_tol=1e-12)
        or not (math.isfinite(printed) or math.isfinite(exact))
        for printed, exact in known
    )


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    known = ("start", "iteration", "evaluation", "end")
    return event if isinstance(event, dict) and event.get("event") in known else None
