"""What was run before, read from the run folders, and what of a sweep is still to do.

The run folders are the only state: whatever stops a sweep, the next call finds out from them.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from configs.files import read_json
from launch.records.identity import changes
from launch.records.run_folder import Driver

UNTRAINED = ("nan", "frozen", "diverged", "skipped")
"""Statuses of a run that came to its end with a loss that means no training."""
FAILURES = ("failed", "oom-host", "oom-device", "timeout", "hang", *UNTRAINED)
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
    dtype: str
    """Type of its numbers."""
    setup: dict[str, Any]
    """What it was run with, as :func:`launch.records.identity.changes` takes it."""

    @property
    def where(self) -> str:
        """``STEM/run-NNN``."""
        return f"{self.path.parent.name}/{self.path.name}"

    @classmethod
    def read(cls, run_json: Path) -> Self | None:
        """Read a run folder's ``run.json``; None when it is damaged or of an older schema."""
        run, status = read_json(run_json), read_json(run_json.with_name("status.json"))
        point, setup = run.get("point"), run.get("provenance")
        if not isinstance(point, dict) or not isinstance(run.get("point_key"), str):
            return None
        driver, seconds = Driver.read(status.get("driver")), status.get("seconds")
        word, cause = str(status.get("status") or ""), str(status.get("cause") or "")
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
            dtype=str(point.get("dtype")),
            setup=setup if isinstance(setup, dict) else {},
        )


def read_records(sweep_folder: Path) -> list[Record]:
    """Return the runs of a sweep folder, the newest last."""
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
    """Which points of a sweep to run."""

    MISSING = "missing"
    """All that are not done: what failed is tried again."""
    RESUME = "resume"
    """Never run or interrupted; what ended, well or badly, stays."""
    RERUN_FAILED = "rerun-failed"
    """What failed or was interrupted; nothing new."""
    AGAIN = "again"
    """All, done or not."""
    KEEP = "keep"
    """All that are not done, be it with older code, other versions or processors."""


@dataclass(frozen=True)
class Decision:
    """Whether to run a point now, and why."""

    run: bool
    why: str = ""
    """Empty for a point that is run for the first time."""


def decide(
    keys: tuple[str, str, int],
    records: Sequence[Record],
    choice: Choice,
    setup: Mapping[str, Any],
) -> Decision:
    """Decide whether a point is to be run, after earlier runs of which the newest is last.

    ``keys`` are its point key, the setup key of this call, which is of ``setup``, and the repeat.
    """
    point_key, setup_key, repeat = keys
    own = [r for r in records if (r.point_key, r.repeat) == (point_key, repeat)]
    running = [r for r in own if r.status == "running"]
    if running:
        return Decision(False, f"is running now ({running[-1].where})")
    if choice is Choice.AGAIN:
        return Decision(True, "--again" if own else "")
    good = [r for r in own if r.status == "ok"]
    done = [r for r in good if r.setup_key == setup_key]
    if done:
        return Decision(False, f"done before ({done[-1].where})")
    if good:
        changed, where = older(good[-1], setup_key, setup), good[-1].where
        if choice is Choice.MISSING:
            return Decision(True, f"{changed} (since {where}; --keep accepts it)")
        words = "done before with other code, versions or processors"
        return Decision(False, f"{words} ({where}): {changed}")
    if own:
        what = f"{own[-1].status} before ({own[-1].where})"
        if choice is Choice.RESUME and own[-1].status in FAILURES:
            return Decision(False, f"{what}; --rerun-failed tries again")
        return Decision(True, what)
    if choice is Choice.RERUN_FAILED:
        return Decision(False, "never run")
    settings = point_key.partition("-")[0]
    same = [r for r in records if (r.point_key.partition("-")[0], r.repeat) == (settings, repeat)]
    found = [r for r in same if r.status == "ok"]
    return Decision(True, f"data changed (since {found[-1].where})" if found else "")


def older(record: Record, setup_key: str, setup: Mapping[str, Any]) -> str:
    """Say what changed since a run; empty where it is of today's code, versions and processors."""
    if record.setup_key == setup_key:
        return ""
    return changes(record.setup, setup) or "other code, versions or processors"
