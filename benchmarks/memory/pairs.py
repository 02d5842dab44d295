"""Advice for known models and machines, beside what DeepSpeed's estimators say."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import Any

from benchmarks.memory.cases import FILE
from benchmarks.memory.estimators import deepspeed_bytes
from deep_optimizer_states.predict.memory.architecture import architecture_of
from deep_optimizer_states.predict.memory.peaks import GIB
from deep_optimizer_states.predict.memory.setting import setting_of
from ds_config.ladder import Room, Task, chosen, ladder

SEQUENCE, MICRO_BATCH = 2048, 4


def pairs_table() -> str:
    """A Markdown table."""
    table = tomllib.loads(FILE.read_text(encoding="utf-8"))["pairs"]
    lines = [
        "| model | GPUs | host | first that fits | device | host, of a rank | of all "
        "| DeepSpeed's estimator: device | host, of all |",
        "|---|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    lines += [_line(table["models"][pair[0]], *pair) for pair in table["of"]]
    return "\n".join(lines)


def _line(model: dict[str, Any], name: str, gpus: int, device: int, host: int) -> str:
    architecture = replace(architecture_of(model), name=name)
    sequence = min(SEQUENCE, architecture.sequence)
    task = Task(architecture, None, sequence, MICRO_BATCH, "bf16")
    rungs = ladder(task, Room(gpus, gpus, device * GIB, host * GIB))
    best = chosen(rungs)
    start = f"| {name} | {gpus} x {device} GiB | {host} GiB |"
    if best is None:
        least = rungs[-1].peaks
        need = f"{least.device_bytes / GIB:.0f}", f"{least.host_bytes / GIB:.0f}"
        return f"{start} nothing (leanest) | {need[0]} | {need[1]} | " + (
            f"{gpus * least.host_bytes / GIB:.0f} | | |"
        )
    rung = rungs[best]
    setting = setting_of(rung.config, architecture, gpus, sequence=sequence, checkpointing=True)
    said = deepspeed_bytes(setting)
    others = f"{said[0] / GIB:.1f} | {gpus * said[1] / GIB:.0f}" if said else "none | none"
    return (
        f"{start} {rung.name} | {rung.peaks.device_bytes / GIB:.1f} | "
        f"{rung.peaks.host_bytes / GIB:.1f} | {gpus * rung.peaks.host_bytes / GIB:.0f} | {others} |"
    )
