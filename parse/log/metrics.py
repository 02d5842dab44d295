"""The trainer's ``metrics.jsonl``: full-precision figures beside a log.

The file counts as the log's own only if its losses round to the digits that the log prints, so
that a stray file never lends one run the exactness of another.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parse.log.records import PHASES, Log

_PRINTED_DIGITS = 1e-5
"""Relative difference up to which a printed loss (7 digits) can be the exact one."""


@dataclass
class Metrics:
    """Events of one ``metrics.jsonl``."""

    path: Path
    start: dict[str, Any] = field(default_factory=dict)
    iterations: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Event by iteration."""
    evaluations: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Evaluation by the iteration that it came after."""
    end: dict[str, Any] = field(default_factory=dict)
    rejected_lines: int = 0

    def loss(self, iteration: int) -> float | None:
        """Exact loss; NaN or infinite when the trainer said so; None when it is not there."""
        event = self.iterations.get(iteration, {})
        loss = _number(event.get("loss"))
        return loss if loss is not None else _number(event.get("loss_text"))

    def grad_norm(self, iteration: int) -> float | None:
        """Exact gradient norm of an iteration."""
        return _number(self.iterations.get(iteration, {}).get("grad_norm"))

    def digest(self, name: str) -> str | None:
        """``weights_sha256`` or ``optimizer_sha256`` of the end; None when not computed."""
        value = self.end.get(name)
        return value if isinstance(value, str) and value else None


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
            metrics.evaluations = {}
        elif event["event"] == "end":
            metrics.end = event
        elif isinstance(event.get("iteration"), int):
            is_training = event["event"] == "iteration"
            events = metrics.iterations if is_training else metrics.evaluations
            events[event["iteration"]] = event
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
                setattr(record, name, _number(event.get(name)))
        evaluation = metrics.evaluations.get(record.iteration, {})
        record.validation_loss = _number(evaluation.get("loss"))
        record.validation_perplexity = _number(evaluation.get("perplexity"))
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
    pairs = [(record.loss, metrics.loss(record.iteration)) for record in log.iterations]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return bool(known) and all(_same_digits(a, b) for a, b in known)


def _same_digits(printed: float, exact: float) -> bool:
    if math.isfinite(printed) and math.isfinite(exact):
        return math.isclose(printed, exact, rel_tol=_PRINTED_DIGITS, abs_tol=1e-12)
    return not math.isfinite(printed) and not math.isfinite(exact)


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    known = ("start", "iteration", "evaluation", "end")
    return event if isinstance(event, dict) and event.get("event") in known else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
