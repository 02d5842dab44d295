"""Start one command and its companions, wait for its end, and end everything it started.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from launch.process.members import POLL_S, Members, mark, new_token
from launch.process.watch import OomKills, ProgressWatch, Stall, add_note, dump_stacks, echoing

WARM_S = 600.0
"""Longest time until a companion is ready."""


@dataclass(frozen=True)
class Companion:
    """A command that runs beside the ranks and ends with them."""

    name: str
    """What to call it when it fails."""
    command: Sequence[str]
    """Program and arguments."""
    ready: Path
    """File it makes when the ranks may start."""


@dataclass(frozen=True)
class Job:
    """What to start."""

    command: Sequence[str]
    """Program and arguments; no shell reads them."""
    cwd: Path
    """Folder it runs in."""
    environment: Mapping[str, str]
    """Its whole environment."""
    log: Path
    """File to append output and errors to; written by the command itself, so that it loses nothing
    when we die."""
    metrics: Path | None = None
    """Its ``metrics.jsonl``, a heartbeat beside the log; None when it writes none."""
    companions: Sequence[Companion] = ()
    """Started before it; their output goes to the log too."""
    token: str = field(default_factory=new_token)
    """Mark of its processes."""


@dataclass(frozen=True)
class Limits:
    """When to give a run up."""

    timeout_s: float | None = None
    """Seconds it may take; None for no limit."""
    hang_s: float | None = None
    """Seconds without progress; None adapts them to the run (``watch``), 0: no limit."""


@dataclass(frozen=True)
class Ending:
    """How a command came to its end."""

    exit_code: int = 1
    """The command's own; 128 + signal when a signal ended it."""
    seconds: float = 0.0
    """From start to end."""
    stop_signal: int | None = None
    """Signal that asked us to stop; None when nobody did."""
    timed_out: bool = False
    """Whether we ended it because its time was over."""
    stall: Stall | None = None
    """The silence for which we ended it."""
    companion: str = ""
    """What became of a companion that ended before the command, for which we ended all."""
    oom_kills: int | None = None
    """Processes the kernel's out-of-memory killer took meanwhile; None where it does not say."""


DEFAULT_LIMITS = Limits()
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
    kills, started = OomKills(), time.monotonic()
    with job.log.open("ab") as output, _stop_requests() as stops:
        run = _Run(job, output, stops)
        try:
            with echoing(job.log) if echo else contextlib.nullcontext():
                ending = run.run(limits, beside)
        finally:
            run.members.kill()
            code = run.reap()
        if code is None:  # the command was never started
            code = 128 + stops[-1] if stops else 1
        return replace(
            ending,
            exit_code=code,
            seconds=time.monotonic() - started,
            stop_signal=stops[-1] if stops else None,
            oom_kills=kills.since(),
        )


@contextlib.contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """Note SIGINT, SIGTERM and SIGHUP instead of dying of them; in the main thread alone."""
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


class _Run:
    """The commands of a job that have been started and not been reaped."""

    def __init__(self, job: Job, output: IO[bytes], stops: list[int]) -> None:
        self.members = Members(job.token)
        self._job = job
        self._output = output
        self._stops = stops
        self._companions: list[tuple[Companion, subprocess.Popen[bytes]]] = []
        self._main: subprocess.Popen[bytes] | None = None

    def run(self, limits: Limits, beside: Beside | None) -> Ending:
        """Start everything and wait; the reason to end it, in an otherwise empty ending."""
        job, begin = self._job, time.monotonic()
        for companion in job.companions:
            self._companions.append((companion, self._start(companion.command)))
        if (ending := self._warm_up()) is not None:
            self._end()
            return ending
        # The watch comes first: what the command writes at once is progress too.
        watch = ProgressWatch(job.log, job.metrics, limits.hang_s)
        self._main = self._start(job.command)
        with beside(self.members) if beside is not None else contextlib.nullcontext():
            ending = self._wait(self._main, watch, limits, begin)
            if ending.stall is not None:
                add_note(job.log, f"{ending.stall.describe()}; what its processes do:")
                dump_stacks(self.members.all(), job.log)
                add_note(job.log, "ending the run")
            # Stopped or left behind: nothing of the run may outlive it.
            self._end()
        return ending

    def reap(self) -> int | None:
        """Give the processes' numbers back; the exit code of the command if it was started."""
        for _, process in self._companions:
            process.wait()
        if self._main is None:
            return None
        code = self._main.wait()
        return 128 - code if code < 0 else code

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command,
            cwd=self._job.cwd,
            env=mark(self._job.environment, self._job.token),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.members.leaders.add(process.pid)
        return process

    def _warm_up(self) -> Ending | None:
        """Wait until the companions are ready; why not, if they never are."""
        deadline = time.monotonic() + WARM_S
        while not all(companion.ready.exists() for companion, _ in self._companions):
            if self._stops:
                return Ending()
            if lost := self._lost_companion():
                return Ending(companion=lost)
            if time.monotonic() > deadline:
                names = ", ".join(companion.name for companion in self._job.companions)
                return Ending(companion=f"{names}: not ready after {WARM_S:.0f} s")
            time.sleep(POLL_S)
        return None

    def _wait(
        self, main: subprocess.Popen[bytes], watch: ProgressWatch, limits: Limits, begin: float
    ) -> Ending:
        """Wait for the end of the command, or for a reason to end it."""
        while _exit_code(main) is None and not self._stops:
            if limits.timeout_s is not None and time.monotonic() - begin > limits.timeout_s:
                return Ending(timed_out=True)
            if stall := watch.look():
                return Ending(stall=stall)
            if (lost := self._lost_companion()) and _exit_code(main) is None:
                return Ending(companion=lost)
            time.sleep(POLL_S)
        return Ending()

    def _lost_companion(self) -> str:
        """Why a companion is not there any more; empty while all are."""
        for companion, process in self._companions:
            code = _exit_code(process)
            if code is not None:
                when = "before it was ready" if self._main is None else "before the run did"
                return f"{companion.name} ended {when}, exit code {code}"
        return ""

    def _end(self) -> None:
        seen = len(self._stops)
        self.members.end(hurry=lambda: len(self._stops) != seen)


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Exit code of a process that has ended, as a shell gives it, without reaping it."""
    result = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else 128 + result.si_status
