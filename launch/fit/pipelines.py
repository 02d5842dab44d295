"""Time of a pipeline's iteration on GPUs, for trainers that the plugin's model does not know."""

from __future__ import annotations

import functools

from configs.schema import Point
from deep_optimizer_states.predict.model import ModelShape, model_from_table
from launch.ds_json import deepspeed_config
from launch.trainer.runfile import COMPRESSION
from optimus_cc.predict import ELEMENT_BYTES, PredictionError, Workload, load_cluster, predict
from optimus_cc.settings import Settings

CLUSTER = "a100x64"
"""Whose rates are taken, with as many GPUs as the point has ranks."""


@functools.lru_cache(maxsize=256)
def iteration_s(point: Point) -> float:
    """Simulate an iteration after the warm-up of compression; return its seconds.

    Args:
        point: of a pipeline without ZeRO; a node holds the shards of one stage.

    Raises:
        PredictionError: the model or its type is not one that is predicted.
    """
    workload = workload_of(point)
    settings = Settings(**deepspeed_config(point).get(COMPRESSION, {}))
    cluster = load_cluster(CLUSTER)
    costs = cluster.costs(workload, settings, point.dtype, copies=point.tp)
    return predict(workload, settings, costs).iteration_s


def workload_of(point: Point) -> Workload:
    """Return the iteration of a point, as it is predicted.

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
    return Workload(
        model=model_from_table(model.model_dump(include=names)),
        pp=point.pp,
        dp=point.dp,
        tp=point.tp,
        micro_batch_size=point.micro_batch_size,
        num_micro_batches=point.accumulation,
        element_bytes=ELEMENT_BYTES[point.dtype],
        recomputes=point.activation_checkpointing,
    )
