"""Start one command in a session of its own, wait for it, and end everything it started.

Whatever happens, no process of the run is left behind and no other process is touched: a process
belongs to the run when it is in its session, descends from it, or carries its token in the
environment. The last is what finds ranks whose launcher was killed, since torchrun gives each rank
a session of its own.

The command itself is reaped last. Until then the kernel gives its number to nobody else, neither as
a process nor as a session, so that the number always means this run.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import psutil

TOKEN_VARIABLE = "DOS_RUN_TOKENS"
"""Environment variable that marks the processes of a run; nested runs add theirs after a colon."""
GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""
POLL_S = 0.05


@dataclass(frozen=True)
class Ending:
    """How a command came to its end."""

    exit_code: int
    """The command's own; 128 + signal when a signal ended it."""
    seconds: float
    """From start to end."""
    stop_signal: int | None = None
    """Signal that asked us to stop; None when nobody did."""
    timed_out: bool = False
    """Whether we ended it because its time was over."""


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


def supervise(
    command: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    log: Path,
    timeout_s: float | None = None,
    echo: bool = False,
) -> Ending:
    """Run ``command`` to its end, its output and errors appended to ``log``.

    SIGINT, SIGTERM and SIGHUP sent to us end the command: SIGTERM to each of its processes, SIGKILL
    to what is left after :data:`GRACE_S`, or at once when a second signal comes.

    Args:
        command: program and arguments; no shell reads them.
        cwd: folder it runs in.
        environment: its whole environment.
        log: file to append to; written by the command itself, so that it loses nothing when we die.
        timeout_s: seconds it may take; None for no limit.
        echo: copy the log to our standard output as it grows.

    Raises:
        OSError: the log cannot be opened or the program cannot be started.
    """
    token = secrets.token_hex(16)
    tokens = [*filter(None, environment.get(TOKEN_VARIABLE, "").split(":")), token]
    marked = {**environment, TOKEN_VARIABLE: ":".join(tokens)}
    with log.open("ab") as output, _StopRequests() as stop:
        started = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=marked,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        timed_out = False
        try:
            with _echoing(log) if echo else contextlib.nullcontext():
                timed_out = _wait(process, stop, started, timeout_s)
                # Stopped or left behind: nothing of the run may outlive it.
                _end_members(process, token, stop)
        finally:
            _kill_members(process, token)
        code = process.wait()
        return Ending(
            exit_code=128 - code if code < 0 else code,
            seconds=time.monotonic() - started,
            stop_signal=stop.signal,
            timed_out=timed_out,
        )


def _wait(
    process: subprocess.Popen[bytes], stop: _StopRequests, started: float, timeout_s: float | None
) -> bool:
    """Wait for the end of the command, a signal or the time limit; True for the last."""
    while not _has_ended(process) and stop.signal is None:
        if timeout_s is not None and time.monotonic() - started > timeout_s:
            return True
        time.sleep(POLL_S)
    return False


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the command has ended, without reaping it."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_members(process: subprocess.Popen[bytes], token: str, stop: _StopRequests) -> None:
    """Ask every process of the run to end, and wait for at most the grace."""
    for member in _members(process.pid, token):
        with contextlib.suppress(psutil.Error):
            member.terminate()
    signals_seen = stop.count
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and stop.count == signals_seen:
        if not _members(process.pid, token):
            return
        time.sleep(POLL_S)


def _kill_members(process: subprocess.Popen[bytes], token: str) -> None:
    """Kill what is left of the run, again while it starts new processes."""
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline:
        members = _members(process.pid, token)
        if not members:
            return
        for member in members:
            with contextlib.suppress(psutil.Error):
                member.kill()
        time.sleep(POLL_S)


def _members(leader: int, token: str) -> list[psutil.Process]:
    """Living processes of the run. psutil tells a reused process id from the process we saw."""
    return [process for process in psutil.process_iter() if _belongs(process, leader, token)]


def _belongs(process: psutil.Process, leader: int, token: str) -> bool:
    if process.pid == os.getpid():
        return False
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if process.pid == leader or os.getsid(process.pid) == leader:
            return True
        return token in process.environ().get(TOKEN_VARIABLE, "").split(":")
    except (psutil.Error, OSError):  # it ended meanwhile, or is another user's
        return False


@contextlib.contextmanager
def _echoing(log: Path) -> Iterator[None]:
    """Copy what is appended to ``log`` to standard output until the block ends."""
    ended = threading.Event()
    start = log.stat().st_size
    thread = threading.Thread(target=_copy_log, args=(log, start, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _copy_log(log: Path, start: int, ended: threading.Event) -> None:
    output = sys.stdout.fileno()
    with log.open("rb") as file:
        file.seek(start)
        while True:
            last = ended.is_set()  # looked at before the read: nothing is written after the end
            try:
                while chunk := file.read(65_536):
                    while chunk:
                        chunk = chunk[os.write(output, chunk) :]
            except BrokenPipeError:
                # The reader has gone (`| head`); the run goes on without it.
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)
                return
            if last:
                return
            ended.wait(POLL_S)
