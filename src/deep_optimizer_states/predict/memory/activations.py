"""What forward and backward hold beside weights, gradients and the optimizer's state."""

from __future__ import annotations

from deep_optimizer_states.predict.memory.architecture import FP32_BYTES
from deep_optimizer_states.predict.memory.setting import Setting

LOSS_COPIES = 3
"""Logits while backward begins: their logarithms, and two gradients of them."""


def layer_bytes(setting: Setting) -> tuple[float, float]:
    """Bytes that all layers keep for backward, and the most that one of them keeps.

    With checkpointing the layers keep their inputs alone, and one at a time all of it.
    """
    size, tokens = setting.size, setting.tokens
    model, length = setting.architecture, setting.tokens_a_sample
    each = [
        (layer.count, layer.kept_bytes(size, tokens, length, setting.is_flash))
        for layer in model.layers
    ]
    largest = max(num_bytes for _, num_bytes in each)
    if setting.checkpointing:
        return float(size * tokens * model.hidden * model.num_layers), largest
    return sum(count * num_bytes for count, num_bytes in each), largest


def loss_bytes(setting: Setting) -> float:
    """Logits and their gradients, at the moment at which most of them are there."""
    model = setting.architecture
    each = FP32_BYTES if model.logits_fp32 else setting.size
    num_bytes = model.logit_bytes or LOSS_COPIES * each
    return num_bytes * setting.tokens * model.vocab_size


def head_bytes(setting: Setting) -> float:
    """What is kept outside the layers, logits left out."""
    model = setting.architecture
    return setting.tokens * (setting.size * model.head_kept + FP32_BYTES * model.head_kept_fp32)
