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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from launch.process.growing import echoing
from launch.process.job import DEFAULT_LIMITS, Companion, Ending, Job, Limits
from launch.process.members import POLL_S, Members, mark
from launch.process.oom_kills import OomKills
from launch.process.progress_watch import ProgressWatch
from launch.process.stacks import add_note, dump_stacks

WARM_S = 600.0
"""Longest time until a companion is ready."""


@contextlib.contextmanager
def stop_requests() -> Iterator[list[int]]:
    """SIGINT, SIGTERM and SIGHUP, noted instead of dying of them; in the main thread alone."""
    noted: list[int] = []
    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup's choice stays
                previous[number] = signal.signal(number, lambda got, _: noted.append(got))
    try:
        yield noted
    finally:
        for known, handler in previous.items():
            signal.signal(known, handler)


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
    with job.log.open("ab") as output, stop_requests() as stops:
        processes = _Processes(job, members, output)
        try:
            with echoing(job.log) if echo else contextlib.nullcontext():
                ending = _run(processes, limits, stops, beside)
        finally:
            members.kill()
            code = processes.reap()
        if code is None:  # the command was never started
            code = 128 + stops[-1] if stops else 1
        return replace(
            ending,
            exit_code=code,
            seconds=time.monotonic() - started,
            stop_signal=stops[-1] if stops else None,
            oom_kills=kills.since(),
        )


class _Processes:
    """The commands of a job that have been started and not been reaped."""

    def __init__(self, job: Job, members: Members, output: Any) -> None:  # noqa: ANN401 - a file
        self.job = job
        self.members = members
        self._output = output
        self._companions: list[tuple[Companion, subprocess.Popen[bytes]]] = []
        self._main: subprocess.Popen[bytes] | None = None

    def start_companions(self) -> None:
        for companion in self.job.companions:
            self._companions.append((companion, self._start(companion.command)))

    def start(self) -> None:
        self._main = self._start(self.job.command)

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
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


def _run(processes: _Processes, limits: Limits, stops: list[int], beside: Beside | None) -> Ending:
    """Start everything and wait; the reason to end it, in an otherwise empty ending."""
    job, members = processes.job, processes.members
    begin = time.monotonic()
    processes.start_companions()
    if (ending := _warm_up(processes, stops)) is not None:
        _end(members, stops)
        return ending
    # The watch comes first: what the command writes at once is progress too.
    watch = ProgressWatch(job.log, job.metrics, limits.hang_s)
    processes.start()
    with beside(members) if beside is not None else contextlib.nullcontext():
        ending = _wait(processes, watch, limits, stops, begin)
        if ending.stall is not None:
            add_note(job.log, f"{ending.stall.describe()}; what its processes do:")
            dump_stacks(members.all(), job.log)
            add_note(job.log, "ending the run")
        # Stopped or left behind: nothing of the run may outlive it.
        _end(members, stops)
    return ending


def _end(members: Members, stops: list[int]) -> None:
    seen = len(stops)
    members.end(hurry=lambda: len(stops) != seen)


def _warm_up(processes: _Processes, stops: list[int]) -> Ending | None:
    """Wait until the companions are ready; why not, if they never are."""
    deadline = time.monotonic() + WARM_S
    while not processes.are_ready:
        if stops:
            return Ending()
        if lost := processes.lost_companion():
            return Ending(companion=lost)
        if time.monotonic() > deadline:
            names = ", ".join(companion.name for companion in processes.job.companions)
            return Ending(companion=f"{names}: not ready after {WARM_S:.0f} s")
        time.sleep(POLL_S)
    return None


def _wait(
    processes: _Processes, watch: ProgressWatch, limits: Limits, stops: list[int], begin: float
) -> Ending:
    """Wait for the end of the command, or for a reason to end it."""
    while not processes.has_ended and not stops:
        if limits.timeout_s is not None and time.monotonic() - begin > limits.timeout_s:
            return Ending(timed_out=True)
        if stall := watch.look():
            return Ending(stall=stall)
        if (lost := processes.lost_companion()) and not processes.has_ended:
            return Ending(companion=lost)
        time.sleep(POLL_S)
    return Ending()
