"""The shortest that an iteration and an update can be on a machine: its bytes over its rates.

With x the share of the state updated on the device, N parameters of this rank, and each resource
working without a pause, none waiting for another (docs/benchmarks.md)::

    iteration  max{ computing, N(2+10x)/link each way, 28(1-x)N/lane, N[24x + 32(1-x)]/host }
    update     max{ N(2+10x)/H2D, 12xN/D2H, 28(1-x)N/lane, N[24x + 30(1-x)]/host }

The bound is the least over x. A link is slower while the other way is busy, so the bytes of both
ways count for each (:func:`_link_s`). *host* is what the memory gives the cores and both links
together, which is more than the cores alone can take. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import NONE, as_table, shown
from configs.schema import Point
from deep_optimizer_states.predict.workload import WorkloadError
from launch.simulate.workloads import AsOf, workload_of
from parse.compare.pairs import PointRuns, group_points
from parse.labels import label_runs
from parse.run_folder import read_sweep

LANE_BYTES = 28
"""Host bytes a parameter of the CPU lane: gradient in, state in and out, 16-bit weight out."""
STATE_BYTES = 12
WARM_UP = 2
"""First iterations of a run, which do not count."""
_STEPS = 1000


@dataclass(frozen=True)
class Limits:
    """Measured rates of one rank's resources; None where there is no such thing.

    Attributes:
        h2d_bytes_per_s: Link to the device while the other way is idle.
        d2h_bytes_per_s: Link from the device, likewise.
        lane_bytes_per_s: What the CPU lane's cores move in a probe of the same pattern.
        host_bytes_per_s: Of host memory, for CPU lane and links together.
        device_parameters_per_s: Adam on the device.
        h2d_both_bytes_per_s: Link to the device while the other way is busy too; None: as alone.
        d2h_both_bytes_per_s: Link from the device, likewise.
    """

    h2d_bytes_per_s: float | None
    d2h_bytes_per_s: float | None
    lane_bytes_per_s: float
    host_bytes_per_s: float
    device_parameters_per_s: float | None
    h2d_both_bytes_per_s: float | None = None
    d2h_both_bytes_per_s: float | None = None

    @property
    def has_device(self) -> bool:
        """Whether anything can be updated elsewhere than on the CPU."""
        return None not in (self.h2d_bytes_per_s, self.d2h_bytes_per_s)


@dataclass(frozen=True)
class Bound:
    """A shortest time.

    Attributes:
        seconds: How long.
        device_share: Share x at which it is reached.
        bound_by: The resource that is busy all the time.
    """

    seconds: float
    device_share: float
    bound_by: str


def read_limits(path: Path) -> Limits:
    """Limits from a profile that ``python -m deep_optimizer_states calibrate`` wrote.

    Raises:
        ValueError: It holds no rate of host memory.
    """
    rates: Mapping[str, Any] = tomllib.loads(path.read_text(encoding="utf-8")).get("rates", {})
    curve = rates.get("host_stream_bytes_per_s")
    if not curve:
        raise ValueError("the machine's profile has no host_stream_bytes_per_s")
    best = max(float(rate) for _, rate in curve)
    links = [f"{way}_{which}" for which in ("", "both_") for way in ("h2d", "d2h")]
    h2d, d2h, *both = (rates.get(f"{link}bytes_per_s") for link in links)
    # Cores and links together can take more from the memory than the cores alone.
    host = max(best, float(rates.get("busy_memory_bytes_per_s", 0.0)))
    return Limits(h2d, d2h, best, host, rates.get("device_adam_parameters_per_s"), *both)


def iteration_bound(parameters: int, limits: Limits, compute_s: float) -> Bound:
    """Shortest iteration whose forward and backward take ``compute_s``.

    Without a device the cores that compute also update, so nothing overlaps.
    """
    if not limits.has_device:
        update = update_bound(parameters, limits)
        return Bound(compute_s + update.seconds, 0.0, f"computing, then {update.bound_by}")

    def busy(x: float) -> dict[str, float]:
        moved = parameters * (2 + 10 * x)
        host = parameters * (2 * STATE_BYTES * x + (LANE_BYTES + 4) * (1 - x))
        return {"computing": compute_s, **_lanes(parameters, limits, x, (moved, moved, host))}

    return _least(busy)


def update_bound(parameters: int, limits: Limits) -> Bound:
    """Shortest update phase, whose gradients are where they are needed when it begins."""
    if not limits.has_device:
        seconds = update_work(parameters, limits, 0.0)
        return Bound(seconds["CPU lane"], 0.0, "CPU lane")
    return _least(lambda x: update_work(parameters, limits, x))


def update_work(parameters: int, limits: Limits, x: float) -> dict[str, float]:
    """Seconds that each resource works in an update of which the device does the share ``x``."""
    down, up = parameters * (2 + 10 * x), parameters * STATE_BYTES * x
    host = parameters * (2 * STATE_BYTES * x + (LANE_BYTES + 2) * (1 - x))
    if not limits.has_device:
        down, up, host = 0.0, 0.0, parameters * LANE_BYTES
    return _lanes(parameters, limits, x, (down, up, host))


def _lanes(
    parameters: int, limits: Limits, x: float, num_bytes: tuple[float, float, float]
) -> dict[str, float]:
    """Seconds that each resource works.

    Args:
        parameters: Of this rank.
        limits: Rates.
        x: Device share.
        num_bytes: To the device, from it, and through host memory.
    """
    down, up, host = num_bytes
    seconds = {
        "CPU lane": LANE_BYTES * (1 - x) * parameters / limits.lane_bytes_per_s,
        "host memory": host / limits.host_bytes_per_s,
    }
    if limits.h2d_bytes_per_s is not None and limits.d2h_bytes_per_s is not None:
        h2d = limits.h2d_bytes_per_s, limits.h2d_both_bytes_per_s or limits.h2d_bytes_per_s
        d2h = limits.d2h_bytes_per_s, limits.d2h_both_bytes_per_s or limits.d2h_bytes_per_s
        seconds["link to the device"] = _link_s(down, *h2d, up / d2h[1])
        seconds["link from the device"] = _link_s(up, *d2h, down / h2d[1])
    if limits.device_parameters_per_s:
        seconds["Adam on the device"] = x * parameters / limits.device_parameters_per_s
    return seconds


def _link_s(num_bytes: float, alone: float, both: float, other_s: float) -> float:
    """Seconds that one way of the link works.

    It moves ``both`` a second while the other way works, and ``alone`` for the rest of its time.

    Args:
        num_bytes: To be moved.
        alone: Bytes a second while the other way is idle.
        both: Bytes a second while it is busy.
        other_s: How long the other way is busy, at its own rate beside this one.
    """
    alone = max(alone, both)
    return min(num_bytes / both, (num_bytes + (alone - both) * other_s) / alone)


def _least(busy: Callable[[float], Mapping[str, float]]) -> Bound:
    def bound(x: float) -> Bound:
        seconds = busy(x)
        name = max(seconds, key=lambda resource: seconds[resource])
        return Bound(seconds[name], x, name)

    return min((bound(step / _STEPS) for step in range(_STEPS + 1)), key=lambda it: it.seconds)


def shares(folder: Path, limits: Limits) -> list[list[str]]:
    """How near a sweep's points came to the shortest times, a line a point.

    Computing is what the study's reference took for forward and backward. A run that keeps state on
    the device, or that the performance model does not know, has no share.

    Args:
        folder: Of the sweep.
        limits: Rates of the machine that it ran on.

    Returns:
        Name, iteration and share of its bound, update and share of its bound.
    """
    runs = read_sweep(folder)
    study = label_runs(runs)
    groups = [group for group in group_points(runs) if group.finished]
    plain = [group for group in groups if group.engine == study.reference]
    if not plain:
        return []
    compute_s = sum(_median_s(plain[0], name) or 0.0 for name in ("forward", "backward"))
    lines = []
    for group in groups:
        point = study.point_type(**group.runs[0].point)
        numel = point.model.num_parameters(point.tp) // point.dp
        least = iteration_bound(numel, limits, compute_s), update_bound(numel, limits)
        cells = [group.label]
        for name, bound in zip(("iteration", "update"), least, strict=True):
            seconds = _median_s(group, name)
            share = bound.seconds / seconds if seconds and _keeps_state_on_host(point) else None
            cells += [shown(seconds, 3), NONE if share is None else f"{share:.0%}"]
        lines.append(cells)
    return lines


def _median_s(group: PointRuns, phase: str) -> float | None:
    values = [ms / 1000 for times in group.times_ms(phase, WARM_UP) for ms in times]
    return median(values) if values else None


def _keeps_state_on_host(point: Point) -> bool:
    try:
        return workload_of(point, AsOf.TODAY).offload_ratio == 1
    except WorkloadError:
        return False


def main(argv: Sequence[str]) -> int:
    """Measure the machine's rates where that was not done, and print the shares."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bound")
    parser.add_argument("folder", type=Path, help="of a sweep that ran: results/STUDY/SWEEP")
    parser.add_argument("--mark", default="", help="before every line")
    given = parser.parse_args(argv)
    folder = given.folder
    if not read_sweep(folder):
        sys.stderr.write(f"{folder}: no runs; give the folder of a sweep that ran\n")
        return 2
    profile = folder / "machine.toml"
    if not profile.is_file():
        command = [sys.executable, "-m", "deep_optimizer_states", "calibrate", "-o", str(profile)]
        subprocess.run(command, check=True)
    rows = shares(folder, read_limits(profile))
    if not rows:
        sys.stderr.write(f"{folder}: no finished run of the reference, whose computing counts\n")
        return 1
    head = ["point", "iteration s", "of bound", "update s", "of bound"]
    for line in as_table(head, rows).split("\n"):
        sys.stdout.write(f"{given.mark}{line}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
