"""Counts of parameters and of what autograd keeps, held against transformers' own classes."""

import json

import pytest
import torch
import transformers
from kept_memory import saved_bytes

from deep_optimizer_states.predict.memory.architecture import (
    architecture_of,
    architecture_of_shape,
    read_architecture,
)
from deep_optimizer_states.predict.model import ModelError, load_model

COMMON = {
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "vocab_size": 300,
}
LLAMA = {**COMMON, "num_key_value_heads": 2, "max_position_embeddings": 128}
GPT2 = {"n_embd": 96, "n_layer": 3, "n_head": 6, "vocab_size": 300, "n_positions": 128}
T5 = {"d_model": 96, "d_kv": 24, "d_ff": 200, "num_layers": 3, "num_decoder_layers": 2}
T5 |= {"num_heads": 6, "vocab_size": 300, "decoder_start_token_id": 0, "dropout_rate": 0.0}
NO_DROPOUT = {
    "gpt2": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "bert": dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
}
MODELS = [
    {"model_type": "llama", **LLAMA},
    {"model_type": "llama", **LLAMA, "tie_word_embeddings": True, "head_dim": 24},
    {"model_type": "llama", **LLAMA, "attention_bias": True, "mlp_bias": True},
    {"model_type": "mistral", **LLAMA},
    {"model_type": "qwen2", **LLAMA},
    {"model_type": "qwen3", **LLAMA, "head_dim": 24},
    {"model_type": "mixtral", **LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "gpt2", **GPT2},
    {"model_type": "gpt2", **GPT2, "n_inner": 100},
    {"model_type": "bert", **COMMON, "max_position_embeddings": 128},
    {"model_type": "t5", **T5},
    {"model_type": "t5", **T5, "num_layers": 1, "num_decoder_layers": 1},
    {"model_type": "t5", **T5, "feed_forward_proj": "gated-gelu"},
]
CLASSES = {
    "t5": transformers.AutoModelForSeq2SeqLM,
    "bert": transformers.AutoModelForMaskedLM,
}


def make(table, attention="sdpa"):
    table = {**table, **NO_DROPOUT.get(table["model_type"], {})}
    config = transformers.AutoConfig.for_model(**table)
    config._attn_implementation = attention
    config.use_cache = False
    kind = CLASSES.get(table["model_type"], transformers.AutoModelForCausalLM)
    return kind.from_config(config)


@pytest.mark.parametrize("table", MODELS, ids=lambda table: "-".join(map(str, table.values())))
def test_every_tensor_is_that_of_the_real_class_in_its_order(table):
    with torch.device("meta"):
        model = make(table)
    got = architecture_of(table)
    assert got.tensors == [parameter.numel() for parameter in model.parameters()]
    assert got.numel == model.num_parameters()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mixtral", "gpt2", "bert", "t5"])
def test_what_layers_keep_is_what_autograd_saves(kind, dtype, attention):
    table = next(table for table in MODELS if table["model_type"] == kind)
    model, size = make(table, attention).to(dtype).train(), dtype.itemsize
    shape, tokens = architecture_of(table), 2 * 64
    kept = sum(
        layer.count * layer.kept_bytes(size, tokens, 64, attention == "sdpa")
        for layer in shape.layers
    )
    kept += tokens * (size * shape.head_kept + 4 * shape.head_kept_fp32)
    kept += tokens * shape.vocab_size * (4 if shape.logits_fp32 else size)
    # What is left out is a few numbers a token (statistics, indices, positions).
    ids = torch.randint(2, 300, (2, 64))
    saved = saved_bytes(model, lambda: model(input_ids=ids, labels=ids).loss)
    assert kept == pytest.approx(saved, rel=0.035)


def test_a_shipped_model_keeps_its_count():
    shape = load_model("7B")[0]
    got = architecture_of_shape(shape)
    assert got.tensors == shape.tensors()
    assert got.numel == shape.num_parameters()


def test_numbers_that_a_config_leaves_out_take_transformers_own(tmp_path):
    path = tmp_path / "config.json"
    table = {name: LLAMA[name] for name in COMMON}
    path.write_text(json.dumps({"model_type": "llama", **table}))
    with torch.device("meta"):
        model = make({"model_type": "llama", **table})
    assert read_architecture(path).numel == model.num_parameters()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[1]", "is no JSON object; give a Hugging Face config.json"),
        ('{"model_type": "lama"}', "model_type = 'lama': did you mean 'llama'?"),
        ('{"model_type": "mamba"}', "memory is known of gpt2, llama, mistral"),
        ('{"model_type": "bert", "hidden_size": 8}', "intermediate_size is missing"),
        (
            json.dumps({"model_type": "llama", **LLAMA, "vocab_size": "many"}),
            "vocab_size = 'many': give a whole number above 0",
        ),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelError) as error:
        read_architecture(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)
