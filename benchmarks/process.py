"""Processes of a benchmark: each in a group of its own, ended with all it started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SOURCE_FOLDER = Path(__file__).resolve().parent.parent
_LAST_CHARACTERS = 200


def run_worker(
    job: Mapping[str, Any], prefix: Path, limit_s: float
) -> tuple[float, dict[str, Any]]:
    """Run a row.

    Args:
        job: What :mod:`benchmarks.gpu_worker` reads.
        prefix: Of its files.
        limit_s: After which it is ended.

    Returns:
        Seconds it took and its result; one with ``error`` when it failed, was ended or killed.
    """
    paths = [prefix.with_name(prefix.name + end) for end in (".job.json", ".json", ".log")]
    job_path, result_path, log_path = paths
    job_path.write_text(json.dumps(job), encoding="utf-8")
    command = ["-m", "benchmarks.gpu_worker", str(job_path), str(result_path)]
    begin = time.monotonic()
    status = run_python(command, log_path, limit_s)
    seconds = time.monotonic() - begin
    if result_path.is_file():
        result: dict[str, Any] = json.loads(result_path.read_text(encoding="utf-8"))
        return seconds, result
    return seconds, {"error": explain_status(status, limit_s, log_path)}


def run_calibration(profile: Path, device: str, limit_s: float) -> str:
    """Measure the machine's rates into ``profile``; returns why it could not, empty if it could."""
    log_path = profile.with_suffix(".log")
    command = ["-m", "deep_optimizer_states", "calibrate", "-o", str(profile)]
    command += ["--device", "cpu"] if device == "cpu" else []
    status = run_python(command, log_path, limit_s)
    return "" if profile.is_file() else explain_status(status, limit_s, log_path)


def run_python(arguments: Sequence[str], log_path: Path, limit_s: float) -> int | None:
    """Run this Python as :func:`run` does, with this checkout's packages."""
    path = [str(SOURCE_FOLDER), str(SOURCE_FOLDER / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    return run([sys.executable, "-W", "ignore", *arguments], log_path, limit_s, environment)


def run(
    command: Sequence[str],
    log_path: Path,
    limit_s: float,
    environment: Mapping[str, str],
    grace_s: float = 0.0,
    folder: Path | None = None,
) -> int | None:
    """Run a command; returns its status, None when the time ran out.

    All processes that it started end with it, however it ends.

    Args:
        command: Program and arguments.
        log_path: Gets what the command writes.
        limit_s: Seconds after which it is ended.
        environment: All of its environment.
        grace_s: Seconds between the interrupt that asks it to end and the signal that makes it.
        folder: Where it starts; None for this process's own.
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
    """End a process, its group, and what it started in groups of their own."""
    # Once a parent is gone nothing tells whose child a process was.
    started = _descendants(process.pid)
    try:
        if grace_s and process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(timeout=grace_s)
    except subprocess.TimeoutExpired:
        pass
    finally:  # whoever is impatient and presses Ctrl-C again gets here at once
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pid, begin in started.items():
            # The number may be another process's by now.
            if _processes().get(pid, (0, ""))[1] == begin:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.wait()


def _descendants(pid: int) -> dict[int, str]:
    """Processes that ``pid`` started, directly or not, each with when it began."""
    everything, parents = _processes(), {pid}
    found: dict[int, str] = {}
    while parents:
        children = {child for child, (parent, _) in everything.items() if parent in parents}
        parents = children - found.keys()
        found.update({child: everything[child][1] for child in parents})
    return found


def _processes() -> dict[int, tuple[int, str]]:
    """Every process of this machine: its parent, and when it began in ticks of the kernel."""
    found: dict[int, tuple[int, str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name stands in brackets and may hold anything.
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            found[int(path.parent.name)] = int(fields[1]), fields[19]
    return found


def explain_status(status: int | None, limit_s: float, log_path: Path) -> str:
    """Why a process left no result, in a line."""
    if status is None:
        return f"not done after {limit_s:.0f} s"
    if status == -signal.SIGKILL:
        return "killed, most likely because host memory ran out"
    lines = log_path.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    if status < 0:
        return f"ended by {signal.Signals(-status).name}: {last[-_LAST_CHARACTERS:]}"
    return f"ended with status {status}: {last[-_LAST_CHARACTERS:]}"
