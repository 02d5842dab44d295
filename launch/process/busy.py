"""What else the machine does just before a run is timed: its times may suffer from it."""

from __future__ import annotations

import os
from typing import Any

import psutil

from launch.process.nvml import Gpus

LOOK_S = 0.5
"""Seconds over which the processors are looked at."""
BUSY_PERCENT = 20.0
"""Share of the usable cores above which others are said to disturb what is timed."""
GIB = 2**30


def look_around(gpus: Gpus) -> dict[str, Any]:
    """How busy the machine is while nothing of the run has been started.

    Args:
        gpus: those that the run will use.

    Returns:
        ``cpu_percent`` (of the cores that we may use, 0 to 100), ``load_1min``, ``gpu_processes``
        (``device_id``, ``pid``, ``memory_bytes`` or null) and ``busy``: in words what disturbs,
        empty when nothing does.
    """
    each = psutil.cpu_percent(LOOK_S, percpu=True)
    usable = [each[core] for core in os.sched_getaffinity(0) if core < len(each)] or each
    cpu_percent = round(sum(usable) / len(usable), 1)
    gpu_processes = [
        {"device_id": number, "pid": pid, "memory_bytes": memory_bytes}
        for number, processes in enumerate(gpus.processes())
        for pid, memory_bytes in (processes or {}).items()
    ]
    words = []
    if cpu_percent > BUSY_PERCENT:
        words.append(f"others used {cpu_percent:.0f}% of its cores")
    for process in gpu_processes:
        held = process["memory_bytes"]
        holds = "" if held is None else f", {held / GIB:.1f} GiB"
        words.append(f"process {process['pid']} used GPU {process['device_id']}{holds}")
    return {
        "cpu_percent": cpu_percent,
        "load_1min": round(os.getloadavg()[0], 2),
        "gpu_processes": gpu_processes,
        "busy": "; ".join(words),
    }
