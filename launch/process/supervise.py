"""Start one command and what runs beside it, wait for its end, and end everything it started.

Whatever happens, no process of the run is left behind and no other process is touched (see
``members``). The command itself is reaped last. Until then the kernel gives its number to nobody
else, neither as a process nor as a session, so that the number always means this run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, Self

from launch.process.echo import echoing
from launch.process.job import DEFAULT_LIMITS, Companion, Ending, Job, Limits
from launch.process.members import POLL_S, Members, mark
from launch.process.oom_kills import OomKills
from launch.process.progress_watch import ProgressWatch
from launch.process.stacks import add_note, dump_stacks

WARM_S = 600.0
"""Longest time until a companion is ready."""


class _StopRequests:
    """Counts SIGINT, SIGTERM and SIGHUP instead of dying of them, in the main thread."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.count = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:  # nohup's choice stays
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self.count += 1


Beside = Callable[[Members], AbstractContextManager[object]]
"""Opened on the run's processes while the command runs."""


def supervise(
    job: Job,
    limits: Limits = DEFAULT_LIMITS,
    beside: Beside | None = None,
    echo: bool = False,
) -> Ending:
    """Run a job to its end.

    SIGINT, SIGTERM and SIGHUP sent to us end the command: SIGTERM to each of its processes, SIGKILL
    to what is left after a grace, or at once when a second signal comes. A run that stops to make
    progress writes its stacks to the log before it is ended.

    Args:
        job: what to start.
        limits: when to give it up.
        beside: opened when the command has started, closed when everything of it has ended.
        echo: copy the log to our standard output as it grows.

    Raises:
        OSError: the log cannot be opened or a program cannot be started.
    """
    members = Members(job.token)
    kills = OomKills()
    started = time.monotonic()
    with job.log.open("ab") as output, _StopRequests() as stop:
        started_ones = _Started(job, members, output)
        ending = Ending(1, 0.0)
        try:
            with echoing(job.log) if echo else contextlib.nullcontext():
                ending = _run(started_ones, limits, stop, beside)
        finally:
            members.kill()
            code = started_ones.reap()
        stopped = stop.signal is not None and code is None
        return replace(
            ending,
            exit_code=128 + (stop.signal or 0) if stopped else 1 if code is None else code,
            seconds=time.monotonic() - started,
            stop_signal=stop.signal,
            oom_kills=kills.since(),
        )


class _Started:
    """The commands of a job that have been started and not been reaped."""

    def __init__(self, job: Job, members: Members, output: Any) -> None:  # noqa: ANN401 - a file
        self.job = job
        self.members = members
        self._output = output
        self._companions: list[tuple[Companion, subprocess.Popen[bytes]]] = []
        self._main: subprocess.Popen[bytes] | None = None

    def start_companions(self) -> None:
        for companion in self.job.companions:
            self._companions.append((companion, self._popen(companion.command)))

    def start(self) -> None:
        self._main = self._popen(self.job.command)

    def _popen(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command,
            cwd=self.job.cwd,
            env=mark(self.job.environment, self.job.token),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.members.leaders.add(process.pid)
        return process

    @property
    def has_ended(self) -> bool:
        return self._main is not None and _exit_code(self._main) is not None

    @property
    def are_ready(self) -> bool:
        return all(companion.ready.exists() for companion, _ in self._companions)

    def lost_companion(self) -> str:
        """Why a companion is not there any more; empty while all are."""
        for companion, process in self._companions:
            code = _exit_code(process)
            if code is not None:
                when = "before it was ready" if self._main is None else "before the run did"
                return f"{companion.name} ended {when}, exit code {code}"
        return ""

    def reap(self) -> int | None:
        """Give the processes' numbers back; the exit code of the command if it was started."""
        for _, process in self._companions:
            process.wait()
        if self._main is None:
            return None
        code = self._main.wait()
        return 128 - code if code < 0 else code


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Exit code of a process that has ended, as a shell gives it, without reaping it."""
    result = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else 128 + result.si_status


def _run(started: _Started, limits: Limits, stop: _StopRequests, beside: Beside | None) -> Ending:
    """Start everything and wait; what is wrong when we end it, in an otherwise empty ending."""
    job, members = started.job, started.members
    begin = time.monotonic()
    started.start_companions()
    ending = _warm_up(started, stop)
    if ending is None:
        # The watch comes first: what the command writes at once is progress too.
        watch = ProgressWatch(job.log, job.metrics, limits.hang_s)
        started.start()
        with beside(members) if beside is not None else contextlib.nullcontext():
            ending = _wait(started, watch, limits, stop, begin)
            if ending.stall is not None:
                add_note(job.log, f"{ending.stall.describe()}; what its processes do:")
                dump_stacks(members.all(), job.log)
                add_note(job.log, "ending the run")
            # Stopped or left behind: nothing of the run may outlive it.
            _end(members, stop)
    else:
        _end(members, stop)
    return ending


def _end(members: Members, stop: _StopRequests) -> None:
    seen = stop.count
    members.end(hurry=lambda: stop.count != seen)


def _warm_up(started: _Started, stop: _StopRequests) -> Ending | None:
    """Wait until the companions are ready; why not, if they never are."""
    deadline = time.monotonic() + WARM_S
    while not started.are_ready:
        if stop.signal is not None:
            return Ending(1, 0.0)
        if lost := started.lost_companion():
            return Ending(1, 0.0, companion=lost)
        if time.monotonic() > deadline:
            names = ", ".join(companion.name for companion in started.job.companions)
            return Ending(1, 0.0, companion=f"{names}: not ready after {WARM_S:.0f} s")
        time.sleep(POLL_S)
    return None


def _wait(
    started: _Started, watch: ProgressWatch, limits: Limits, stop: _StopRequests, begin: float
) -> Ending:
    """Wait for the end of the command, or for a reason to end it."""
    while not started.has_ended and stop.signal is None:
        if limits.timeout_s is not None and time.monotonic() - begin > limits.timeout_s:
            return Ending(1, 0.0, timed_out=True)
        if stall := watch.look():
            return Ending(1, 0.0, stall=stall)
        if (lost := started.lost_companion()) and not started.has_ended:
            return Ending(1, 0.0, companion=lost)
        time.sleep(POLL_S)
    return Ending(0, 0.0)
