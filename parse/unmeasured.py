"""Figures that no run here produced: a model's predictions, and what others published.

Their run folders say ``"source"`` in ``run.json`` and hold ``values.json`` in place of a log
(docs/design.md). Standard library alone.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from parse.errors import LogError
from parse.log.records import PHASES, Iteration, Log

MEASURED, SIMULATED, PUBLISHED = SOURCES = ("measured", "simulated", "published")
"""Where figures come from: column ``source`` of tables, and what reports say of them."""
NO_SPEEDUP = "simulated: a predicted ratio, not a measured speed-up"
"""Why predictions never make a speed-up."""
_GIB = 1024**3
_TIMES = ("iteration_ms", *(f"{phase}_ms" for phase in PHASES))
_MEMORY = ("host_memory_bytes", "device_memory_bytes")


def source_of(run_json: dict[str, Any]) -> str:
    """Where the figures of a run folder come from, by its ``run.json``."""
    source = run_json.get("source")
    return source if source in SOURCES else MEASURED


def read_values(path: Path) -> Log:
    """What ``values.json`` says, as a log of one iteration.

    Raises:
        LogError: The file is missing, or is not one of ours.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise LogError(f"{path}: is not a JSON object")
    figures = {name: _number(values, name) for name in (*_TIMES, "tflops", *_MEMORY)}
    whole_ms, about = figures["iteration_ms"], values.get("about")
    gib = {name: None if (value := figures[name]) is None else value / _GIB for name in _MEMORY}
    record = Iteration(
        1,
        iteration_s=None if whole_ms is None else whole_ms / 1000,
        forward_ms=figures["forward_ms"],
        backward_ms=figures["backward_ms"],
        update_ms=figures["update_ms"],
        tflops=figures["tflops"],
        host_memory_gib=gib["host_memory_bytes"],
        device_memory_gib=gib["device_memory_bytes"],
    )
    return Log(
        path=path,
        iterations=[record] if any(figures[name] is not None for name in _TIMES) else [],
        parameters=_count(values, "parameters"),
        world_size=_count(values, "num_ranks"),
        device_name=about if isinstance(about, str) else None,
        recognised=True,
    )


def _number(values: dict[str, Any], name: str) -> float | None:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _count(values: dict[str, Any], name: str) -> int | None:
    value = values.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
