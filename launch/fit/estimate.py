"""How long a point will take, from a run of before or from the model, and whether there is time."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from configs.schema import Point
from deep_optimizer_states.cores import usable_cores
from deep_optimizer_states.predict.machine import Machine as Profile, load_machine
from deep_optimizer_states.predict.predict import predict
from deep_optimizer_states.predict.workload import WorkloadError
from launch.fit import pipelines
from launch.fit.capacity import PROFILES, runs_on_gpu
from launch.fit.machine import Machine
from launch.records.identity import settings_key
from launch.records.ledger import Record
from launch.simulate.workloads import AsOf, workload_of
from optimus_cc.predict import PredictionError

START_S = {True: 45.0, False: 7.0}
"""From the launch to the first iteration, on a GPU or not."""
MICRO_BATCH_S = 0.02
"""Of Python and DeepSpeed in a micro-batch on a CPU, which small models spend more on than on
their products."""
SLOW_BF16 = 12.0
"""How much longer a bf16 matrix product takes where torch has no native one: the middle of 2.4 to
66 times as long as in fp32, by the matrices' size, on a processor restricted to AVX2 (measured)."""
AS_BEFORE = "as it took before"
"""What :attr:`Estimate.how` says of a time that a run of before took."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of a whole run."""

    seconds: float | None
    """None where no run of before and no model of performance tells."""
    how: str
    """:data:`AS_BEFORE`, ``rough, from the rates of NAME`` or ``from the model's size``, or ``not
    predicted: REASON``."""


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
            return Estimate(record.seconds, AS_BEFORE)
    on_gpu = runs_on_gpu(point, machine)
    cores = usable_cores()
    start = START_S[on_gpu] * (1 if on_gpu else max(1.0, point.num_ranks / cores))
    nameless, rates = point.model_copy(update={"name": ""}), PROFILES[on_gpu]
    is_slow = point.dtype == "bf16" and not on_gpu and "bf16" not in machine.half_types()
    slowdown = SLOW_BF16 if is_slow else 1.0
    try:
        if point.pp > 1:
            if not on_gpu:
                raise WorkloadError(f"pp = {point.pp}: a pipeline's time is known on GPUs alone")
            iteration, rates = pipelines.iteration_s(nameless), pipelines.CLUSTER
        else:
            iteration = _iteration_s(nameless, on_gpu, cores, slowdown)
    except (WorkloadError, PredictionError) as error:
        if on_gpu:
            return Estimate(None, f"not predicted: {error}")
        iteration = _iteration_by_size_s(point, cores, slowdown)
        return Estimate(start + point.iterations * iteration, "rough, from the model's size")
    how = f"rough, from the rates of {rates}"
    return Estimate(start + point.iterations * iteration, how)


def _iteration_by_size_s(point: Point, cores: int, slowdown: float) -> float:
    """Return the seconds of an iteration on a CPU: matrix products, and calls of Python."""
    rate = load_machine(PROFILES[False])
    assert rate.rates.device_flops_per_s
    tokens = point.global_batch_size * point.model.seq_length
    passes = 8 if point.activation_checkpointing else 6
    operations = passes * point.model.num_parameters(point.tp) * tokens * slowdown
    calls_s = MICRO_BATCH_S * point.accumulation * max(1.0, point.num_ranks / cores)
    return operations / (rate.rates.device_flops_per_s * cores / rate.cores) + calls_s


@functools.lru_cache(maxsize=4096)
def _iteration_s(point: Point, on_gpu: bool, cores: int, slowdown: float) -> float:
    profile = _profile(on_gpu, cores, point.num_ranks, slowdown)
    return predict(workload_of(point, AsOf.TODAY), profile).iteration_s


@functools.lru_cache
def _profile(on_gpu: bool, cores: int, num_ranks: int, slowdown: float) -> Profile:
    """A shipped profile at the size of this machine: all ranks on one node, its own cores."""
    profile = load_machine(PROFILES[on_gpu])
    if on_gpu:
        return replace(profile, cores=cores, gpus=num_ranks)
    # A GPU is a rank's own; the cores are there for all ranks.
    rates = profile.rates
    assert rates.device_flops_per_s
    assert rates.device_stream_bytes_per_s
    rates = replace(
        rates,
        device_flops_per_s=rates.device_flops_per_s * cores / profile.cores / num_ranks / slowdown,
        device_stream_bytes_per_s=rates.device_stream_bytes_per_s / num_ranks,
    )
    return replace(profile, cores=cores, rates=rates)


class TimeLimit:
    """A number of seconds from now.

    Args:
        seconds: That may pass in all.
        clock: Gives the time in seconds; for tests.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end_s = clock() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left, not below 0."""
        return max(0.0, self._end_s - self._clock())

    def refuse(self, expected_s: float) -> str:
        """Why a run of so many seconds is not to be started; empty when it is likely to end."""
        left_s = self.left_s
        if 0 < left_s >= expected_s:
            return ""
        return f"it takes about {expected_s:.0f} s, and {left_s:.0f} s of --minutes are left"
