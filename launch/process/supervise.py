"""Start one command and its companions, wait for its end, and end everything it started.

Whatever happens, no process of the run is left behind and no other process is touched. A process
belongs to the run when it is in the session of one of its commands, or carries the run's token in
its environment. The token is what finds ranks whose launcher was killed, since torchrun gives each
rank a session of its own, and what is left of a run whose driver is dead.

The command itself is reaped last. Until then the kernel gives its number to nobody else, neither as
a process nor as a session, so that the number always means this run.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from launch.process.watch import (
    POLL_S,
    ProgressWatch,
    add_note,
    count_oom_kills,
    dump_stacks,
    echoing,
)

TOKEN_VARIABLE = "DOS_RUN_TOKEN"
"""Environment variable that marks the processes of a run."""
GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""
YOUNG_S = 1.0
"""Age below which a process may still be about to load its program."""
WARM_S = 600.0
"""Longest time until a companion is ready."""
_TOKEN = re.compile(r"[0-9a-f]{32}")


class Members:
    """Living processes of one run."""

    def __init__(self, token: str) -> None:
        """Know the run by its token; ``leaders`` come as its commands start."""
        if not _TOKEN.fullmatch(token):
            raise ValueError(f"{token!r} is not the token of a run")
        self._token = token
        self._strangers: set[psutil.Process] = set()
        self.leaders: set[int] = set()
        """Processes that were started in sessions of their own and are not reaped yet."""

    def all(self) -> list[psutil.Process]:
        """Return every living one. psutil tells a reused process id from the process we saw."""
        return [process for process in psutil.process_iter() if self._has(process)]

    def sample(self) -> list[psutil.Process]:
        """Return every living one, cheaply: a process that was a stranger is not asked again.

        For measuring alone: an id that is reused between two calls keeps its old verdict. One
        thread may call it.
        """
        every = set(psutil.process_iter())
        ours = {process for process in every - self._strangers if self._has(process)}
        # What has just been forked has no environment until its program is loaded.
        self._strangers = {process for process in every - ours if _age_s(process) > YOUNG_S}
        return list(ours)

    def end(self) -> None:
        """Ask every one to end; wait until they have, for at most the grace."""
        for member in self.all():
            with contextlib.suppress(psutil.Error):
                member.terminate()
                if member.status() == psutil.STATUS_STOPPED:
                    member.resume()  # a stopped process gets its signal when it goes on
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and self.all():
            time.sleep(POLL_S)

    def kill(self) -> None:
        """Kill what is left, again while it starts new processes."""
        deadline = time.monotonic() + GRACE_S
        while members := self.all():
            for member in members:
                with contextlib.suppress(psutil.Error):
                    member.kill()
            if time.monotonic() > deadline:  # looked at last: whoever is there is killed once
                return
            time.sleep(POLL_S)

    def _has(self, process: psutil.Process) -> bool:
        if process.pid == os.getpid():
            return False
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            if process.pid in self.leaders or os.getsid(process.pid) in self.leaders:
                return True
            # Asked again here: no token would be everybody's.
            return bool(self._token) and process.environ().get(TOKEN_VARIABLE) == self._token
        except (psutil.Error, OSError):  # it ended meanwhile, or is another user's
            return False


def _age_s(process: psutil.Process) -> float:
    try:
        return time.time() - float(process.create_time())
    except psutil.Error:
        return 0.0


def end_leftovers(token: str) -> list[int]:
    """End what is still alive of a run whose driver is dead.

    Only processes that carry the run's token in their environment are touched: SIGTERM, then
    SIGKILL after the grace.

    Returns:
        Ids of the processes that were there; empty as well when ``token`` is not one.
    """
    try:
        members = Members(token)
    except ValueError:
        return []
    found = [process.pid for process in members.all()]
    if found:
        members.end()
        members.kill()
    return found


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
class ProcessSpec:
    """What to start, and when to give it up."""

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
    timeout_s: float | None = None
    """Seconds it may take; None for no limit."""
    hang_s: float | None = None
    """Seconds without progress; None adapts them to the run (``watch``), 0: no limit."""
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    """Mark of its processes."""


@dataclass(frozen=True)
class Ending:
    """How a command came to its end."""

    exit_code: int = 1
    """The command's own; 128 + signal when a signal ended it."""
    seconds: float = 0.0
    """From start to end."""
    stop_signal: int | None = None
    """Signal that asked us to stop; None when nobody did."""
    given_up: tuple[str, str] | None = None
    """Status and cause of a run that we ended ourselves: ``timeout``, ``hang``, or ``failed`` where
    a companion ended before it."""
    oom_kills: int | None = None
    """Processes the kernel's out-of-memory killer took meanwhile; None where it does not say."""


Beside = Callable[[Members], AbstractContextManager[object]]
"""Opened on the run's processes while the command runs."""
Show = Callable[[ProgressWatch], object]
"""Called again and again while the command runs, with how far it has come."""


def supervise(
    job: ProcessSpec, beside: Beside | None = None, echo: bool = False, show: Show | None = None
) -> Ending:
    """Run a job to its end.

    SIGINT, SIGTERM and SIGHUP sent to us end the command: SIGTERM to each of its processes, SIGKILL
    to what is left after a grace. A run that stops to make progress writes its stacks to the log
    before it is ended.

    Args:
        job: what to start.
        beside: opened when the command has started, closed when everything of it has ended.
        echo: copy the log to our standard output as it grows.
        show: told how far the command has come.

    Raises:
        OSError: the log cannot be opened or a program cannot be started.
    """
    kills_before, started = count_oom_kills(), time.monotonic()
    with job.log.open("ab") as output, _stop_requests() as stops:
        run = _Run(job, output, stops, show)
        try:
            with echoing(job.log) if echo else contextlib.nullcontext():
                given_up = run.run(beside)
        finally:
            run.members.kill()
            code = run.reap()
        if code is None:  # the command was never started
            code = 128 + stops[-1] if stops else 1
        kills = count_oom_kills()
        return Ending(
            exit_code=code,
            seconds=time.monotonic() - started,
            stop_signal=stops[-1] if stops else None,
            given_up=given_up,
            oom_kills=None if kills is None or kills_before is None else kills - kills_before,
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

    def __init__(
        self, job: ProcessSpec, output: IO[bytes], stops: list[int], show: Show | None
    ) -> None:
        self.members = Members(job.token)
        self._job = job
        self._output = output
        self._stops = stops
        self._show = show
        self._companions: list[tuple[Companion, subprocess.Popen[bytes]]] = []
        self._main: subprocess.Popen[bytes] | None = None

    def run(self, beside: Beside | None) -> tuple[str, str] | None:
        """Start everything and wait for its end; the reason where we end it before."""
        job, begin = self._job, time.monotonic()
        for companion in job.companions:
            self._companions.append((companion, self._start(companion.command)))
        lost = self._warm_up()
        if lost or self._stops:
            self.members.end()
            return ("failed", lost) if lost else None
        # The watch comes first: what the command writes at once is progress too.
        watch = ProgressWatch(job.log, job.metrics, job.hang_s)
        self._main = self._start(job.command)
        with beside(self.members) if beside is not None else contextlib.nullcontext():
            given_up = self._wait(self._main, watch, begin)
            if given_up is not None and given_up[0] == "hang":
                add_note(job.log, f"{watch.stall}; what its processes do:")
                dump_stacks(self.members.all(), job.log)
                add_note(job.log, "ending the run")
            # Stopped or left behind: nothing of the run may outlive it.
            self.members.end()
        return given_up

    def reap(self) -> int | None:
        """Give the processes' numbers back; the exit code of the command if it was started."""
        for _, process in self._companions:
            # No deadline: it was killed before, and is gone once the kernel lets it.
            process.wait()
        if self._main is None:
            return None
        # No deadline: the same.
        code = self._main.wait()
        return 128 - code if code < 0 else code

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        job = self._job
        process = subprocess.Popen(
            command,
            cwd=job.cwd,
            env={**job.environment, TOKEN_VARIABLE: job.token},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.members.leaders.add(process.pid)
        return process

    def _warm_up(self) -> str:
        """Wait until the companions are ready; why not, if they never are."""
        deadline = time.monotonic() + WARM_S
        while not all(companion.ready.exists() for companion, _ in self._companions):
            if self._stops or (lost := self._lost_companion()):
                return "" if self._stops else lost
            if time.monotonic() > deadline:
                names = ", ".join(companion.name for companion in self._job.companions)
                return f"{names}: not ready after {WARM_S:.0f} s"
            time.sleep(POLL_S)
        return ""

    def _wait(
        self, main: subprocess.Popen[bytes], watch: ProgressWatch, begin: float
    ) -> tuple[str, str] | None:
        """Wait for the end of the command, or for a reason to end it."""
        timeout_s = self._job.timeout_s
        while _exit_code(main) is None and not self._stops:
            passed_s = time.monotonic() - begin
            if timeout_s is not None and passed_s > timeout_s:
                return "timeout", f"not done after {passed_s:.0f} s; ended by --timeout"
            is_still = watch.look()
            if self._show is not None:
                self._show(watch)
            if is_still:
                return "hang", f"{watch.stall}; what its processes did is at the end of the log"
            if (lost := self._lost_companion()) and _exit_code(main) is None:
                return "failed", lost
            time.sleep(POLL_S)
        return None

    def _lost_companion(self) -> str:
        """Why a companion is not there any more; empty while all are."""
        for companion, process in self._companions:
            code = _exit_code(process)
            if code is not None:
                when = "before it was ready" if self._main is None else "before the run did"
                return f"{companion.name} ended {when}, exit code {code}"
        return ""


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Exit code of a process that has ended, as a shell gives it, without reaping it."""
    result = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else 128 + result.si_status
