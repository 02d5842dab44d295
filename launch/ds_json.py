"""DeepSpeed's JSON for a point, as a pure function. DeepSpeed's spellings live here alone."""

from __future__ import annotations

from typing import Any

from configs.schema import Engine, Point

DEFAULT_REDUCE_BUCKET_NUMEL = 500_000_000
"""DeepSpeed's default; it allocates a buffer of this many gradients before training."""
DEFAULT_PREFETCH_BUCKET_NUMEL = 50_000_000
"""DeepSpeed's default for parameters gathered ahead of use."""


def deepspeed_config(point: Point) -> dict[str, Any]:
    """What ``deepspeed.initialize`` gets for ``point``.

    Everything but the last block is the same for every engine, so that a comparison differs in
    nothing else. Without that block DeepSpeed is stock. The buckets are DeepSpeed's defaults, cut
    to the size of a small model, whose buffers would otherwise be larger than the model.

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
            "sub_group_size": point.subgroup_numel,
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
    block = _plugin_block(point)
    if block is not None:
        config["deep_optimizer_states"] = block
    return config


def _offload(point: Point) -> dict[str, Any]:
    blocks: dict[str, Any] = {}
    if point.offload_optimizer != "none":
        blocks["offload_optimizer"] = {
            "device": point.offload_optimizer,
            "ratio": point.offload_ratio if point.engine is Engine.VANILLA else 1.0,
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


def _plugin_block(point: Point) -> dict[str, Any] | None:
    if point.engine is Engine.VANILLA:
        return None
    # The paper's modes end the update before the next forward begins, and so do its phase times.
    block: dict[str, Any] = {"enabled": True, "just_in_time_forward": False, "policy": "all-host"}
    if point.engine is Engine.HYBRID:
        block |= {"policy": "stride", "stride": point.stride}
    if point.offload_ratio < 1:
        # The plugin keeps the rest on the device itself: same learning rate, same checkpoint.
        block["ratio"] = point.offload_ratio
    return block
