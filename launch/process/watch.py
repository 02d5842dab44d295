"""What shows how a run fares: growing files, whether it moves, stacks, kernel kills.

A run's heartbeat is the growth of its log and of its ``metrics.jsonl``. The trainer answers SIGUSR1
with the stacks of all its threads. SIGUSR1 ends a process that does not expect it, so it goes only
to those that the kernel says catch it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from deep_optimizer_states.core.threads import run_guarded

POLL_S = 0.05
"""Seconds between two looks at processes and at the log that is copied."""
MOST_BYTES = 2**20
"""Most that one look reads; of a larger growth, and of a line without an end, the end."""
FIRST_ITERATION_S = 1800.0
"""Longest silence before the first iteration: ops compile, weights and samples are made."""
LEAST_S = 300.0
"""Longest silence between two fast iterations; state is hashed and saved after the last."""
SLOWEST_FACTOR = 20.0
"""Longest silence in slowest iterations so far."""
LOOK_S = 0.5
"""Seconds between two looks at a run's files."""
NOTE = "[launch] "
"""How every line begins that the launcher adds to a run's log."""
ANSWER_S = 5.0
"""Seconds a process has to write its stacks."""
QUIET_S = 0.2
"""Seconds without a new byte after which an answer is whole."""
_CANNOT_ANSWER = "TtDZX"
"""States of a process that runs no handler: stopped, traced, uninterruptible, dead."""
_PROC = Path("/proc")
_END_OF_LINE = re.compile(rb"[\r\n]+")
_ITERATION_LINE = re.compile(rb"elapsed time per iteration \(ms\):\s*(\d+\.?\d*)")


class GrowingFile:
    """Hands out what others appended to a file since the last look."""

    def __init__(self, path: Path, start: int = 0) -> None:
        """Read from byte ``start`` on; the file need not be there yet."""
        self._path = path
        self._position = start
        self._part = b""
        self.has_grown = False
        """Whether the last look found anything new."""

    def new_lines(self) -> list[bytes]:
        """Return the whole lines since the last call; each state of a progress bar is one."""
        self.has_grown = False
        try:
            size = self._path.stat().st_size
            if size == self._position:
                return []
            self.has_grown = True
            with self._path.open("rb") as file:
                if size - self._position > MOST_BYTES or size < self._position:
                    self._part = b""
                    self._position = max(0, size - MOST_BYTES)
                file.seek(self._position)
                text = file.read(MOST_BYTES)
        except OSError:  # not made yet, or a file system that has gone for a while
            return []
        self._position += len(text)
        *lines, part = _END_OF_LINE.split(self._part + text)
        self._part = part[-MOST_BYTES:]
        return lines


@contextlib.contextmanager
def meanwhile(
    what: str, work: Callable[[threading.Event], None], patience_s: float | None = None
) -> Iterator[None]:
    """Do ``work`` on a thread until the block ends, which sets the event that it is given.

    The block waits for the thread, ``patience_s`` seconds at most. What ends it before goes to
    standard error, where ``what`` names it.
    """
    ended = threading.Event()

    def tell(failure: BaseException | None) -> None:
        if failure is not None:
            sys.stderr.write(f"{what} ended: {failure!r}\n")

    thread = threading.Thread(target=run_guarded, args=(partial(work, ended), tell), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        # No deadline: where there is none, what is left of the log is copied to its reader.
        thread.join(patience_s)


def echoing(log: Path) -> AbstractContextManager[None]:
    """Copy what is appended to ``log`` to standard output until the block ends."""
    return meanwhile("copying the log", partial(_copy_log, log, log.stat().st_size))


def _copy_log(log: Path, start: int, ended: threading.Event) -> None:
    with log.open("rb") as file, open(sys.stdout.fileno(), "wb", closefd=False) as output:
        file.seek(start)
        # No deadline: it ends with the run.
        while True:
            last = ended.is_set()  # looked at before the read: nothing is written after the end
            try:
                shutil.copyfileobj(file, output)
                output.flush()
            except BrokenPipeError:
                # The reader has gone (`| head`); the run goes on without it.
                os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
                return
            if last:
                return
            ended.wait(POLL_S)


class ProgressWatch:
    """Follows a run's log and metrics."""

    def __init__(
        self,
        log: Path,
        metrics: Path | None,
        hang_s: float | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to watch for silences longer than ``hang_s``; None adapts it, 0 allows any."""
        self.has_begun = False
        """Whether the ranks have said that what trains is built."""
        self.iteration: dict[str, Any] = {}
        """Numbers, and the ``loss_text``, of the newest iteration in the metrics; first empty."""
        # Each file with what finds an iteration's time in a line, and the times found, in ms.
        self._files: list[tuple[GrowingFile, Callable[[bytes], float | None], list[float]]] = []
        for path, read in ((log, _ms_in_log), (metrics, self._ms_in_metrics)):
            if path is not None:
                start = path.stat().st_size if path.exists() else 0
                self._files.append((GrowingFile(path, start), read, []))
        self._hang_s = hang_s
        self._now = now
        self._looked = now()
        self._idle_s = 0.0
        self.stall = ""
        """The silence that lasted too long, in words; empty while there is none."""

    def look(self) -> bool:
        """Look at the files, at most once in :data:`LOOK_S`; True when the run stands still."""
        passed_s = self._now() - self._looked
        if passed_s < LOOK_S:
            return False
        self._looked += passed_s
        # While we were stopped ourselves, as a whole suspended job is, nothing counts as silence.
        self._idle_s += min(passed_s, 4 * LOOK_S)
        for file, read, times_ms in self._files:
            found = map(read, file.new_lines())
            times_ms += [milliseconds for milliseconds in found if milliseconds is not None]
            if file.has_grown:
                self._idle_s = 0.0
        iterations = len(self.times_ms)
        limit_s = self._limit_s(iterations)
        if self._idle_s >= limit_s:
            after = f"iteration {iterations}" if iterations else "its start, no iteration yet"
            silence = f"{self._idle_s:.0f} s (limit {limit_s:.0f} s)"
            self.stall = f"no progress for {silence} after {after}"
        return bool(self.stall)

    def _limit_s(self, iterations: int) -> float:
        if self._hang_s is not None:
            return self._hang_s or float("inf")
        if iterations == 0:
            return FIRST_ITERATION_S
        slowest_ms = max(max(times_ms, default=0.0) for *_, times_ms in self._files)
        return max(LEAST_S, SLOWEST_FACTOR * slowest_ms / 1000.0)

    @property
    def times_ms(self) -> list[float]:
        """Times of the iterations so far, by the file that tells of more."""
        return max((times_ms for *_, times_ms in self._files), key=len)

    def _ms_in_metrics(self, line: bytes) -> float | None:
        try:
            event = json.loads(line)
        except ValueError:
            return None
        if not isinstance(event, dict):
            return None
        self.has_begun |= event.get("event") == "start"
        if event.get("event") != "iteration":
            return None
        # Another trainer may write anything into fields of these names.
        self.iteration = {
            name: value
            for name, value in event.items()
            if _is_number(value) or (name == "loss_text" and isinstance(value, str))
        }
        took = self.iteration.get("iteration_ms", 0.0)
        return float(took) if math.isfinite(took) else 0.0


def _is_number(value: object) -> bool:
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**63
    return isinstance(value, float)


def _ms_in_log(line: bytes) -> float | None:
    match = _ITERATION_LINE.search(line)
    return float(match[1]) if match else None


def add_note(log: Path, text: str) -> None:
    """Append a line of the launcher's own; a full disk loses it and nothing else."""
    with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as file:
        file.write(f"{NOTE}{text}\n")


def dump_stacks(processes: Iterable[psutil.Process], log: Path) -> None:
    """Let each process write its stacks to the log, which its output goes to, one after the other.

    The states of the processes, and those that do not answer, are noted there.
    """
    for process in processes:
        state = _status_field(process.pid, "State") or "unknown"
        channel = _text_of(_PROC / f"{process.pid}/wchan").strip()
        waits = f", waits in {channel}" if channel not in ("", "0") else ""
        head = f"{_name(process)}: state {state}{waits}"
        if state[0] in _CANNOT_ANSWER:
            add_note(log, f"{head}; it cannot show its stacks")
        elif not catches(process.pid, signal.SIGUSR1):
            add_note(log, head)
        else:
            add_note(log, f"{head}; its Python stacks:")
            _ask(process, log)


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal; False when nobody can say."""
    mask = _status_field(pid, "SigCgt")
    return bool(mask) and bool(int(mask, 16) >> (number - 1) & 1)


def _ask(process: psutil.Process, log: Path) -> None:
    """Ask for stacks, and wait until they are written, for at most :data:`ANSWER_S`."""
    size, has_grown = log.stat().st_size, False
    try:
        process.send_signal(signal.SIGUSR1)
    except psutil.Error:
        return
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        time.sleep(QUIET_S)
        if (new_size := log.stat().st_size) != size:
            size, has_grown = new_size, True
        elif has_grown:
            return
    if not has_grown:
        add_note(log, f"{_name(process)}: no answer within {ANSWER_S:.0f} s")


def _name(process: psutil.Process) -> str:
    """``process 4711 (rank 0)``, or with the program's name where it is no rank."""
    try:
        rank = process.environ().get("RANK")
        # A launcher of ranks on one machine may carry RANK itself; the rank is the one that trains.
        name = f"rank {rank}" if rank is not None else process.name()
    except (psutil.Error, OSError):
        name = "gone"
    return f"process {process.pid} ({name})"


def _status_field(pid: int, name: str) -> str:
    match = re.search(rf"^{name}:\s*(.*)$", _text_of(_PROC / f"{pid}/status"), re.MULTILINE)
    return match[1] if match else ""


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def count_oom_kills(proc: Path = _PROC) -> int | None:
    """Return the processes that the kernel's out-of-memory killer took on this machine so far.

    The evidence behind ``oom-host``; None where the kernel does not count.

    Args:
        proc: The kernel's folder, or one with a ``vmstat`` of the same form.
    """
    match = re.search(r"^oom_kill (\d+)$", _text_of(proc / "vmstat"), re.MULTILINE)
    return int(match[1]) if match else None


def duration_text(seconds: float) -> str:
    """Return ``45 s``, ``12 min``, ``3 h 20 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"
