"""A checkpoint's weights: joined whatever TP, PP and DP they had, then as Hugging Face's GPT-2.

The numbers stay; names and order change. Sources: megatron-core's
``SelfAttention.get_query_key_value_tensors`` (rows of queries, keys and values), Hugging Face's
``GPT2LMHeadModel`` (its linear layers have their weights transposed).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from configs.errors import ConfigError
from configs.schema import Model
from launch.train_loop.checkpoint import Checkpoint
from launch.train_loop.model import DTYPES, EMBEDDING_STD
from launch.train_loop.pipeline_adapter import file_name, read_shard

LAYER_NORM_EPSILON = 1e-5
"""megatron-core's default, which the trainers leave as it is."""
_OUTER = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "decoder.final_layernorm.weight": "transformer.ln_f.weight",
    "decoder.final_layernorm.bias": "transformer.ln_f.bias",
}
_NORMS = {"input_layernorm": "ln_1", "pre_mlp_layernorm": "ln_2"}
_LINEAR = {
    "self_attention.linear_qkv": "attn.c_attn",
    "self_attention.linear_proj": "attn.c_proj",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}
_DEEPSPEED = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"
"""What every checkpoint of DeepSpeed has one of, by whether the stage is below 3."""


def merge(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Join the whole model's weights.

    Files of the pipeline trainer are mapped, not read whole, so that the memory needed is that of
    the weights in the run's type. Those of DeepSpeed need the weights in fp32 beside.

    Returns:
        Weights in the run's type, by megatron-core's names for a model on one rank.

    Raises:
        ConfigError: it is damaged, lacks a rank's file, or holds two copies of a weight that are
            not equal; or it is of DeepSpeed with tensor parallelism.
    """
    if damage := checkpoint.damage():
        raise ConfigError(f"the checkpoint is damaged: {damage}; take an earlier one")
    if any(name in checkpoint.files for name in _DEEPSPEED):
        return _of_deepspeed(checkpoint)
    point = checkpoint.point
    shards, axes = _collect(checkpoint)
    whole = {}
    for name, parts in shards.items():
        axis = axes[name]
        if axis is not None and len(parts) != point["tp"]:
            raise ConfigError(
                f"{checkpoint.path}: {name} has {len(parts)} shards, and tp = {point['tp']}; the "
                "checkpoint is not whole, take another one"
            )
        ordered = [parts[index].to(DTYPES[point["dtype"]]) for index in sorted(parts)]
        whole[name] = ordered[0] if axis is None else torch.cat(ordered, dim=axis)
    return whole


def _collect(
    checkpoint: Checkpoint,
) -> tuple[dict[str, dict[int, Tensor]], dict[str, int | None]]:
    """Return master weights by name and tensor-parallel rank, and the axis each is split along.

    Replicas, tied embeddings and weights that are not split are in several files: all of these
    copies have to have the same bits.
    """
    shards: dict[str, dict[int, Tensor]] = {}
    axes: dict[str, int | None] = {}
    num_ranks = math.prod(checkpoint.point[name] for name in ("tp", "pp", "dp"))
    for file in map(file_name, range(num_ranks)):
        path = checkpoint.path / file
        if file not in checkpoint.files:
            raise ConfigError(
                f"{checkpoint.path}: {file} is missing, of {num_ranks} ranks' files; give a "
                "checkpoint of --trainer megatron-pipeline or of DeepSpeed"
            )
        state = read_shard(path, mmap=True)
        for name, weight in state["rank"]["optimizer"]["masters"].items():
            axis = axes.setdefault(name, state["split_along"][name])
            index = 0 if axis is None else state["place"]["tp"]
            known = shards.setdefault(name, {}).setdefault(index, weight)
            # As whole numbers, since a NaN equals nothing.
            if not torch.equal(known.view(torch.int32), weight.view(torch.int32)):
                raise ConfigError(
                    f"{path}: {name} differs from the copy that another rank saved, and all "
                    "copies must be equal; take another checkpoint"
                )
    return shards, axes


def _of_deepspeed(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """DeepSpeed joins its own parts of optimizer states; below stage 1 there are none."""
    point: dict[str, Any] = checkpoint.point
    if point["tp"] > 1:
        raise ConfigError(
            f"tp = {point['tp']}: a checkpoint of DeepSpeed is joined over replicas alone; give a "
            "run with tp = 1, or one of --trainer megatron-pipeline"
        )
    if point["zero_stage"] == 0:
        path = checkpoint.path / _DEEPSPEED[0]
        found = torch.load(path, map_location="cpu", weights_only=False)["module"]
    else:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        folder = checkpoint.path
        found = get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), folder.name)
    dtype = DTYPES[point["dtype"]]
    # Copied even if the type stays: at stages 1 and 2 each weight is a view of one flat tensor, and
    # safetensors writes none that fills only a part of its storage.
    return {
        name: weight.to(dtype, copy=True) for name, weight in found.items() if weight is not None
    }


def require_gpt2(model: Model) -> None:
    """Check that a model is one that GPT-2's code can run.

    Raises:
        ConfigError: it is not.
    """
    if model.architecture != "gpt2":
        raise ConfigError(
            f"architecture = '{model.architecture}': 'gpt2' alone is exported; train with "
            "--model.architecture gpt2"
        )
    if model.kv_heads != model.heads:
        raise ConfigError(
            f"kv_heads = {model.kv_heads}: Hugging Face's GPT-2 has keys and values for each of "
            f"the {model.heads} heads; train with kv_heads = {model.heads}"
        )


def gpt2_weights(weights: dict[str, Tensor], model: Model) -> dict[str, Tensor]:
    """Rename and reorder a whole model's weights; rows that pad the vocabulary are left out.

    Returns:
        Weights of ``GPT2LMHeadModel``, whose head is the embedding.

    Raises:
        ConfigError: one is missing, or is none of GPT-2's.
    """
    left = dict(weights)

    def take(name: str) -> Tensor:
        try:
            return left.pop(name)
        except KeyError:
            raise ConfigError(
                f"{name} is missing from the checkpoint; it is not whole, take another one"
            ) from None

    found = {theirs: take(ours) for ours, theirs in _OUTER.items()}
    embedding = found["transformer.wte.weight"]
    found["transformer.wte.weight"] = embedding[: model.vocab_size].clone()
    for number in range(model.layers):
        ours, theirs = f"decoder.layers.{number}", f"transformer.h.{number}"
        for one, other in _NORMS.items():
            for kind in ("weight", "bias"):
                found[f"{theirs}.{other}.{kind}"] = take(f"{ours}.{one}.{kind}")
        for one, other in _LINEAR.items():
            weight, bias = (take(f"{ours}.{one}.{kind}") for kind in ("weight", "bias"))
            if other == "attn.c_attn":
                weight, bias = (by_kind(rows, model.heads) for rows in (weight, bias))
            found[f"{theirs}.{other}.weight"] = weight.t().contiguous()
            found[f"{theirs}.{other}.bias"] = bias
    if left:
        raise ConfigError(
            f"{min(left)}: GPT-2 has no such weight; the checkpoint is of another model"
        )
    return found


def by_kind(rows: Tensor, heads: int) -> Tensor:
    """Put all queries first, then all keys, then all values.

    ``rows`` are (heads x 3 x head size, ...): megatron-core keeps each head's query, key and value
    together, so that a shard of the rows is a number of whole heads.
    """
    size = rows.shape[0] // (3 * heads)
    return rows.view(heads, 3, size, -1).transpose(0, 1).reshape(rows.shape)


def gpt2_config(model: Model, dtype: str, end_of_document: int | None) -> dict[str, Any]:
    """Return what ``config.json`` says; ``dtype`` is in torch's words.

    The token between documents also begins a text without context; its id is None where it is not
    known.
    """
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": model.vocab_size,
        "n_positions": model.seq_length,
        "n_embd": model.hidden,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": model.ffn,
        # GELU's approximation by tanh, computed by torch as in training.
        "activation_function": "gelu_pytorch_tanh",
        "layer_norm_epsilon": LAYER_NORM_EPSILON,
        "initializer_range": EMBEDDING_STD,
        # The trainers have no dropout.
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": True,
        "dtype": dtype,
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
    }
