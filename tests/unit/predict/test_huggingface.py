"""Counts of parameters and of what autograd keeps, held against transformers' own classes."""

import json
import sys

import pytest
import torch
from kept_memory import saved_bytes

from deep_optimizer_states.predict.huggingface import (
    language_model,
    model_of_config,
    read_config,
)
from deep_optimizer_states.predict.machine import load_machine
from deep_optimizer_states.predict.model import ModelError, load_model
from deep_optimizer_states.predict.predict import predict
from deep_optimizer_states.predict.workload import STOCK, Workload, WorkloadError

COMMON = {
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "vocab_size": 300,
}
LLAMA = {**COMMON, "model_type": "llama", "num_key_value_heads": 2}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
T5 = {"model_type": "t5", "d_model": 96, "d_kv": 24, "d_ff": 200, "num_layers": 3}
T5 |= {"num_decoder_layers": 2, "num_heads": 6, "vocab_size": 300, "decoder_start_token_id": 0}
GPT2 = {"model_type": "gpt2", "n_embd": 96, "n_layer": 3, "n_head": 6, "vocab_size": 300}
BERT = {**COMMON, "model_type": "bert"}
QWEN = {**LLAMA, "model_type": "qwen3", "head_dim": 24}


def transformers_own(table):
    """The config that transformers makes of a table; it is imported where a test needs it alone."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**table, use_cache=False)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("table", [LLAMA, GPT2, BERT, T5, QWEN], ids=lambda t: t["model_type"])
def test_what_is_kept_is_what_a_real_forward_saves(table, dtype, attention):
    config = transformers_own(table)
    model = language_model(config, attention).to(dtype).eval()
    found, samples = model_of_config(table), 2
    assert found.tensors() == [parameter.numel() for parameter in model.parameters()]
    assert found.layers == (5 if table is T5 else 3)
    ids = torch.randint(2, 300, (samples, 64))
    saved = saved_bytes(model, lambda: model(input_ids=ids, labels=ids).loss)
    kept = found.kept_of()(dtype.itemsize, 64, attention == "sdpa")
    assert kept.layer <= kept.largest < saved / samples / 2
    one_copy_of_logits = kept.logits / 3
    total = found.layers * kept.layer + kept.head + one_copy_of_logits
    assert samples * total == pytest.approx(saved, rel=0.035 if table is T5 else 0.01)


def test_layers_are_told_apart_and_their_time_is_that_of_the_same_gpt():
    """A shipped model as transformers builds it, with as many rows in the embedding."""
    shipped = load_model("1.3B")[0]
    table = {
        "model_type": "llama", "hidden_size": shipped.hidden, "intermediate_size": shipped.ffn,
        "num_hidden_layers": shipped.layers, "num_attention_heads": shipped.heads,
        "num_key_value_heads": shipped.kv_heads, "vocab_size": shipped.padded_vocab_size(),
    }  # fmt: skip
    found = model_of_config(table)
    assert found.has_time
    assert [sum(block) for block in found.blocks()] == [sum(block) for block in shipped.blocks()]
    assert (found.ffn, found.heads, found.kv_heads) == (
        shipped.ffn,
        shipped.heads,
        shipped.kv_heads,
    )
    machine = load_machine("h100x4")
    for software in (STOCK, None):
        times = [
            predict(Workload(model, software, dp=2, sequence_length=2048, policy="stride"), machine)
            for model in (shipped, found)
        ]
        assert times[1].forward_s == pytest.approx(times[0].forward_s, rel=1e-6)
        assert times[1].iteration_s == pytest.approx(times[0].iteration_s, rel=0.02)


@pytest.mark.parametrize("table", [GPT2, BERT, T5, QWEN], ids=lambda t: t["model_type"])
def test_other_families_have_a_time_too(table):
    found = model_of_config(table)
    assert len(found.blocks()) == found.layers + 2
    assert found.tensors() == [number for block in found.blocks() for number in block]
    workload = Workload(found, STOCK, sequence_length=64, materialized_attention=False)
    assert predict(workload, load_machine("h100x4")).forward_s > 0


@pytest.mark.parametrize(
    "table", [MIXTRAL, {**COMMON, "model_type": "albert"}], ids=["moe", "shared"]
)
def test_layers_that_do_not_take_every_token_or_are_run_again_have_no_time(table):
    found = model_of_config(table)
    assert not found.has_time
    with pytest.raises(WorkloadError, match="whose layers each take every token"):
        predict(Workload(found, STOCK, sequence_length=64), load_machine("h100x4"))


GPTJ = {"model_type": "gptj", "n_embd": 96, "n_layer": 3, "n_head": 6, "rotary_dim": 8}
GPTJ |= {"vocab_size": 300}
GEMMA2 = {**LLAMA, "model_type": "gemma2", "head_dim": 16}
ALBERT = {**COMMON, "model_type": "albert", "embedding_size": 32}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 24, "qk_nope_head_dim": 16}
LATENT |= {"num_key_value_heads": 6, "v_head_dim": 16}
DOTS3 = {**COMMON, **LATENT, "model_type": "dots3_note_text", "qk_rope_head_dim": 8}
DOTS3 |= {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 16, "pad_token_id": None}
DOTS3 |= {"first_k_dense_replace": 3, **{f"swa_{name}": size for name, size in LATENT.items()}}
DOTS3 |= {"swa_num_attention_heads": 8, "swa_num_key_value_heads": 8}


@pytest.mark.parametrize("table", [GPTJ, GEMMA2, ALBERT, DOTS3], ids=lambda t: t["model_type"])
def test_families_with_ways_of_their_own_are_measured_in_them(table):
    """Their own attentions, capped scores, a layer run again and again, heads by layer."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if table["model_type"] not in CONFIG_MAPPING:
        pytest.skip("this release of transformers does not know it")
    found = model_of_config(table)
    config = transformers_own(table)
    model = language_model(config).to(torch.bfloat16).eval()
    ids = torch.randint(2, 300, (1, 64))
    saved = saved_bytes(model, lambda: model(input_ids=ids, labels=ids).loss)
    kept = found.kept_of()(2, 64, True)
    assert not kept.unknown
    assert found.layers == 3
    assert found.tensors() == [parameter.numel() for parameter in model.parameters()]
    if table is DOTS3:
        assert (found.heads, found.kv_heads) == (8, 8), "the most of any layer"
    assert 3 * kept.layer + kept.head + kept.logits / 3 == pytest.approx(saved, rel=0.02)


def test_a_family_whose_code_looks_at_values_is_not_measured_and_says_why(capfd):
    sizes = {"emb_dim": 64, "n_layers": 2, "n_heads": 2, "n_words": 300}
    found = model_of_config({"model_type": "xlm", **sizes})
    kept = found.kept_of()(2, 64, True)
    assert (kept.layer, kept.largest, kept.head, kept.logits) == (0, 0, 0, 0)
    assert "its code asks for values" in kept.unknown
    assert "\n" not in kept.unknown
    assert found.numel > 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({}, "fp32"),
        ({"torch_dtype": "bfloat16"}, "bf16"),
        ({"dtype": "float16"}, "fp16"),
        ({"torch_dtype": "float32"}, "fp32"),
    ],
)
def test_a_file_says_of_what_type_its_checkpoint_is(tmp_path, given, kind):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **given}))
    assert read_config(path).checkpoint == kind
    path.write_text(json.dumps({"text_config": LLAMA, **given}))
    assert read_config(path).checkpoint == kind
    assert model_of_config(LLAMA).checkpoint == ""  # built from nothing


def test_logits_and_tied_embeddings_are_told_apart():
    untied, tied = (
        model_of_config({**LLAMA, "tie_word_embeddings": tied}) for tied in (False, True)
    )
    assert (untied.tied_numel, tied.tied_numel) == (0, 300 * 96)
    assert untied.numel - tied.numel == 300 * 96
    assert untied.kept_of()(2, 64, True).logits == 3 * 4 * 64 * 300  # in fp32, of a causal model
    assert model_of_config(BERT).kept_of()(2, 64, True).logits == 3 * 2 * 64 * 300


def test_experts_are_measured_in_the_type_that_torch_multiplies_them_in():
    found = model_of_config(MIXTRAL)
    assert found.has_experts
    assert not model_of_config(LLAMA).has_experts
    assert found.kept_of()(4, 64, True).layer == 2 * found.kept_of()(2, 64, True).layer


def test_layers_that_differ_are_all_counted():
    sizes = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
    table = {**LLAMA, **sizes, "model_type": "qwen3_moe", "num_hidden_layers": 4, "head_dim": 16}
    experts, dense, mixed = (
        model_of_config({**table, "mlp_only_layers": layers}).kept_of()(2, 64, True).layer
        for layers in ([], [0, 1, 2, 3], [0, 1])
    )
    assert mixed == pytest.approx((experts + dense) / 2, rel=0.02)
    assert experts != pytest.approx(dense, rel=0.05)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[1]", "is no JSON object; give a Hugging Face config.json"),
        ('{"model_type": "lama"}', "model_type = 'lama': did you mean 'llama'?"),
        ('{"hidden_size": 8}', "model_type = 'None': "),
        ('{"text_config": 3}', "model_type = 'None': "),
        (json.dumps({**LLAMA, "vocab_size": "many"}), "vocab_size"),
        (json.dumps({**LLAMA, "hidden_size": -8}), "hidden_size = -8: give at least 1"),
        (json.dumps({**LLAMA, "vocab_size": 0}), "vocab_size = 0: give at least 1"),
        (json.dumps({**LLAMA, "num_key_value_heads": 0}), "num_key_value_heads = 0: give at least"),
        (json.dumps({**LLAMA, "num_hidden_layers": -2}), "num_hidden_layers = -2: give at least 1"),
        (json.dumps({**LLAMA, "num_hidden_layers": 0}), "num_hidden_layers = 0: give at least 1"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelError) as error:
        read_config(path)
    assert str(path) in str(error.value)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_of_a_model_with_several_parts_it_is_said_that_one_is_counted():
    whole = {"model_type": "llava", "text_config": LLAMA, "vision_config": {}}
    assert model_of_config(whole).name == "llama (the text part of llava alone)"
    assert model_of_config(LLAMA).name == "llama"


def test_without_transformers_it_is_said_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match="needs transformers, which is not installed"):
        model_of_config(LLAMA)
