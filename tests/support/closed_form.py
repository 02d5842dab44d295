"""An oracle for the simulator: the update phase in closed form, its longest lane.

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
from deep_optimizer_states.predict.memory.offload import kept_subgroups
from deep_optimizer_states.predict.rank import Rank, rank_of
from deep_optimizer_states.predict.update_sim import STATE_COPIES, WAIT_AND_RECORD
from deep_optimizer_states.predict.workload import (
    FP32_BYTES,
    STATE_BYTES,
    Workload,
    schedule_of,
)
from deep_optimizer_states.schedule import Schedule
from launch.simulate.paper_software import HYBRID

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
        estimate = _hybrid if workload.software is HYBRID else _stock
        return estimate(workload, rank)
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


def _stock(workload: Workload, rank: Rank) -> Estimate:
    """Host Adam and a copy that blocks, one after the other."""
    assert workload.software is not None
    resident = workload.software.resident_subgroups(workload)
    numels = workload.subgroups
    host = sum(numel for idx, numel in enumerate(numels) if idx not in resident)
    adam = host / rank.host_alone_parameters_per_s
    copies = host * FP32_BYTES / min(rank.blocking_bytes_per_s, rank.host_bytes_per_s)
    device = (sum(numels) - host) / rank.device_parameters_per_s
    lanes = {"host Adam": adam, "copies to the GPU": copies, "device Adam": device}
    return Estimate(sum(lanes.values()), lanes)


def _hybrid(workload: Workload, rank: Rank) -> Estimate:
    """A period of ``stride`` subgroups takes as long as its longer chain."""
    assert workload.software is not None
    resident = workload.software.resident_subgroups(workload)
    numels, host_rate = workload.subgroups, rank.host_alone_parameters_per_s
    rest = [numel for idx, numel in enumerate(numels) if idx not in resident]
    if not rest:
        seconds = sum(numels) / rank.device_parameters_per_s
        return Estimate(seconds, {"device Adam": seconds})
    size, stride = sum(rest) / len(rest), workload.stride
    groups = len(rest) // stride
    host = (stride - 1) * size / host_rate
    block = size * FP32_BYTES / rank.h2d_bytes_per_s
    prefetch = size * STATE_BYTES / rank.h2d_bytes_per_s
    back = size / rank.device_parameters_per_s + size * STATE_BYTES / rank.d2h_bytes_per_s
    alone = (len(rest) - groups * stride) * size / host_rate
    device = (sum(numels) - sum(rest)) / rank.device_parameters_per_s
    seconds = alone
    if groups:
        later = (groups - 1) * max(host, back + prefetch)
        seconds += max(host, prefetch) + later + groups * block
        seconds += max(0.0, size / rank.device_parameters_per_s - alone)
    weight = workload.weight_bytes
    moved = (sum(rest) - groups * size) * (rank.host_bytes + weight)
    moved += groups * size * (2 * STATE_BYTES + FP32_BYTES)
    lanes = {
        "host Adam": groups * (host + block) + alone,
        "link to and from the GPU": groups * (prefetch + back + block),
        "device Adam": device,
        "host memory": moved / rank.host_bytes_per_s,
    }
    even = max(rest) - min(rest) <= size / 100
    demand = host_rate * rank.host_bytes + max(rank.h2d_bytes_per_s, rank.d2h_bytes_per_s)
    sent = (stride - 1) * size * weight / rank.h2d_bytes_per_s
    # Sent weights share the link with the prefetch: either there is time, or they are few.
    roomy = host >= prefetch + back + sent or sent <= 0.01 * seconds / max(1, groups)
    calm = demand <= rank.host_bytes_per_s
    return Estimate(seconds, lanes, even and calm and roomy and not device)
