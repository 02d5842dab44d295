"""What was run before, read from the run folders, and what of a sweep is still to do.

The run folders are the only state: whatever stops a sweep, the next call finds out from them.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from launch.records.driver import Driver
from launch.records.files import read_json

FAILURES = ("failed", "oom-host", "oom-device", "timeout", "hang")
"""Statuses of a run that came to its own bad end."""
INTERRUPTED = "interrupted"
SILENCE_S = 1800.0
"""Seconds without a sign of life after which a run of another machine counts as interrupted."""


@dataclass(frozen=True)
class Record:
    """A run folder of an earlier or present call."""

    path: Path
    """The run folder, absolute."""
    name: str
    engine: str
    iterations: int
    """That it was to run."""
    point_key: str
    setup_key: str
    repeat: int
    log: str
    """File name of the log."""
    status: str
    """As ``status.json`` has it; ``interrupted`` where the launcher is gone."""
    cause: str
    seconds: float | None
    started: str
    """UTC, ISO 8601."""
    driver: Driver | None

    @classmethod
    def read(cls, run_json: Path) -> Self | None:
        """From a run folder's ``run.json``; None when it is damaged or of an older schema."""
        run, status = read_json(run_json), read_json(run_json.with_name("status.json"))
        point = run.get("point")
        if not isinstance(point, dict) or not isinstance(run.get("point_key"), str):
            return None
        driver = Driver.read(status.get("driver"))
        word, cause = str(status.get("status") or ""), str(status.get("cause") or "")
        seconds = status.get("seconds")
        if word in ("", "running") and not _is_alive(driver, run_json.parent):
            word, cause = INTERRUPTED, "its launcher is gone without a word"
        return cls(
            path=run_json.parent,
            name=str(point.get("name") or run_json.parent.parent.name),
            engine=str(point.get("engine")),
            iterations=int(point.get("iterations") or 0),
            point_key=run["point_key"],
            setup_key=str(run.get("setup_key")),
            repeat=int(run.get("repeat") or 1),
            log=str(run.get("log")),
            status=word,
            cause=cause,
            seconds=seconds if isinstance(seconds, int | float) else None,
            started=str(run.get("started") or ""),
            driver=driver,
        )


def read_records(sweep_folder: Path) -> list[Record]:
    """Runs of a sweep folder, the newest last."""
    found = [Record.read(path) for path in sweep_folder.glob("*/run-*/run.json")]
    return sorted((r for r in found if r is not None), key=lambda r: (r.started, r.path))


def _is_alive(driver: Driver | None, folder: Path) -> bool:
    if driver is None:
        return False
    if not driver.is_elsewhere:
        return driver.is_alive
    times = [path.stat().st_mtime for path in folder.iterdir() if path.is_file()]
    return time.time() - max(times, default=0.0) < SILENCE_S


class Choice(enum.StrEnum):
    """Which points of a sweep a call runs."""

    MISSING = "missing"
    """All that are not done: what failed is tried again."""
    RESUME = "resume"
    """Never run or interrupted; what ended, well or badly, stays."""
    RERUN_FAILED = "rerun-failed"
    """What failed or was interrupted; nothing new."""
    AGAIN = "again"
    """All, done or not."""


@dataclass(frozen=True)
class Decision:
    """Whether to run a point now, and why not."""

    run: bool
    why: str = ""


def decide(keys: tuple[str, str, int], records: Sequence[Record], choice: Choice) -> Decision:
    """Whether a point is to be run.

    Args:
        keys: its point key, the setup key of this call, and the repeat.
        records: earlier runs, the newest last.
        choice: what the user asked for.
    """
    point_key, setup_key, repeat = keys
    own = [r for r in records if (r.point_key, r.repeat) == (point_key, repeat)]
    running = [r for r in own if r.status == "running"]
    if running:
        return Decision(False, f"is running now ({_where(running[-1])})")
    if choice is Choice.AGAIN:
        return Decision(True)
    done = [r for r in own if r.status == "ok" and r.setup_key == setup_key]
    if done:
        return Decision(False, f"done before ({_where(done[-1])})")
    other = [r for r in own if r.status == "ok"]
    if other and choice is not Choice.MISSING:
        why = f"done before with other code, versions or processors ({_where(other[-1])})"
        return Decision(False, why)
    return _decide_unfinished(own, choice)


def _decide_unfinished(own: Sequence[Record], choice: Choice) -> Decision:
    newest = own[-1] if own else None
    if choice is Choice.RERUN_FAILED and newest is None:
        return Decision(False, "never run")
    if choice is Choice.RESUME and newest is not None and newest.status in FAILURES:
        why = f"{newest.status} before ({_where(newest)}); --rerun-failed tries again"
        return Decision(False, why)
    return Decision(True)


def _where(record: Record) -> str:
    return f"{record.path.parent.name}/{record.path.name}"
