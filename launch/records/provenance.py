"""Where a run came from: commit, versions, hardware, environment. Nothing here imports torch."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from configs.files import ROOT
from deep_optimizer_states.cores import usable_cores

PACKAGES = ("torch", "deepspeed", "megatron-core", "numpy", "pydantic", "triton")
"""Packages whose version can change a result or a time."""

_RELEVANT = re.compile(
    r"^(OMP_|MKL_|KMP_|GOMP_|ATEN_|ONEDNN_|DNNL_|NCCL_|GLOO_|CUDA_|HIP_|ROCR_|NVIDIA_|TORCH"
    r"|PYTORCH_|DS_|DEEPSPEED_|MALLOC_|SLURM_(JOB_ID|NNODES|NTASKS|CPUS)|LD_PRELOAD$|LD_LIBRARY_PATH$|PYTHONHASHSEED$)"
)
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_SECRET_IN_URL = re.compile(r"(\w+://)[^/\s@]+@")
REDACTED = "(redacted)"


def provenance(environment: Mapping[str, str]) -> dict[str, Any]:
    """Everything about this machine and checkout that a reader of the results may ask for.

    Args:
        environment: the ranks' environment; only names that matter are kept.
    """
    return {
        **machine_and_checkout(),
        "argv": [redact(argument) for argument in sys.argv],
        "environment": relevant_environment(environment),
    }


@functools.cache
def machine_and_checkout() -> dict[str, Any]:
    """The part that is the same for every run of this process."""
    return {
        "git": git_state(ROOT),
        "versions": {"python": platform.python_version(), **_package_versions()},
        "gpus": _gpus(),
        "cpu": _cpu(),
        "numa": _numa(),
        "affinity": number_ranges(os.sched_getaffinity(0)),
        "host_memory_bytes": psutil.virtual_memory().total,
        "platform": platform.platform(),
    }


def relevant_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that can change a run, sorted by name; secrets redacted, all others left out."""
    return {
        name: REDACTED if _SECRET_NAME.search(name) else redact(value)
        for name, value in sorted(environment.items())
        if _RELEVANT.match(name)
    }


def redact(text: str) -> str:
    """``text`` without the user and password of a URL."""
    return _SECRET_IN_URL.sub(rf"\1{REDACTED}@", text)


def git_state(root: Path) -> dict[str, Any] | None:
    """Commit, whether files differ from it, and a hash of what differs; None outside a checkout."""
    if not (root / ".git").exists():
        return None
    commit = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    changes = _output(["git", "-C", str(root), "status", "--porcelain"])
    if commit is None or changes is None:
        return None
    state: dict[str, Any] = {"commit": commit.strip(), "dirty": bool(changes.strip())}
    if state["dirty"]:
        difference = _output(["git", "-C", str(root), "diff", "HEAD", "--no-ext-diff"]) or ""
        text = changes + difference
        state["changes_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    return state


def _package_versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _gpus() -> list[dict[str, str]]:
    fields = "name,driver_version,memory.total"
    listing = _output(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"])
    rows = [line.split(", ") for line in (listing or "").splitlines()]
    return [
        dict(zip(("name", "driver", "memory"), row, strict=True)) for row in rows if len(row) == 3
    ]


def _cpu() -> dict[str, Any]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return {
        "model": model[1] if model else platform.processor() or platform.machine(),
        "cores_physical": psutil.cpu_count(logical=False),
        "cores_logical": os.cpu_count(),
        "cores_usable": usable_cores(),
    }


def _numa() -> list[dict[str, Any]]:
    """Cores and memory of each NUMA node; empty where the kernel shows none."""
    nodes = []
    for folder in sorted(Path("/sys/devices/system/node").glob("node[0-9]*")):
        try:
            cores = (folder / "cpulist").read_text(encoding="ascii").strip()
            memory = (folder / "meminfo").read_text(encoding="ascii")
        except OSError:
            continue
        total = re.search(r"MemTotal:\s*(\d+) kB", memory)
        size = int(total[1]) * 1024 if total else None
        nodes.append({"node": folder.name, "cores": cores, "memory_bytes": size})
    return nodes


def number_ranges(numbers: Collection[int]) -> str:
    """``0-3,8`` for 0, 1, 2, 3 and 8: a set of cores as the kernel writes it."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _output(command: list[str]) -> str | None:
    """Standard output of a command that may be missing, fail or hang; None then."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
