"""Builds a GPT from megatron-core, whole or a stage of a pipeline."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from configs.schema import Model, Point

ROTARY_BASE = 10000
"""Base of the rotary frequencies, as in LLaMA and Megatron."""
EMBEDDING_STD = 0.02
"""Standard deviation of initial weights, Megatron's default."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
    },
    "gpt2": {
        "gated_linear_unit": False,
        # GPT-2's GELU is the approximation by tanh.
        "activation_func": functools.partial(functional.gelu, approximate="tanh"),
        "normalization": "LayerNorm",
        "add_bias_linear": True,
    },
}
"""What tells the architectures apart, in megatron-core's words."""


def transformer_config(point: Point, on_cpu: bool) -> Any:
    """Return the point's model in megatron-core's words; there is no dropout.

    Fusions that need apex or Transformer Engine are off. Without CUDA the weights are made whole
    in fp32 and then cut, which makes them the same for every tensor-parallel degree; with CUDA
    each rank makes its own part.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    model, dtype = point.model, DTYPES[point.dtype]
    # Which layers each stage has; megatron-core numbers layers by it.
    layout = [["decoder"] * number for number in model.layers_of_stages(point.pp)]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=EMBEDDING_STD,
        bf16=point.dtype == "bf16",
        fp16=point.dtype == "fp16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=point.tp,
        pipeline_model_parallel_size=point.pp,
        pipeline_model_parallel_layout=layout if point.pp > 1 else None,
        # It would wait for CUDA, on a CPU too, because of a bug that torch no longer has.
        batch_p2p_sync=False,
        use_cpu_initialization=on_cpu,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        **_ARCHITECTURES[model.architecture],
        recompute_granularity="full" if point.activation_checkpointing else None,
        recompute_method="uniform" if point.activation_checkpointing else None,
        recompute_num_layers=1 if point.activation_checkpointing else None,
    )


def make_gpt(point: Point, on_cpu: bool, stage: int = 0) -> Any:
    """Make a pipeline stage's part of the model, with its initial weights.

    The first stage looks tokens up, the last one computes the loss.

    Every norm is named: where apex or Transformer Engine can be imported, megatron-core would take
    theirs, which have no RMSNorm or other bits.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    model = point.model
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = WrappedTorchNorm
    layer.submodules.pre_mlp_layernorm = WrappedTorchNorm
    if point.attention == "sdpa":
        layer.submodules.self_attention.submodules.core_attention = SdpaAttention
    is_llama = model.architecture == "llama"
    gpt = GPTModel(
        config=transformer_config(point, on_cpu),
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[layer] * model.layers_of_stages(point.pp)[stage],
            layer_norm=WrappedTorchNorm,
        ),
        vocab_size=model.padded_vocab_size(point.tp),
        max_sequence_length=model.seq_length,
        pre_process=stage == 0,
        post_process=stage == point.pp - 1,
        position_embedding_type="rope" if is_llama else "none",
        rotary_base=ROTARY_BASE,
        share_embeddings_and_output_weights=not is_llama,
        parallel_output=True,
    )
    if not is_llama and stage == 0:
        gpt.embedding.position_embeddings = PositionEmbedding(model.seq_length, model.hidden)
        gpt.embedding.add_position_embedding = True
    return gpt


class SdpaAttention(torch.nn.Module):
    """Causal attention by torch's ``scaled_dot_product_attention``, grouped queries included.

    Takes the place of megatron-core's ``DotProductAttention``, whose constructor and ``forward`` it
    has, and does not materialise the scores; there is no dropout, and the mask is the causal one
    whatever is passed.
    """

    def __init__(
        self,
        config: Any,
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


class PositionEmbedding(torch.nn.Embedding):
    """Learned positions that draw their initial weights when they are made.

    megatron-core draws them afterwards, when ZeRO-3 has already taken the weights apart: they would
    keep torch's own, fifty times as large.
    """

    def reset_parameters(self) -> None:
        """Draw initial weights."""
        torch.nn.init.normal_(self.weight, std=EMBEDDING_STD)


def rotary_frequencies(model: Model, device: torch.device) -> Tensor:
    """Return rotary angles per position, (head size / 2,) fp32 on ``device``."""
    size = model.hidden // model.heads
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    return 1.0 / (ROTARY_BASE**exponents)


def causal_mask(point: Point, device: torch.device) -> Tensor | None:
    """Return the mask of stock attention, (1, 1, sequence, sequence) bool, true where hidden."""
    if point.attention == "sdpa":
        return None
    length = point.model.seq_length
    ones = torch.ones((1, 1, length, length), dtype=torch.bool, device=device)
    return ones.triu(diagonal=1)
