"""What a run took of its machine, from the monitor's samples and DeepSpeed's own lines."""

from __future__ import annotations

from statistics import fmean

from parse.monitor import SAMPLE_COLUMNS
from parse.run_folder import Run

_GIB = 2**30
USAGE_COLUMNS = (
    *("running_samples_per_s", "allocated_gib", "max_allocated_gib"),
    *("host_peak_gib", "gpu_peak_gib", "gpu_util_percent"),
)
"""Columns of ``runs.csv``, all numbers."""


def usage_row(run: Run) -> dict[str, float | None]:
    """The run's :data:`USAGE_COLUMNS`.

    By DeepSpeed: ``running_samples_per_s`` of its last throughput line, ``allocated_gib`` and
    ``max_allocated_gib`` the largest of all (of a rank's device; on a CPU the rank's resident
    memory). By the monitor: ``host_peak_gib`` of all the run's processes together, pages that they
    share counted once where that was looked at; ``gpu_peak_gib`` of the fullest GPU;
    ``gpu_util_percent``, the mean while the run held memory there.
    """
    lines = run.log.throughput
    shared, resident = _column(run, "host_pss_bytes"), _column(run, "host_used_bytes")
    held = _column(run, "gpu_memory_run_bytes") or _column(run, "gpu_memory_used_bytes")
    rates = [line.running_samples_per_s for line in lines]
    return {
        "running_samples_per_s": rates[-1] if rates else None,
        "allocated_gib": max((line.allocated_gib for line in lines), default=None),
        "max_allocated_gib": max((line.max_allocated_gib for line in lines), default=None),
        "host_peak_gib": _gib(shared or resident),
        "gpu_peak_gib": _gib(held),
        "gpu_util_percent": _busy(run),
    }


def _column(run: Run, name: str) -> list[float]:
    """A figure of every sample that has it."""
    place = list(SAMPLE_COLUMNS).index(name)
    return [v for _, samples, _ in run.monitored for s in samples if (v := s[place]) is not None]


def _gib(found: list[float]) -> float | None:
    return max(found) / _GIB if found and max(found) > 0 else None


def _busy(run: Run) -> float | None:
    names = list(SAMPLE_COLUMNS)
    held, busy = names.index("gpu_memory_run_bytes"), names.index("gpu_util_percent")
    samples = [sample for _, samples, _ in run.monitored for sample in samples]
    found = [s[busy] for s in samples if s[busy] is not None and s[held] != 0]
    return fmean(v for v in found if v is not None) if found else None
