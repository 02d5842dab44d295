"""Attention that does not materialise the scores, as megatron-core's ``core_attention`` module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class SdpaAttention(torch.nn.Module):
    """Causal attention by torch's ``scaled_dot_product_attention``, grouped queries included.

    Takes the place of megatron-core's ``DotProductAttention``, whose constructor and ``forward`` it
    has; there is no dropout, and the mask is the causal one whatever is passed.
    """

    def __init__(
        self,
        config: Any,  # noqa: ANN401 - megatron-core's TransformerConfig
        softmax_scale: float | None = None,
        **_others: object,
    ) -> None:
        super().__init__()
        if config.attention_dropout:
            raise ValueError(f"attention_dropout = {config.attention_dropout}: must be 0")
        self._softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,  # (sequence, micro-batch, heads, head size)
        key: Tensor,  # (sequence, micro-batch, kv heads, head size)
        value: Tensor,  # as key
        *_masks: object,
        **_others: object,
    ) -> Tensor:
        """Attend; returns (sequence, micro-batch, heads x head size)."""
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        context = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=self._softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return context.permute(2, 0, 1, 3).flatten(start_dim=2)
