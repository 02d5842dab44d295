"""DeepSpeed's JSON for a point, as a pure function: common settings, then the patches."""

from __future__ import annotations

from typing import Any

from configs.schema import Point
from configs.templates import filled, laid_over

DEFAULT_REDUCE_BUCKET_NUMEL = 500_000_000
"""DeepSpeed's default; it allocates a buffer of this many gradients before training."""
DEFAULT_PREFETCH_BUCKET_NUMEL = 50_000_000
"""DeepSpeed's default for parameters gathered ahead of use."""


def deepspeed_config(point: Point) -> dict[str, Any]:
    """What ``deepspeed.initialize`` gets for ``point``.

    The study lays its own settings over the common ones, and the point's engine its own over those,
    so that two engines differ in what the study says of them and in nothing else. The buckets are
    DeepSpeed's defaults, cut to the size of a small model, whose buffers would otherwise be larger
    than the model.

    ``pin_memory`` has no effect without CUDA: there DeepSpeed pins nothing. The learning-rate
    schedule is the trainer's.
    """
    parameters = point.model.num_parameters(point.tp)
    config: dict[str, Any] = {
        "train_batch_size": point.global_batch_size,
        "train_micro_batch_size_per_gpu": point.micro_batch_size,
        "steps_per_print": 1,
        "zero_optimization": {
            "stage": point.zero_stage,
            **_offload(point),
            "reduce_bucket_size": min(DEFAULT_REDUCE_BUCKET_NUMEL, parameters),
            "stage3_prefetch_bucket_size": min(DEFAULT_PREFETCH_BUCKET_NUMEL, parameters),
        },
        # With the optimizer offloaded DeepSpeed builds its DeepSpeedCPUAdam from this.
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": point.lr,
                "betas": [point.adam_beta1, point.adam_beta2],
                "eps": point.adam_eps,
                "weight_decay": point.weight_decay,
            },
        },
        **_data_types(point),
        "gradient_clipping": point.clip_grad,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
    }
    for patch in patches(point):
        config = laid_over(config, patch)
    if point.offload_optimizer == "none":  # a patch may say how to offload what is not
        config["zero_optimization"].pop("offload_optimizer", None)
    return config


def patches(point: Point) -> list[dict[str, Any]]:
    """What the study and the point's engine change of DeepSpeed's config, in this order."""
    return [filled(t, point.values) for t in (point.study.ds_config, point.row.ds_config)]


def _offload(point: Point) -> dict[str, Any]:
    blocks: dict[str, Any] = {}
    if point.offload_optimizer != "none":
        blocks["offload_optimizer"] = {
            "device": point.offload_optimizer,
            "ratio": 1.0,
            "pin_memory": True,
        }
    if point.offload_param != "none":
        blocks["offload_param"] = {"device": point.offload_param, "pin_memory": True}
    return blocks


def _data_types(point: Point) -> dict[str, Any]:
    if point.dtype == "fp32":
        return {}
    if point.dtype == "fp16":
        # A loss scale of 0 is DeepSpeed's word for a dynamic one.
        return {"fp16": {"enabled": True, "loss_scale": 0}}
    return {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": point.grad_accum_dtype},
    }
