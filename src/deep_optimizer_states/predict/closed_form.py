"""The update phase in closed form: the longest of its lanes, and what cannot overlap.

It holds where no two lanes slow each other down, that is where host memory carries the host's Adam
and the copies at full rate at once, and where there are enough tiles for their ends not to matter.
:mod:`deep_optimizer_states.predict.update_sim` needs neither.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field

from deep_optimizer_states.predict.lanes import QUEUE_ENTRIES
from deep_optimizer_states.predict.machine import Machine
from deep_optimizer_states.predict.memory_need import kept_subgroups
from deep_optimizer_states.predict.rank import STATE_BYTES, Rank, rank_of
from deep_optimizer_states.predict.update_sim import STATE_COPIES, WAIT_AND_RECORD
from deep_optimizer_states.predict.workload import Workload, schedule_of
from deep_optimizer_states.schedule import Schedule

ENOUGH_TILES = 100
"""As many of the largest; with fewer, the ends of the pipeline may be a hundredth of it."""


@dataclass(frozen=True)
class Estimate:
    """One update phase.

    Attributes:
        seconds: How long it takes.
        lanes_s: What each resource would need by itself.
        applies: Whether the closed form's assumptions hold.
    """

    seconds: float
    lanes_s: dict[str, float] = field(default_factory=dict)
    applies: bool = True

    @property
    def binding(self) -> str:
        """The resource that takes longest."""
        return max(self.lanes_s, key=lambda lane: self.lanes_s[lane])


@dataclass(frozen=True)
class _Shares:
    """Elements by where they are updated, and the largest and last tiles."""

    host: int
    device: int
    resident: int
    tile: int
    host_tiles: tuple[int, ...]


def estimate_update(workload: Workload, machine: Machine, policy: str = "all-host") -> Estimate:
    """One rank's update phase.

    Args:
        workload: What runs.
        machine: Where.
        policy: Of this package's engine: ``all-host``, ``ratio``, ``stride``, ``all-device`` or
            ``dynamic``.

    Raises:
        MachineError: A rate that is needed was not measured.
    """
    rank = rank_of(workload, machine)
    if workload.software is not None:
        return workload.software.estimate_update(workload, rank)
    schedule = schedule_of(workload, policy)
    kept, moved = kept_subgroups(workload, machine, policy), schedule.device_tiles
    if schedule.dynamic:
        moved = frozenset(range(len(schedule.tiles))) - schedule.resident_tiles
    numels = [
        (tile.numel, tile.subgroup in kept) for tile in map(schedule.tiles.__getitem__, moved)
    ]
    through = sum(numel for numel, _ in numels)
    fetched = sum(numel for numel, is_kept in numels if not is_kept)
    grad = workload.weight_bytes * fetched / max(1, through)
    estimate = _ours(workload, rank, schedule, grad)
    return estimate if fetched in (0, through) else dataclasses.replace(estimate, applies=False)


def _ours(workload: Workload, rank: Rank, schedule: Schedule, grad: float) -> Estimate:
    """This package's engine, which prefetches ``grad`` bytes of gradient a parameter."""
    shares, weight = _shares(schedule), workload.weight_bytes
    host_each = 1.0 / rank.host_alone_parameters_per_s
    link_each = weight / rank.h2d_bytes_per_s
    both = rank.h2d_both_bytes_per_s
    if schedule.dynamic:
        both = max(both - weight / host_each, both / 2)  # sent weights take their part of the link
    prefetch, flush = (STATE_BYTES + grad) / both, STATE_BYTES / rank.d2h_both_bytes_per_s
    adam = 1.0 / rank.device_parameters_per_s
    chain = prefetch + adam + flush
    device_each = max(prefetch, adam, flush)  # with three slots all three run at once
    host, device = float(shares.host), float(shares.device)
    tile = min(float(shares.tile), host if schedule.dynamic else device)
    fill = tile * (chain - device_each)
    if schedule.dynamic:
        # Both take tiles until none is left; what the device then holds it still has to end.
        moving = max(0.0, host - tile)
        until = moving / (1 / host_each + 1 / device_each)
        fill = tile * chain
        host, device = until / host_each, until / device_each
    lanes = {
        "host Adam": host * host_each + _staging_s(shares.host_tiles, host_each, link_each),
        "link to and from the GPU": device * device_each + fill,
        "link to the GPU": device * (STATE_BYTES + grad) / rank.h2d_both_bytes_per_s
        + host * link_each,
        "device Adam": (device + shares.resident) * adam,
        "host memory": (host * (rank.host_bytes + weight) + device * (2 * STATE_BYTES + grad))
        / rank.host_bytes_per_s,
    }
    longest = max(lanes.values())
    demand = rank.host_bytes / host_each + rank.h2d_bytes_per_s
    demand += rank.d2h_both_bytes_per_s if device else 0.0
    lonely = not schedule.dynamic and (not device or not host)
    entries = len(schedule.device_tiles) * (STATE_COPIES + bool(grad) + WAIT_AND_RECORD)
    assumed = [
        demand <= rank.host_bytes_per_s,
        host_each >= 2 * link_each,
        shares.resident * adam < 0.005 * longest,
        (lonely and not device) or shares.host + shares.device >= ENOUGH_TILES * shares.tile,
        # Sent weights share the link with prefetches: only one with room to spare lets both run.
        lonely or lanes["link to the GPU"] < 0.9 * longest,
        lonely
        or not workload.issues_all_first
        or entries <= QUEUE_ENTRIES,  # a full queue may keep the CPU lane from its steps
    ]
    if schedule.dynamic:
        stalls = lanes["host Adam"] - host * host_each
        # The last tiles end where they fall, and those of a slow host are long.
        assumed += [host_each <= device_each, fill < 0.01 * longest, stalls < 0.005 * longest]
    return Estimate(longest, lanes, all(assumed))


def _staging_s(tiles: tuple[int, ...], host_each: float, link_each: float) -> float:
    """What the host lane waits for its two staging buffers, and for the last weights.

    A tile waits where the weights before the last take longer than the last step.
    """
    waits = (max(0.0, a * link_each - b * host_each) for a, b in itertools.pairwise(tiles))
    return sum(waits) + (tiles[-1] * link_each if tiles else 0.0)


def _shares(schedule: Schedule) -> _Shares:
    resident = schedule.resident_tiles
    numels = [tile.numel for tile in schedule.tiles]
    through = sum(numels[idx] for idx in schedule.device_tiles)
    staying = sum(numels[idx] for idx in resident)
    on_host = [
        numel
        for idx, numel in enumerate(numels)
        if idx not in resident and idx not in schedule.device_tiles
    ]
    tile = schedule.slot_numel
    return _Shares(sum(on_host), through, staying, tile, tuple(on_host))


def bound_update_s(workload: Workload, machine: Machine) -> float:
    """No schedule of this package's kernels updates faster on this machine.

    The device's share is chosen freely, nothing but the resources themselves costs time, and
    gradients of that share are on the device already if the workload lets them stay there.
    """
    rank = rank_of(workload, machine)
    numel, weight = sum(workload.subgroups) * workload.offload_ratio, workload.weight_bytes
    grad = 0 if machine.gpus and workload.keeps_device_grads else weight

    def seconds(share: float) -> float:
        return numel * max(
            (1 - share) / rank.host_alone_parameters_per_s,
            (weight * (1 - share) + (STATE_BYTES + grad) * share) / rank.h2d_bytes_per_s,
            STATE_BYTES * share / rank.d2h_bytes_per_s,
            share / rank.device_parameters_per_s,
            (2 * STATE_BYTES * share + rank.host_bytes * (1 - share)) / rank.host_bytes_per_s,
        )

    return min(seconds(step / 200) for step in range(201))
