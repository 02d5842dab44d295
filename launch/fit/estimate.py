"""How long a point will take: as it took before, or else a rough figure from nominal rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from configs.schema import Point
from launch.fit.capacity import runs_on_gpu
from launch.fit.machine import Machine
from launch.hosts.ranks import usable_cores
from launch.records.identity import settings_key
from launch.records.ledger import Record

GPU_FLOPS = 150e12
CORE_FLOPS = 60e9
"""Floating-point operations a second that training gets out of a GPU, or of a CPU's core."""
HOST_BYTES_PER_S = 40e9
"""Of all ranks together, where the optimizer state is updated."""
UPDATE_BYTES = 28
"""Read and written a parameter by an update on the host."""
START_S = {True: 45.0, False: 5.0}
"""From the launch to the first iteration, on a GPU or not."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of a whole run."""

    seconds: float
    how: str
    """``as it took before``, or ``rough, from nominal rates``."""


def estimate(point: Point, machine: Machine, records: Sequence[Record] = ()) -> Estimate:
    """Seconds that a point will take.

    Args:
        point: what is to be run.
        machine: where.
        records: runs of before, the newest last.
    """
    key = settings_key(point)
    for record in reversed(records):
        same = record.point_key.startswith(key) and record.status == "ok"
        if same and record.seconds:
            return Estimate(record.seconds, "as it took before")
    on_gpu = runs_on_gpu(point, machine)
    parameters = point.model.num_parameters(point.tp)
    tokens = point.global_batch_size * point.model.seq_length
    # Forward, backward and the forward of the recomputation: 2, 4 and 2 operations a weight.
    work = (8 if point.activation_checkpointing else 6) * parameters * tokens
    rate = GPU_FLOPS * point.num_ranks if on_gpu else CORE_FLOPS * usable_cores()
    update = UPDATE_BYTES * parameters / HOST_BYTES_PER_S
    free = max(1.0 - point.hog_share, 0.05)
    iteration = (work / rate) / free + update
    start = START_S[on_gpu] * (1 if on_gpu else max(1.0, point.num_ranks / usable_cores()))
    return Estimate(start + point.iterations * iteration, "rough, from nominal rates")
