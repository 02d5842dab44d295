"""Checkpoints of pipelines, merged, and read by Hugging Face's GPT-2."""

import itertools
import json
import shutil

import numpy as np
import pytest
import torch
from trainer_runs import PIPELINE, train_pipelines, train_together, write_run

from configs.errors import ConfigError
from configs.study import load_study
from dataset import indexed
from dataset.tokenizer import ByteLevelBpe
from launch.export import __main__ as export, weights as exported_weights
from launch.train_loop.checkpoint import find_checkpoint
from launch.train_loop.model import DTYPES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STUDY = load_study("optimus-cc")
MODEL = {**PIPELINE["model"], "ffn": 96, "layers": 5, "seq_length": 32}
COMMON = {
    **PIPELINE,
    "model": MODEL,
    "engine": "uncompressed",
    "global_batch_size": 8,
    "iterations": 2,
    "save_interval": 2,
    # Weights so large that no other GELU or epsilon could be taken for ours.
    "lr": 0.2,
}
RUNS = {
    "stages-and-replicas": {"pp": 2, "dp": 2, "engine": "cb+fe", "inter_grad_comp_rank": 2},
    "stages-and-shards": {"pp": 2, "tp": 2, "dp": 1},
    "four-shards": {"tp": 4, "dp": 1},
    "bf16": {"pp": 2, "tp": 2, "dp": 1, "dtype": "bf16"},
}
LIMITS = {"fp32": 2e-6, "bf16": 0.05, "fp16": 0.01}
"""Largest difference of logits; bf16 has eight bits, fp16 eleven."""


def make_corpus(folder):
    """Documents of words in an order that numbers draw, their tokenizer and their manifest."""
    folder.mkdir()
    draw = np.random.default_rng(3)
    words = np.array(["the", "pipeline", "sends", "gradients", "back", "while", "stages", "wait"])
    texts = [" ".join(draw.choice(words, 150)) + "." for _ in range(30)]
    tokenizer = ByteLevelBpe.learn(texts, 290)
    tokenizer.save(folder / "tokenizer.json")
    documents = [tokenizer.encode(text) for text in texts]
    indexed.write(folder / "corpus", documents, eod=tokenizer.eod, vocab_size=290)
    manifest = {"prefix": "corpus", "vocab_size": 290, "eod": 0, "tokenizer": "tokenizer.json"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder / "corpus"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    parent = tmp_path_factory.mktemp("runs")
    corpus = make_corpus(parent / "data")
    train_pipelines(parent, corpus, STUDY, {n: {**COMMON, **f} for n, f in RUNS.items()})
    return parent


@pytest.fixture(scope="module")
def whole(folders):
    """An export that stays as it is."""
    out = folders / "whole"
    assert export.main([str(folders / "stages-and-replicas"), "--out", str(out)]) == 0
    return out


@pytest.fixture
def copy(folders, tmp_path):
    """A copy of a run to be spoilt, and the folder of its checkpoint."""
    run_dir = tmp_path / "run"
    shutil.copytree(folders / "stages-and-shards", run_dir)
    return run_dir, find_checkpoint(run_dir).path


def model_in(folder):
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel.from_pretrained(folder).eval()


@torch.no_grad()
def difference(folder, run_dir):
    """Largest difference of the exported model's logits, as a share of our largest logit."""
    answer = torch.load(run_dir / "logits.pt")
    found = model_in(folder)(answer["tokens"]).logits
    size = MODEL["vocab_size"]
    assert found.shape[-1] == size < answer["logits"].shape[-1]
    ours = answer["logits"][..., :size].float()
    return ((found - ours).abs().max() / ours.abs().max()).item()


@pytest.mark.parametrize("name", RUNS)
def test_hugging_face_computes_our_logits(folders, tmp_path, name):
    out = tmp_path / "out"
    assert export.main([str(folders / name), "--out", str(out)]) == 0
    assert difference(out, folders / name) < LIMITS[RUNS[name].get("dtype", "fp32")]


def test_logits_differ_where_queries_keys_and_values_are_in_another_order(
    folders, tmp_path, monkeypatch
):
    monkeypatch.setattr(exported_weights, "by_kind", lambda rows, heads: rows)
    export.main([str(folders / "stages-and-shards"), "--out", str(tmp_path / "out")])
    assert difference(tmp_path / "out", folders / "stages-and-shards") > 1e-3


def change_description(folder, change):
    path = folder / "checkpoint.json"
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


def flip_a_bit(folder):
    path = folder / "rank-00001.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change_copy(folder, name):
    """Change a weight in one of the files that have it."""
    path = folder / "rank-00003.pt"
    state = torch.load(path, weights_only=True)
    state["rank"]["optimizer"]["masters"][name][0] += 1e-6
    torch.save(state, path)
    size = path.stat().st_size
    change_description(folder, lambda table: table["files"].update({path.name: size}))


def change_model(folder, **fields):
    change_description(folder, lambda table: table["point"]["model"].update(fields))


TIED, NORM = "embedding.word_embeddings.weight", "decoder.final_layernorm.weight"
"""The last stage has a copy of a tied embedding, and both shards have every norm."""
WRONG = {
    "damaged": (flip_a_bit, "the checkpoint is damaged: "),
    "missing": (
        lambda folder: change_description(folder, lambda t: t["files"].pop("rank-00003.pt")),
        "rank-00003.pt is missing, of 4 ranks' files",
    ),
    "tied": (lambda folder: change_copy(folder, TIED), f"{TIED} differs from the copy"),
    "norm": (lambda folder: change_copy(folder, NORM), f"{NORM} differs from the copy"),
    "twice": (
        lambda folder: shutil.copy(folder / "rank-00000.pt", folder / "rank-00001.pt"),
        "has 1 shards, and tp = 2",
    ),
    "layers": (
        lambda folder: change_model(folder, layers=6),
        "decoder.layers.5.input_layernorm.weight is missing",
    ),
    "llama": (lambda folder: change_model(folder, architecture="llama"), "architecture = "),
    "kv_heads": (lambda folder: change_model(folder, kv_heads=2), "kv_heads = "),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_exported_is_refused_and_leaves_nothing(copy, tmp_path, name):
    run_dir, folder = copy
    change, words = WRONG[name]
    change(folder)
    out = tmp_path / "refused" / "out"
    with pytest.raises(ConfigError) as refused:
        export.main([str(run_dir), "--out", str(out)])
    assert words in str(refused.value)
    assert not list(out.parent.iterdir())


def test_nothing_is_overwritten(folders, whole):
    before = (whole / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(ConfigError, match="already there"):
        export.main([str(folders / "bf16"), "--out", str(whole)])
    assert (whole / "model.safetensors").stat().st_mtime_ns == before


def test_the_tokenizer_is_that_of_the_data(folders, whole, tmp_path, capsys):
    from transformers import AutoTokenizer

    text, ours = "the pipeline  waits, é", ByteLevelBpe.load(folders / "data" / "tokenizer.json")
    tokenizer = AutoTokenizer.from_pretrained(whole)
    assert tokenizer(text).input_ids == ours.encode(text).tolist()
    assert tokenizer.eos_token_id == ours.eod == 0
    assert model_in(whole).config.eos_token_id == 0
    # A checkpoint away from its run is exported too, and says what it lacks.
    alone = tmp_path / "alone"
    shutil.copytree(find_checkpoint(folders / "bf16").path, alone)
    capsys.readouterr()
    assert export.main([str(alone), "--out", str(tmp_path / "out")]) == 0
    assert "no tokenizer.json: " in capsys.readouterr().out
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def train_with_deepspeed(folders, parent, cases, dp=1):
    """Train a case of stage, type and place of the optimizer in turn; return their folders."""
    names = ("zero_stage", "dtype", "offload_optimizer")
    kept = {name: COMMON[name] for name in ("model", "iterations", "save_interval", "lr", "split")}
    trained = {}
    for case in cases:
        folder = parent / "-".join(map(str, case))
        fields = {**kept, "dp": dp, **dict(zip(names, case, strict=True))}
        trained[folder] = str(write_run(folder, folders / "data" / "corpus", fields))
    results = train_together(list(trained), list(trained.values()), dp)
    assert not [result["error"] for result in results if "error" in result]
    return list(trained)


def all_exports_are_the_trained_models(runs):
    """Export runs of DeepSpeed; their logits and the type of their weights must be the run's."""
    for run_dir in runs:
        out = run_dir / "out"
        assert export.main([str(run_dir), "--out", str(out)]) == 0
        dtype = json.loads((run_dir / "run.json").read_text())["point"]["dtype"]
        assert {weight.dtype for weight in model_in(out).parameters()} == {DTYPES[dtype]}
        assert difference(out, run_dir) < LIMITS[dtype], run_dir.name


OFFLOADED = {(1, "fp16"), (2, "fp32"), (3, "bf16")}
"""At each stage and in each type one that is offloaded to the CPU; the others are not."""
ONCE = [*sorted(OFFLOADED), (0, "bf16"), (3, "fp16")]
EACH = list(itertools.product((0, 1, 2, 3), DTYPES))


@pytest.mark.parametrize(
    "pairs", [ONCE, pytest.param(EACH, marks=pytest.mark.exhaustive)], ids=["once", "each"]
)
def test_every_stage_and_type_of_deepspeeds_checkpoints_is_exported(folders, tmp_path, pairs):
    cases = [(*pair, "cpu" if pair in OFFLOADED else "none") for pair in pairs]
    all_exports_are_the_trained_models(train_with_deepspeed(folders, tmp_path, cases))


@pytest.mark.exhaustive
def test_the_parts_of_two_ranks_are_joined(folders, tmp_path):
    product = itertools.product((0, 1, 2, 3), DTYPES, ("none", "cpu"))
    cases = [case for case in product if case[0] or case[2] == "none"]
    all_exports_are_the_trained_models(train_with_deepspeed(folders, tmp_path, cases, dp=2))
