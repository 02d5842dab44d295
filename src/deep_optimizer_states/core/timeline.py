"""Timelines of the lanes: spans as JSONL, one line an update, and a trace for Perfetto.

``"timeline": "FOLDER"`` in the config's block makes each rank append to ``FOLDER/rank-N.jsonl``;
``python -m deep_optimizer_states timeline FOLDER`` turns that into ``FOLDER/trace.json``, which
https://ui.perfetto.dev and Chrome's ``about:tracing`` open. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deep_optimizer_states.checks import write_whole

_log = logging.getLogger(__name__)

WAIT = "wait: "
"""Begins the name of a span in which a lane waits for another; it is not busy then."""
LANES = ("CPU", "H2D", "GPU", "D2H", "weights", "grads")
"""In the order a trace shows them."""


@dataclass(frozen=True)
class Span:
    """A piece of work of one lane; times in s on this process's monotonic clock."""

    lane: str
    what: str
    begin_s: float
    end_s: float


class Recorder:
    """Collects spans from the lanes' threads; ``take`` empties it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Callable[[], Span]] = []

    def add(self, lane: str, what: str, begin_s: float, end_s: float) -> None:
        """Note a span that is over."""
        span = Span(lane, what, begin_s, end_s)
        self.add_later(lambda: span)

    def add_later(self, resolve: Callable[[], Span]) -> None:
        """Note a span whose times can be asked for once all lanes are idle."""
        with self._lock:
            self._spans.append(resolve)

    def take(self) -> list[Span]:
        """Return all spans since the last call; the lanes must be idle."""
        with self._lock:
            taken, self._spans = self._spans, []
        return [resolve() for resolve in taken]


@dataclass(frozen=True)
class UpdateSummary:
    """Length of one update, and the lane that bound it.

    Attributes:
        seconds: Its length.
        busy_s: Seconds that each lane worked during the update.
        bound_by: The busiest lane: with perfect overlap the update would last as long as it is
            busy. Empty where no lane had work.
        share_of_limit: That lane's busy time over the update's length, from 0 to 1.
    """

    seconds: float
    busy_s: Mapping[str, float]
    bound_by: str
    share_of_limit: float

    def text(self, number: int) -> str:
        """Return one line for a log."""
        head = f"update {number}: {1e3 * self.seconds:.1f} ms"
        if not self.bound_by:
            return f"{head}, no lane had work"
        shares = {lane: f"{lane} {busy / self.seconds:.0%}" for lane, busy in self.busy_s.items()}
        shares.pop(self.bound_by)
        work = f"{1e3 * self.busy_s[self.bound_by]:.1f} ms of work, {self.share_of_limit:.0%}"
        others = f"; {', '.join(shares.values())}" if shares else ""
        return f"{head}, bound by {self.bound_by} ({work}){others}"


def summarize(spans: Iterable[Span], begin_s: float, end_s: float) -> UpdateSummary:
    """Add up each lane's busy time between two times; overlapping spans of a lane count once."""
    by_lane: dict[str, list[tuple[float, float]]] = {}
    for span in spans:
        first, last = max(span.begin_s, begin_s), min(span.end_s, end_s)
        if last > first and not span.what.startswith(WAIT):
            by_lane.setdefault(span.lane, []).append((first, last))
    busy_s = {lane: _covered(by_lane[lane]) for lane in LANES if lane in by_lane}
    bound_by, seconds = max(busy_s, key=busy_s.__getitem__, default=""), end_s - begin_s
    share = busy_s[bound_by] / seconds if bound_by and seconds else 0.0
    return UpdateSummary(seconds, busy_s, bound_by, share)


def _covered(intervals: Sequence[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for first, last in sorted(intervals):
        total += max(0.0, last - max(first, reached))
        reached = max(reached, last)
    return total


class TimelineFile:
    """Appends spans and summaries of one rank.

    A folder or disk that does not take them never ends training: the first failure is warned of,
    and from then on nothing more is written.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank-{rank}.jsonl"
        self._updates = 0
        self._is_on = True
        with self._off_on_failure():
            folder.mkdir(parents=True, exist_ok=True)

    def write(self, spans: Sequence[Span], begin_s: float, end_s: float) -> str:
        """Append an update; returns its line for a log."""
        self._updates += 1
        summary = summarize(spans, begin_s, end_s)
        rows: list[dict[str, Any]] = [{"update": self._updates, **vars(span)} for span in spans]
        rows.append(
            {
                "update": self._updates,
                "begin_s": begin_s,
                "end_s": end_s,
                "busy_s": dict(summary.busy_s),
                "bound_by": summary.bound_by,
                "share_of_limit": summary.share_of_limit,
            }
        )
        if self._is_on:
            with self._off_on_failure(), self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        return summary.text(self._updates)

    @contextlib.contextmanager
    def _off_on_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._is_on = False
            _log.warning(
                "deep_optimizer_states: timeline %s cannot be written (%s): training goes on, and "
                "nothing more is written there",
                self._path,
                error.strerror,
            )


def chrome_trace(rows_of_rank: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Make Chrome's trace of ``rank-N.jsonl`` files' rows: a process a rank."""
    events: list[dict[str, Any]] = []
    for rank, rows in rows_of_rank.items():
        named = {"ph": "M", "pid": rank}
        events.append({**named, "name": "process_name", "args": {"name": f"rank {rank}"}})
        lanes = dict.fromkeys([*LANES, *(str(row["lane"]) for row in rows if "lane" in row)])
        numbers = {lane: number for number, lane in enumerate(lanes, start=1)}
        for lane, number in numbers.items():
            events.append({**named, "tid": number, "name": "thread_name", "args": {"name": lane}})
        for row in rows:
            spans = {"ph": "X", "pid": rank, "ts": 1e6 * row["begin_s"]}
            spans["dur"] = 1e6 * (row["end_s"] - row["begin_s"])
            if "lane" in row:
                is_wait = str(row["what"]).startswith(WAIT)
                lane = str(row["lane"])
                spans |= {"tid": numbers[lane], "name": row["what"]}
                events.append({**spans, "cat": "wait" if is_wait else "work"})
            else:
                args = {"bound by": row["bound_by"], "share of its limit": row["share_of_limit"]}
                name = f"update {row['update']}"
                events.append({**spans, "tid": 0, "name": name, "cat": "update", "args": args})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read one rank's file; a line that a crash cut off is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and {"begin_s", "end_s", "update"} <= row.keys():
            rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Write ``trace.json`` beside the ranks' files; returns 2 if none is there, or it cannot."""
    parser = argparse.ArgumentParser(
        prog="python -m deep_optimizer_states timeline", description="Timelines to a trace."
    )
    parser.add_argument("folder", type=Path, help="what the config's timeline names")
    folder = parser.parse_args(argv).folder
    names = {path: path.stem.removeprefix("rank-") for path in folder.glob("rank-*.jsonl")}
    files = sorted((int(rank), path) for path, rank in names.items() if rank.isdecimal())
    if not files:
        sys.stderr.write(f"{folder}: no rank-N.jsonl in it\n")
        return 2
    target = folder / "trace.json"
    try:
        trace = chrome_trace({rank: read_rows(path) for rank, path in files})
        write_whole(target, json.dumps(trace), overwrite=True)
    except OSError as error:
        sys.stderr.write(
            f"{error.filename}: {error.strerror}; make room, or copy the timelines to a folder "
            "that can be written\n"
        )
        return 2
    sys.stdout.write(f"{target}\n")
    return 0
