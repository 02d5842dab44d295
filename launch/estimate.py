"""How long a point will take, from a run of before or from the model, and whether there is time."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from configs.schema import Point
from deep_optimizer_states.core.host import usable_cores
from deep_optimizer_states.predict.machine import load_machine
from deep_optimizer_states.predict.model import ModelShape, model_from_table
from deep_optimizer_states.predict.predict import predict
from deep_optimizer_states.predict.workload import WorkloadError
from launch.ds_json import deepspeed_config
from launch.fit import PROFILES, Machine, runs_on_gpu
from launch.records.identity import settings_key
from launch.records.ledger import Record
from launch.simulate.workloads import AsOf, workload_of
from launch.trainer.runfile import COMPRESSION
from optimus_cc import predict as pipelines
from optimus_cc.predict import ELEMENT_BYTES, PredictionError, load_cluster
from optimus_cc.settings import Settings

GPU_START_S, CPU_START_S = 45.0, 7.0
"""From the launch to the first iteration; on a CPU of each rank that has a core to itself."""
MICRO_BATCH_S = 0.02
"""Of Python and DeepSpeed in a micro-batch on a CPU, which small models spend more on than on
their products."""
SLOW_BF16 = 12.0
"""How much longer a bf16 matrix product takes where torch has no native one: the middle of 2.4 to
66 times as long as in fp32, by the matrices' size, on a processor restricted to AVX2 (measured)."""
CLUSTER = "a100x64"
"""Whose rates a pipeline is predicted with, with as many GPUs as the point has ranks."""
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
    """Estimate the seconds that a point will take, after earlier runs, the newest last."""
    key = settings_key(point)
    for record in reversed(records):
        same = record.point_key.startswith(key) and record.status == "ok"
        if same and record.seconds:
            return Estimate(record.seconds, AS_BEFORE)
    if not runs_on_gpu(point, machine):
        return Estimate(_seconds_on_cpu(point, machine), "rough, from the model's size")
    try:
        iteration_s, rates = _iteration_on_gpus(point.model_copy(update={"name": ""}))
    except (WorkloadError, PredictionError) as error:
        return Estimate(None, f"not predicted: {error}")
    return Estimate(
        GPU_START_S + point.iterations * iteration_s, f"rough, from the rates of {rates}"
    )


@functools.lru_cache(maxsize=4096)
def _iteration_on_gpus(point: Point) -> tuple[float, str]:
    """Seconds of an iteration, and the profile whose rates they come from."""
    if point.pp > 1:
        return _pipeline_iteration_s(point), CLUSTER
    name = PROFILES[True]
    profile = replace(load_machine(name), cores=usable_cores(), gpus=point.num_ranks)
    return predict(workload_of(point, AsOf.TODAY), profile).iteration_s, name


def _pipeline_iteration_s(point: Point) -> float:
    """Seconds of an iteration without ZeRO; a node holds the shards of one stage."""
    workload = pipeline_workload(point)
    settings = Settings(**deepspeed_config(point).get(COMPRESSION, {}))
    cluster = load_cluster(CLUSTER)
    costs = cluster.costs(workload, settings, point.dtype, copies=point.tp)
    return pipelines.predict(workload, settings, costs).iteration_s


def pipeline_workload(point: Point) -> pipelines.Workload:
    """Return the iteration of a pipeline's point, as it is predicted.

    Raises:
        PredictionError: the model or its type is not one that is predicted.
    """
    model = point.model
    if model.architecture != "gpt2":
        raise PredictionError(f"architecture = '{model.architecture}': only 'gpt2' is predicted")
    if point.dtype not in ELEMENT_BYTES:
        raise PredictionError(
            f"dtype = '{point.dtype}': {' and '.join(ELEMENT_BYTES)} are predicted"
        )
    names = set(ModelShape.__dataclass_fields__)
    return pipelines.Workload(
        model=model_from_table(model.model_dump(include=names)),
        pp=point.pp,
        dp=point.dp,
        tp=point.tp,
        micro_batch_size=point.micro_batch_size,
        num_micro_batches=point.accumulation,
        element_bytes=ELEMENT_BYTES[point.dtype],
        recomputes=point.activation_checkpointing,
    )


def _seconds_on_cpu(point: Point, machine: Machine) -> float:
    """Seconds of a run: the start, matrix products, and calls of Python."""
    profile, cores = load_machine(PROFILES[False]), usable_cores()
    assert profile.rates.device_flops_per_s
    passes = 8 if point.activation_checkpointing else 6
    tokens = point.global_batch_size * point.model.seq_length
    operations = float(passes * point.model.num_parameters(point.tp) * tokens)
    if point.dtype == "bf16" and "bf16" not in machine.half_types():
        operations *= SLOW_BF16
    products_s = operations / (profile.rates.device_flops_per_s * cores / profile.cores)
    ranks_a_core = max(1.0, point.num_ranks / cores)
    calls_s = MICRO_BATCH_S * point.accumulation * ranks_a_core
    return CPU_START_S * ranks_a_core + point.iterations * (products_s + calls_s)


class TimeLimit:
    """A number of seconds from now."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end_s = clock() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left, not below 0."""
        return max(0.0, self._end_s - self._clock())

    def refuse(self, expected_s: float) -> str:
        """Return why a run of so many seconds is not started; empty when it is likely to end."""
        left_s = self.left_s
        if 0 < left_s >= expected_s:
            return ""
        return f"it takes about {expected_s:.0f} s, and {left_s:.0f} s of --minutes are left"
