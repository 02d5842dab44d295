"""Hardware, versions and commands of a sweep's runs, as rows of the report."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from configs.fields import shaped_links
from parse.compare.provenance import setup, versions
from parse.run_folder import Run

_GIB = 1024**3


def version_rows(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Package and version, and the commit; several where the runs do not agree."""
    found = [versions(run) | {"commit": setup(run).get("commit", "")} for run in runs]
    return _joined(found, ", ")


def hardware_rows(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """What the runs ran on; several values where they do not agree."""
    return _joined([_hardware_of(run) for run in runs], "; ")


def command_of(run: Run) -> str:
    """The command that started a run, ready for a shell; empty when not recorded."""
    command = run.run_json.get("command")
    if not isinstance(command, list):
        return ""
    text = shlex.join(str(part) for part in command)
    return "".join(c if c.isprintable() else "?" for c in text)


def _joined(tables: Sequence[dict[str, str]], separator: str) -> list[tuple[str, str]]:
    """Each key with all its values, each value once."""
    values: dict[str, dict[str, None]] = {}
    for key, value in (item for table in tables for item in table.items() if item[1]):
        values.setdefault(key, {})[value] = None
    return [(key, separator.join(found)) for key, found in values.items()]


def _hardware_of(run: Run) -> dict[str, str]:
    kept = run.provenance
    rows = {}
    if run.log.device:
        rows["model lived on"] = " ".join((run.log.device, run.hardware)).strip()
    cpu = kept.get("cpu")
    if isinstance(cpu, dict):
        rows["CPU"] = f"{cpu.get('model')}, {cpu.get('cores_usable')} usable cores"
    listed = kept.get("gpus")
    gpus = [gpu for gpu in listed if isinstance(gpu, dict)] if isinstance(listed, list) else []
    if gpus:
        rows["GPU"] = ", ".join(_gpu(gpu) for gpu in gpus)
    numa = kept.get("numa")
    if isinstance(numa, list) and numa:
        cores = [str(node.get("cores")) for node in numa if isinstance(node, dict)]
        rows["NUMA nodes"] = f"{len(cores)} (cores {'; '.join(cores)})"
    memory = kept.get("host_memory_bytes")
    if isinstance(memory, int):
        rows["host memory"] = f"{memory / _GIB:.1f} GiB"
    if isinstance(data := kept.get("data"), dict) and data.get("source"):
        rows["data"] = _data(data)
    if kept.get("platform"):
        rows["platform"] = str(kept["platform"])
    rows["type"] = _dtype(run)
    if links := shaped_links([run.fields.get("link_mbit")]):
        rows["links"] = f"{links}: what each rank sends, and what it receives"
    if run.log.world_size:
        rows["ranks"] = str(run.log.world_size)
    return rows


def _dtype(run: Run) -> str:
    """Type of the numbers, and why it is that one where the machine decided it."""
    reason = run.recorded("dtype_reason")
    return f"{run.fields.get('dtype', '')}{f', since {reason}' if reason else ''}"


def _data(data: dict[str, Any]) -> str:
    """The data's name, source, size and checksum; its files lie under their endings."""
    tokens, file = data.get("tokens"), data.get(".bin")
    size = f"{tokens:,} tokens" if isinstance(tokens, int) else "of no known size"
    digest = file.get("sha256") if isinstance(file, dict) else None
    return f"{data.get('name')} ({data['source']}), {size}, SHA-256 {digest}"


def _gpu(gpu: dict[str, Any]) -> str:
    return f"{gpu.get('name')} ({gpu.get('memory')}, driver {gpu.get('driver')})"
