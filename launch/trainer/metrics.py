"""``metrics.jsonl``: one JSON object a line, written by rank 0 (docs/design.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Self

import psutil

from configs.errors import ConfigError
from configs.schema import Point
from launch.trainer.log import IterationResult, perplexity


class MetricsFile:
    """Appends events; every line is on disk when the call returns. A no-op off rank 0."""

    def __init__(self, path: Path | None) -> None:
        """Note where to write.

        Args:
            path: The file, made by the first event; None on ranks that write nothing.
        """
        self._path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, event: str, fields: Mapping[str, Any]) -> None:
        """Append one object; numbers that are not finite must have been replaced by None.

        Raises:
            ConfigError: the file of another run is there.
        """
        if self._path is None:
            return
        if self._file is None:
            try:
                self._file = self._path.open("x", encoding="utf-8")
            except FileExistsError:
                raise ConfigError(f"{self._path}: already there; take a new folder") from None
        self._file.write(json.dumps({"event": event, **fields}, allow_nan=False) + "\n")
        self._file.flush()


def iteration_fields(
    point: Point,
    result: IterationResult,
    phases_ms: Mapping[str, float],
    grad_norm: float | None,
    device_memory_bytes: int | None,
) -> dict[str, Any]:
    """Fields of an ``iteration`` event; ``phases_ms`` are those of :class:`PhaseClock`."""
    loss = finite_or_none(result.loss)
    fields: dict[str, Any] = {
        "iteration": result.iteration,
        "iteration_ms": result.seconds * 1000.0,
        **phases_ms,
        "loss": loss,
        "grad_norm": finite_or_none(grad_norm),
        "learning_rate": result.learning_rate,
        "tokens": result.iteration * point.global_batch_size * point.model.seq_length,
        "host_memory_bytes": psutil.Process().memory_info().rss,
        "device_memory_bytes": device_memory_bytes,
        "skipped": result.skipped,
    }
    if loss is None:
        fields["loss_text"] = str(result.loss)
    return fields


def evaluation_fields(point: Point, iteration: int, loss: float) -> dict[str, Any]:
    """Fields of an ``evaluation`` event."""
    return {
        "iteration": iteration,
        "loss": finite_or_none(loss),
        "perplexity": finite_or_none(perplexity(loss)),
        "tokens": point.eval_iterations * point.global_batch_size * point.model.seq_length,
    }


def finite_or_none(value: float | None) -> float | None:
    """The number itself, or None where JSON has no word for it."""
    return value if value is not None and math.isfinite(value) else None
