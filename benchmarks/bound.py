"""The shortest that an iteration and an update can be on a machine: its bytes over its rates.

With x the share of the state updated on the device, N parameters of this rank, and each resource
working without a pause, none waiting for another (docs/benchmarks.md)::

    iteration  max{ computing, N(2+10x)/link each way, 28(1-x)N/lane, N[24x + 32(1-x)]/host }
    update     max{ N(2+10x)/H2D, 12xN/D2H, 28(1-x)N/lane, N[24x + 30(1-x)]/host }

The bound is the least over x. Nothing here imports torch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LANE_BYTES = 28
"""Host bytes a parameter of the CPU lane: gradient in, state in and out, 16-bit weight out."""
STATE_BYTES = 12
_STEPS = 1000


@dataclass(frozen=True)
class Limits:
    """Measured rates of one rank's resources; None where there is no such thing.

    Attributes:
        h2d_bytes_per_s: Link to the device while the other way is busy.
        d2h_bytes_per_s: Link from the device, likewise.
        lane_bytes_per_s: What the CPU lane's cores move in a probe of the same pattern.
        host_bytes_per_s: Of host memory, for CPU lane and link together.
        device_parameters_per_s: Adam on the device.
    """

    h2d_bytes_per_s: float | None
    d2h_bytes_per_s: float | None
    lane_bytes_per_s: float
    host_bytes_per_s: float
    device_parameters_per_s: float | None

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
    h2d = rates.get("h2d_both_bytes_per_s", rates.get("h2d_bytes_per_s"))
    d2h = rates.get("d2h_both_bytes_per_s", rates.get("d2h_bytes_per_s"))
    return Limits(h2d, d2h, best, best, rates.get("device_adam_parameters_per_s"))


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
        seconds["link to the device"] = down / limits.h2d_bytes_per_s
        seconds["link from the device"] = up / limits.d2h_bytes_per_s
    if limits.device_parameters_per_s:
        seconds["Adam on the device"] = x * parameters / limits.device_parameters_per_s
    return seconds


def _least(busy: Callable[[float], Mapping[str, float]]) -> Bound:
    best: Bound | None = None
    for step in range(_STEPS + 1):
        x = step / _STEPS
        seconds = busy(x)
        name = max(seconds, key=lambda resource: seconds[resource])
        if best is None or seconds[name] < best.seconds:
            best = Bound(seconds[name], x, name)
    assert best is not None
    return best
