"""Processes of a benchmark: each in a group of its own, ended with all it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SOURCE_FOLDER = Path(__file__).resolve().parent.parent
_LAST_CHARACTERS = 200


def run(
    command: Sequence[str],
    log_path: Path,
    limit_s: float,
    environment: Mapping[str, str],
    grace_s: float,
    folder: Path,
) -> int | None:
    """Run a command; returns its status, None when the time ran out.

    All processes that it started end with it, however it ends.

    Args:
        command: Program and arguments.
        log_path: Gets what the command writes.
        limit_s: Seconds after which it is ended.
        environment: All of its environment.
        grace_s: Seconds between the interrupt that asks it to end and the signal that makes it.
        folder: Where it starts.
    """
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process, grace_s)


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    # Once a parent is gone nothing tells whose child a process was.
    started = _descendants(process.pid)
    try:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(timeout=grace_s)
    except subprocess.TimeoutExpired:
        pass
    finally:  # whoever is impatient and presses Ctrl-C again gets here at once
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for child in started:
            with contextlib.suppress(Exception):  # its number may be another process's by now
                child.kill()
        process.wait()


def _descendants(pid: int) -> Sequence[Any]:
    """Return the processes that ``pid`` started, directly or not, in its own group or others.

    Nothing that runs before psutil is installed starts a group of its own.
    """
    try:
        import psutil
    except ImportError:
        return ()
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return ()


def explain_status(status: int | None, limit_s: float, log_path: Path) -> str:
    """Return in a line why a process left no result."""
    if status is None:
        return f"not done after {limit_s:.0f} s"
    if status == -signal.SIGKILL:
        return "killed, most likely because host memory ran out"
    lines = log_path.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    if status < 0:
        return f"ended by {signal.Signals(-status).name}: {last[-_LAST_CHARACTERS:]}"
    return f"ended with status {status}: {last[-_LAST_CHARACTERS:]}"
