"""Runs cases, a process a rank, and keeps every result as soon as it is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.memory.cases import key_of, name_of
from benchmarks.process import SOURCE_FOLDER
from launch.hosts.ranks import free_port

LIMIT_S = 600
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "65536",
}
"""glibc gives every array back to the kernel when it is freed, as a GPU's allocator counts them.

By itself it keeps arrays of up to 32 MiB in a heap that is hardly ever given back.
"""


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Results so far by the key of their case."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {found["key"]: found for found in map(json.loads, lines)}


def measure(
    cases: Iterable[dict[str, Any]], path: Path, allocator: Mapping[str, str] = ALLOCATOR
) -> int:
    """Measure the cases that have no result yet; returns how many failed.

    Args:
        cases: What to measure.
        path: Where results are, one a line.
        allocator: Environment variables of glibc's allocator; none for its own ways.
    """
    failed = 0
    for case in cases:
        if key_of(case) in read_results(path):
            continue
        result = _run(case, allocator)
        sys.stdout.write(f"{name_of(case)}: {result.get('error', 'ok')}\n")
        sys.stdout.flush()
        if "error" in result:
            failed += 1
            continue
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key_of(case), "name": name_of(case), **result}) + "\n")
    return failed


def _run(case: dict[str, Any], allocator: Mapping[str, str]) -> dict[str, Any]:
    """Peaks of a case, of the rank that needed most; or ``error``, its last line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out = folder / "peaks"
        ranks, port = range(case["ranks"]), free_port()
        processes = [_start(case, out, rank, port, allocator) for rank in ranks]
        try:
            for process in processes:
                process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {LIMIT_S} s"}
        finally:
            for process in processes:
                process.kill()
                process.wait()
        found = [_read(out.with_suffix(f".{rank}")) for rank in ranks]
        if not all(found):
            log = (folder / "log-0").read_text(encoding="utf-8", errors="replace")
            return {"error": (log.strip().splitlines() or ["no output"])[-1][-300:]}
        return max((item for item in found if item), key=lambda item: item["train_bytes"])


def _start(
    case: dict[str, Any], out: Path, rank: int, port: int, allocator: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    environment = {
        "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions"),
        **allocator,
        **os.environ,
        "PATH": os.pathsep.join((str(Path(sys.prefix) / "bin"), os.environ["PATH"])),
        "PYTHONPATH": str(SOURCE_FOLDER),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": str(case["threads"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(case["ranks"]),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.memory.rank"]
    with (out.parent / f"log-{rank}").open("wb") as log:
        return subprocess.Popen(
            [*command, json.dumps(case), str(out)],
            env=environment,
            cwd=SOURCE_FOLDER,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
