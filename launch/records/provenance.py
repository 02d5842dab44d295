"""Where a run came from: commit, versions, hardware, environment. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from configs.files import ROOT
from deep_optimizer_states.core.host import usable_cores

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
    """Return what a reader of the results may ask about this machine, checkout and environment."""
    return {
        **machine_and_checkout(),
        "argv": [redact(argument) for argument in sys.argv],
        "environment": relevant_environment(environment),
    }


@functools.cache
def machine_and_checkout() -> dict[str, Any]:
    """Return the part that is the same for every run of this process."""
    return {
        "git": git_state(ROOT),
        "versions": {"python": platform.python_version(), **_package_versions()},
        "gpus": _gpus(),
        "cpu": _cpu(),
        "numa": _numa(),
        "host_memory_bytes": psutil.virtual_memory().total,
        "platform": platform.platform(),
    }


def relevant_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that can change a run, sorted by name, with secrets redacted."""
    return {
        name: REDACTED if _SECRET_NAME.search(name) else redact(value)
        for name, value in sorted(environment.items())
        if _RELEVANT.match(name)
    }


def redact(text: str) -> str:
    """Return ``text`` without the user and password of a URL."""
    return _SECRET_IN_URL.sub(rf"\1{REDACTED}@", text)


def git_state(root: Path) -> dict[str, Any] | None:
    """Return commit, whether files differ, and a hash of what differs; None outside a checkout."""
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
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
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


def _numa() -> list[dict[str, str]]:
    """Cores of each NUMA node; empty where the kernel shows none."""
    lists = sorted(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist"))
    return [{"node": file.parent.name, "cores": file.read_text().strip()} for file in lists]


def _output(command: list[str]) -> str | None:
    """Standard output of a command that may be missing, fail or hang; None then."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
