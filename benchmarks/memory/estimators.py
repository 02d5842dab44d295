"""What other estimators say of a case: DeepSpeed's two, and accelerate's."""

from __future__ import annotations

from typing import Any

from deep_optimizer_states.predict.memory.setting import Setting


def deepspeed_bytes(setting: Setting) -> tuple[float, float] | None:
    """Device and host bytes of one rank, all ranks on one node; None where it has no estimate."""
    if setting.stage < 2:
        return None
    model, ranks = setting.architecture, setting.dp
    offloads = setting.optimizer_at != "none"
    found: Any
    if setting.stage == 2:
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

        found = estimate_zero2_model_states_mem_needs(model.numel, ranks, 1, offloads)
    else:
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

        # The largest layer as its own function counts it: a module with weights of its own.
        found = estimate_zero3_model_states_mem_needs(
            model.numel, setting.largest, ranks, 1, offloads, setting.weights_at != "none"
        )
    return float(found[1]), float(found[0]) / ranks


def accelerate_bytes(setting: Setting) -> float:
    """Bytes of training, which it shows as the largest of its four terms."""
    from accelerate.commands.estimate import estimate_training_usage

    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[setting.dtype]
    terms: dict[str, float] = estimate_training_usage(4 * setting.numel, dtype)
    return float(max(terms.values()))
