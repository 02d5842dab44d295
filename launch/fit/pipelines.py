"""Time of a pipeline's iteration on GPUs, for trainers that the plugin's model does not know."""

from __future__ import annotations

import functools

from configs.schema import Point
from launch.ds_json import deepspeed_config
from launch.trainers.pipeline import COMPRESSION
from optimus_cc.predict.cluster import ELEMENT_BYTES, load_cluster
from optimus_cc.predict.pipeline import predict
from optimus_cc.predict.workload import Model, PredictionError, Workload
from optimus_cc.settings import Settings

CLUSTER = "a100x64"
"""Whose rates are taken, with as many GPUs as the point has ranks."""


@functools.lru_cache(maxsize=256)
def iteration_s(point: Point) -> float:
    """Seconds of an iteration after the warm-up of compression, simulated.

    Args:
        point: of a pipeline without ZeRO; a node holds the shards of one stage.

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
    names = ("hidden", "layers", "heads", "ffn", "seq_length", "vocab_size", "kv_heads")
    workload = Workload(
        model=Model(model.name, **{name: getattr(model, name) for name in names}),
        pp=point.pp,
        dp=point.dp,
        tp=point.tp,
        micro_batch_size=point.micro_batch_size,
        num_micro_batches=point.accumulation,
        element_bytes=ELEMENT_BYTES[point.dtype],
        recomputes=point.activation_checkpointing,
    )
    settings = Settings(**deepspeed_config(point).get(COMPRESSION, {}))
    cluster = load_cluster(CLUSTER)
    times = cluster.times(workload, settings, point.dtype)
    links = cluster.links(cluster.link_gbit, copies=point.tp)
    return predict(workload, settings, times, links).iteration_s
