"""What makes two runs the same, and where a run came from. Nothing here imports torch.

Two runs are the same when the point with its data is, and what it was run with: code, versions,
processors. The code of a run is the files of the checkout that its programs import. Nothing else of
the checkout can change what a run does, so nothing else makes a result an old one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from importlib import metadata
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

import psutil

from configs.files import ROOT
from configs.schema import Point
from deep_optimizer_states.core.host import usable_cores
from launch.ds_json import patches

SETUP = ("code", "versions", "gpus", "cpu")
"""Parts of the provenance that can change a run's times or results."""
PACKAGES = ("torch", "deepspeed", "megatron-core", "numpy", "pydantic", "triton")
"""Packages whose version can change a result or a time."""
PLUGIN = ROOT / "src" / "deep_optimizer_states"
REDACTED = "(redacted)"
_KEY_CHARACTERS = 16
_SHOWN_FILES = 3
_RELEVANT = re.compile(
    r"^(OMP_|MKL_|KMP_|GOMP_|ATEN_|ONEDNN_|DNNL_|NCCL_|GLOO_|CUDA_|HIP_|ROCR_|NVIDIA_|TORCH"
    r"|PYTORCH_|DS_|DEEPSPEED_|MALLOC_|SLURM_(JOB_ID|NNODES|NTASKS|CPUS)|LD_PRELOAD$|LD_LIBRARY_PATH$|PYTHONHASHSEED$)"
)
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
_SECRET_IN_URL = re.compile(r"(\w+://)[^/\s@]+@")


def point_key(point: Point, data: Mapping[str, Any]) -> str:
    """Return the key of a point's settings and :func:`data_facts`; its name is none of them."""
    return f"{settings_key(point)}-{_digest(data)}"


def settings_key(point: Point) -> str:
    """Return the part of :func:`point_key` that can be told before the data is there."""
    settings = point.model_dump(mode="json", exclude={"name", "data_prefix"})
    rows = point.study.companions.values()
    settings["study"] = {
        "patches": patches(point),
        "companions": [row.model_dump() for row in rows if point.value(row.field)],
    }
    return _digest(settings)


def setup_key(provenance: Mapping[str, Any]) -> str:
    """Return the key of what a run was run with: code, versions, processors."""
    return _digest([provenance.get(part) for part in SETUP])


def code_facts(files: Mapping[str, str], settings: object) -> dict[str, Any]:
    """Return the part ``code`` of the provenance, of files and what they make of a point."""
    return {"sha256": _digest(files), "settings": _digest(settings), "files": dict(files)}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Say in what a run's :data:`SETUP` differs from today's: ``code changed: launch/cli.py``."""
    found = []
    code = [part.get("code") or {} for part in (before, now)]
    paths = _differing(*(part.get("files") or {} for part in code))
    more = f" and {len(paths) - _SHOWN_FILES} more" if len(paths) > _SHOWN_FILES else ""
    if paths:
        found.append(f"code changed: {', '.join(paths[:_SHOWN_FILES])}{more}")
    elif code[0].get("settings") != code[1].get("settings"):
        found.append("DeepSpeed's JSON, arguments or variables changed")
    old, new = (dict(part.get("versions") or {}) for part in (before, now))
    found += [f"{name} was {old.get(name)}, is {new.get(name)}" for name in _differing(old, new)]
    for part, word in (("gpus", "GPUs"), ("cpu", "processor")):
        if before.get(part) != now.get(part):
            found.append(f"{word} changed")
    return "; ".join(found)


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]


def data_facts(prefix: str) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of Megatron's two files, by their endings.

    Raises:
        OSError: a file cannot be read.
    """
    found = {}
    for end in (".bin", ".idx"):
        path = Path(prefix + end)
        stat = path.stat()
        digest = _file_digest(path, stat.st_size, stat.st_mtime_ns)
        found[end] = {"bytes": stat.st_size, "sha256": digest}
    return found


@functools.cache
def _file_digest(path: Path, size: int, mtime_ns: int) -> str:
    """Read once while size and time of change stay; a corpus can have many GB."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:_KEY_CHARACTERS]


def code_of(entries: Iterable[str]) -> dict[str, str]:
    """Hash the files that programs execute, by their paths in the checkout.

    Programs are modules or paths of scripts; those that are not the checkout's are left out.
    Imports within functions count. Files of the plugin that are no Python (kernels, models) count
    where any of the plugin does.
    """
    found = set(_files_of(tuple(entries)))
    if any(path.is_relative_to(PLUGIN) for path in found):
        every = (path for path in PLUGIN.rglob("*") if path.is_file())
        found |= {path for path in every if path.suffix not in (".py", ".pyc")}
    return {path.relative_to(ROOT).as_posix(): _hash(path) for path in sorted(found)}


_parsing = threading.Lock()


@functools.cache
def _files_of(entries: tuple[str, ...]) -> frozenset[Path]:
    """Files of ours that importing the entries executes; other packages are not looked for."""
    finder = ModuleFinder(path=[str(ROOT), str(ROOT / "src")])
    # Python 3.11 raises SystemError where two threads parse at once.
    with _parsing:
        for entry in entries:
            with contextlib.suppress(ImportError, SyntaxError):
                if not Path(entry).is_file():
                    finder.import_hook(entry)
                elif Path(entry).is_relative_to(ROOT):
                    finder.load_file(entry)
    names = (getattr(module, "__file__", None) for module in finder.modules.values())
    return frozenset(Path(name) for name in names if name)


@functools.cache
def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:_KEY_CHARACTERS]
    except OSError:
        return "unreadable"


def provenance(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what a reader of the results may ask about this machine, checkout and environment."""
    return {
        **machine_and_checkout(),
        "argv": [redact(argument) for argument in sys.argv],
        "environment": relevant_environment(environment),
    }


@functools.cache
def machine_and_checkout() -> dict[str, Any]:
    """Return the part of the provenance that is the same for every run of this process."""
    return {
        "git": git_state(ROOT),
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in PACKAGES},
        },
        "gpus": _gpus(),
        "cpu": _cpu(),
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


def what_chooses_kernels() -> dict[str, Any]:
    """Return what decides which of torch's kernels this machine runs on its processor."""
    cpuinfo = _cpuinfo()
    found = {name: _first(name, cpuinfo) for name in ("model name", "flags", "Features")}
    environment = relevant_environment(os.environ)
    return {**found, "torch": _version("torch"), "environment": environment}


def redact(text: str) -> str:
    """Return ``text`` without the user and password of a URL."""
    return _SECRET_IN_URL.sub(rf"\1{REDACTED}@", text)


def git_state(root: Path) -> dict[str, Any] | None:
    """Return commit, whether files differ, and a hash of what differs; None outside a checkout."""
    if not (root / ".git").exists():
        return None
    commit = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    changed = _output(["git", "-C", str(root), "status", "--porcelain"])
    if commit is None or changed is None:
        return None
    state: dict[str, Any] = {"commit": commit.strip(), "dirty": bool(changed.strip())}
    if state["dirty"]:
        difference = _output(["git", "-C", str(root), "diff", "HEAD", "--no-ext-diff"]) or ""
        text = changed + difference
        state["changes_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    return state


def _gpus() -> list[dict[str, str]]:
    fields = "name,driver_version,memory.total"
    listing = _output(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"])
    rows = [line.split(", ") for line in (listing or "").splitlines()]
    return [
        dict(zip(("name", "driver", "memory"), row, strict=True)) for row in rows if len(row) == 3
    ]


def _cpu() -> dict[str, Any]:
    model = _first("model name", _cpuinfo())
    return {
        "model": model or platform.processor() or platform.machine(),
        "cores_physical": psutil.cpu_count(logical=False),
        "cores_logical": os.cpu_count(),
        "cores_usable": usable_cores(),
    }


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _first(name: str, cpuinfo: str) -> str:
    """What Linux says of the first processor under a name."""
    found = re.search(rf"^{name}\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return found[1] if found else ""


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _output(command: list[str]) -> str | None:
    """Standard output of a command that may be missing, fail or hang; None then."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
