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
from parse.log.records import Iteration, Log

MEASURED, SIMULATED, PUBLISHED = SOURCES = ("measured", "simulated", "published")
"""Where figures come from: column ``source`` of tables, and what reports say of them."""
NO_SPEEDUP = "simulated: a predicted ratio, not a measured speed-up"
"""Why predictions never make a speed-up."""
_GIB = 1024**3
_PHASES = ("forward_ms", "backward_ms", "update_ms")


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
    whole, about = _number(values, "iteration_ms"), values.get("about")
    record = Iteration(
        1,
        iteration_s=None if whole is None else whole / 1000,
        forward_ms=_number(values, "forward_ms"),
        backward_ms=_number(values, "backward_ms"),
        update_ms=_number(values, "update_ms"),
        tflops=_number(values, "tflops"),
        host_memory_gib=_gib(values, "host_memory_bytes"),
        device_memory_gib=_gib(values, "device_memory_bytes"),
    )
    known = any(_number(values, name) is not None for name in ("iteration_ms", *_PHASES))
    return Log(
        path=path,
        iterations=[record] if known else [],
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


def _gib(values: dict[str, Any], name: str) -> float | None:
    value = _number(values, name)
    return None if value is None else value / _GIB
