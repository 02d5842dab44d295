"""Builds the paper's GPT from megatron-core and hands it to DeepSpeed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from configs.schema import Model, Point
from launch.trainer.attention import SdpaAttention
from launch.trainer.runfile import RunFile
from launch.trainer.schedule import CosineSchedule

ROTARY_BASE = 10000
"""Base of the rotary frequencies, as in LLaMA and Megatron."""
EMBEDDING_STD = 0.02
"""Standard deviation of initial weights, Megatron's default."""


class ParallelState:
    """megatron-core's process groups under the names DeepSpeed calls them by."""

    def __init__(self) -> None:
        from megatron.core import parallel_state

        self.get_data_parallel_group = parallel_state.get_data_parallel_group
        self.get_data_parallel_rank = parallel_state.get_data_parallel_rank
        self.get_data_parallel_world_size = parallel_state.get_data_parallel_world_size
        self.get_model_parallel_group = parallel_state.get_tensor_model_parallel_group
        self.get_model_parallel_rank = parallel_state.get_tensor_model_parallel_rank
        self.get_model_parallel_world_size = parallel_state.get_tensor_model_parallel_world_size
        # DeepSpeed's checkpoints ask for the newer names.
        self.get_tensor_model_parallel_group = self.get_model_parallel_group
        self.get_tensor_model_parallel_rank = self.get_model_parallel_rank
        self.get_tensor_model_parallel_world_size = self.get_model_parallel_world_size


def transformer_config(point: Point, on_cpu: bool) -> Any:  # noqa: ANN401 - TransformerConfig
    """The paper's flags: SwiGLU, RMSNorm, grouped queries, no bias, no dropout, bf16.

    Fusions that need apex or Transformer Engine are off. Without CUDA the weights are made whole
    in fp32 and then cut, which makes them the same for every tensor-parallel degree; with CUDA
    each rank makes its own part.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    model = point.model
    recompute: dict[str, Any] = {}
    if point.activation_checkpointing:
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=EMBEDDING_STD,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=point.tp,
        use_cpu_initialization=on_cpu,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        **recompute,
    )


def make_gpt(point: Point, on_cpu: bool) -> Any:  # noqa: ANN401 - megatron-core's GPTModel
    """Make this rank's part of the model, with its initial weights."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    if point.attention == "sdpa":
        layer.submodules.self_attention.submodules.core_attention = SdpaAttention
    return GPTModel(
        config=transformer_config(point, on_cpu),
        transformer_layer_spec=layer,
        vocab_size=point.model.padded_vocab_size(point.tp),
        max_sequence_length=point.model.seq_length,
        position_embedding_type="rope",
        rotary_base=ROTARY_BASE,
        share_embeddings_and_output_weights=False,
        parallel_output=True,
    )


def build_model(run: RunFile, mpu: ParallelState, device: torch.device) -> Any:  # noqa: ANN401
    """Make the model with its parameters partitioned over the data-parallel ranks from the start.

    No rank ever holds more than one whole layer, so a model need not fit into one device.
    """
    import deepspeed

    with deepspeed.zero.Init(
        data_parallel_group=mpu.get_data_parallel_group(),
        config_dict_or_path=run.ds_config,
        dtype=torch.bfloat16,
        mpu=mpu,
    ):
        model = make_gpt(run.point, on_cpu=device.type == "cpu")
    # zero.Init makes every new float tensor bf16; rotary frequencies need fp32.
    model.rotary_pos_emb.inv_freq = rotary_frequencies(run.point.model, device)
    return model


def rotary_frequencies(model: Model, device: torch.device) -> Tensor:
    """Rotary angles per position, (head size / 2,) fp32 on ``device``."""
    size = model.hidden // model.heads
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    return 1.0 / (ROTARY_BASE**exponents)


def initialize_engine(run: RunFile, model: Any, mpu: ParallelState) -> Any:  # noqa: ANN401
    """Hand the model to DeepSpeed; the optimizer comes from ``ds_config.json``.

    Returns:
        DeepSpeed's engine.
    """
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=run.ds_config,
        lr_scheduler=lambda optimizer: CosineSchedule(optimizer, run.point),
        mpu=mpu,
        dist_init_required=False,
    )
    engine.train()
    return engine


def num_local_parameters(model: torch.nn.Module) -> int:
    """Parameters of this tensor-parallel rank, over its data-parallel ranks."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())


def causal_mask(point: Point, device: torch.device) -> Tensor | None:
    """Mask for stock attention, (1, 1, sequence, sequence) bool, true where hidden."""
    if point.attention == "sdpa":
        return None
    length = point.model.seq_length
    ones = torch.ones((1, 1, length, length), dtype=torch.bool, device=device)
    return ones.triu(diagonal=1)
