"""megatron-core's GPT as Hugging Face's GPT-2: the same numbers, named and ordered otherwise.

Sources: megatron-core's ``SelfAttention.get_query_key_value_tensors`` (rows of queries, keys and
values), Hugging Face's ``GPT2LMHeadModel`` (its linear layers have their weights transposed).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from configs.errors import ConfigError
from configs.schema import Model
from launch.trainer.model import EMBEDDING_STD

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
    """Rename and reorder weights; rows that pad the vocabulary are left out.

    Args:
        weights: of the whole model, by megatron-core's names.
        model: its sizes.

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

    Args:
        rows: (heads x 3 x head size, ...): megatron-core keeps each head's query, key and value
            together, so that a shard of the rows is a number of whole heads.
        heads: of the model.

    Returns:
        (3 x heads x head size, ...).
    """
    size = rows.shape[0] // (3 * heads)
    return rows.view(heads, 3, size, -1).transpose(0, 1).reshape(rows.shape)


def gpt2_config(model: Model, dtype: str, end_of_document: int | None) -> dict[str, Any]:
    """What ``config.json`` says.

    Args:
        model: its sizes.
        dtype: of the weights, in torch's words.
        end_of_document: id of the token between documents, which also begins a text without
            context; None where it is not known.
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
