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
    """Run this Python; returns its status, None when the time ran out.

    What it started ends with it, however it ends.
    """
    path = [str(SOURCE_FOLDER), str(SOURCE_FOLDER / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


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
