"""Piece ``facts``: what machine this is. ``python -m benchmarks.gpu_check.facts FACTS.json``."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

GIB = 2**30
_PACKAGES = (
    "triton",
    "deepspeed",
    "megatron-core",
    "transformers",
    "numpy",
    "pydantic",
    "ninja",
    "setuptools",
    "pytest",
    "pytest-timeout",
)
_PROGRAMS = ("c++", "ninja", "nvcc", "compute-sanitizer")
_HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage"
_GPU_QUERY = "name,driver_version,memory.total,pcie.link.gen.max,pcie.link.gen.current"
_GPU_QUERY += ",pcie.link.width.current"


def machine_facts() -> dict[str, Any]:
    """Everything by name; ``key`` holds what has to be the same for results to be this machine's.

    Raises:
        ImportError: torch cannot be imported.
    """
    import torch

    cuda = torch.cuda.is_available()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count() if cuda else 0)]
    python = platform.python_version()
    key = [_processor(), os.cpu_count(), gpus, python, torch.__version__, platform.release()]
    on = f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU"
    found: dict[str, Any] = {
        "machine": f"{on}, {_processor()}, {os.cpu_count()} CPUs, Python {python}, torch "
        f"{torch.__version__}",
        "cuda": cuda,
        "key": key,
        "torch_cuda": torch.version.cuda,
        "kernel": platform.release(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "memory": _memory(),
        "memory_limit": _text("/sys/fs/cgroup/memory.max"),
        "huge_pages": _text(f"{_HUGE_PAGES}/enabled"),
        "huge_pages_shared": _text(f"{_HUGE_PAGES}/shmem_enabled"),
        "locked_memory": _locked_memory(),
        "free_disk_gib": round(shutil.disk_usage(".").free / GIB, 1),
        "python_headers": Path(sysconfig.get_path("include"), "Python.h").is_file(),
        "programs": {name: shutil.which(name) for name in _PROGRAMS},
        "packages": {name: _version(name) for name in _PACKAGES},
    }
    found["gpus"] = _said(["nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader"])
    return found


def _processor() -> str:
    lines = _text("/proc/cpuinfo").splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _memory() -> dict[str, float]:
    """GiB of host memory, as the kernel names it."""
    found = {}
    for line in _text("/proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            found[name] = round(int(value.split()[0]) / 2**20, 1)
    return found


def _locked_memory() -> str:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / GIB:.2f} GiB"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "not there"


def _said(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return f"no {command[0]}"


def main(argv: Sequence[str]) -> int:
    """Write the facts as JSON to the file given, and to standard output for a person."""
    facts = machine_facts()
    Path(argv[0]).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    for name, value in facts.items():
        if name != "key":
            sys.stdout.write(f"* {name}: {value}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
