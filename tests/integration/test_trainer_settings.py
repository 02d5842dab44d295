"""What a point may ask of our trainer: types, ZeRO stages, devices, architectures; and apex."""

import math

import pytest
from trainer_runs import MODEL, train_together, write_run

from configs.schema import Model
from configs.study import default_study
from launch.backends import OWN_TRAINER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GPT2 = {**MODEL, "architecture": "gpt2", "kv_heads": 4}
PLACES = [
    (0, "none", "none"),
    *((stage, offload, "none") for stage in (1, 2, 3) for offload in ("none", "cpu")),
    (3, "cpu", "cpu"),
    (3, "none", "cpu"),
]
SAME_BITS = [
    # DeepSpeed sums the norm in another order where the optimizer is offloaded.
    [(stage, "none", "none") for stage in (1, 2)],
    [(stage, "cpu", "none") for stage in (1, 2)],
    [(3, "cpu", place) for place in ("none", "cpu")],
    [(3, "none", place) for place in ("none", "cpu")],
]
"""Stages and devices whose sums run in the same order."""
IN_PAIRS = [(0, "none", "none"), (2, "cpu", "none"), (3, "cpu", "none")]
DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}
HYBRID = {"engine": "stride", "stride": 2}
APEX = {
    "apex/__init__.py": "",
    "apex/contrib/__init__.py": "",
    "apex/contrib/layer_norm/__init__.py": "",
    "apex/contrib/layer_norm/layer_norm.py": "class FastLayerNormFN: pass\n",
    "apex/normalization/__init__.py": "",
    "apex/normalization/fused_layer_norm.py": "class FusedLayerNormAffineFunction: pass\n",
    "apex/optimizers/__init__.py": "class FusedAdam: pass\nclass FusedSGD: pass\n",
    "apex/multi_tensor_apply/__init__.py": "multi_tensor_applier = None\n",
    "apex/transformer/__init__.py": "",
    "apex/transformer/functional/__init__.py": "",
    "amp_C.py": "multi_tensor_l2norm = multi_tensor_scale = None\n",
}
"""The modules of apex that megatron-core and DeepSpeed look for, none of which does anything."""


@pytest.fixture(scope="module")
def train(corpus, tmp_path_factory):
    """Train points, those of one call in one process a rank; a result each, in their order."""

    def run(points, num_ranks=1, path=""):
        folders = [tmp_path_factory.mktemp("run") for _ in points]
        # One micro-batch for a rank alone: what several add up to, `test_trainer.py` shows.
        same = {"iterations": 3, "seed": 5, "micro_batch_size": 4 // num_ranks}
        files = [
            str(write_run(folder, corpus, {**same, **fields}))
            for folder, fields in zip(folders, points, strict=True)
        ]
        return train_together(folders, files, num_ranks, path)

    return run


def _places(name):
    """Return every place for bf16, and the first and the usual one for others.

    ``test_export.py`` trains every type at every stage.
    """
    return PLACES if name == "bf16" else [PLACES[0], (3, "cpu", "none")]


def _point(dtype, place, **more):
    names = ("zero_stage", "offload_optimizer", "offload_param")
    return {"dtype": dtype, **dict(zip(names, place, strict=True)), **more}


@pytest.fixture(scope="module")
def alone(train):
    """Every point of one rank, by its name here, trained in one process."""
    llama = {(dtype, place): _point(dtype, place) for dtype in DTYPES for place in _places(dtype)}
    gpt2 = {("gpt2", place): _point("bf16", place, model=GPT2) for place in _places("gpt2")}
    ours = {"gpt2 stride": {"model": GPT2, **HYBRID}}
    points = {**llama, **gpt2, **ours}
    made = [default_study().point_type(**{"model": MODEL, **p}) for p in points.values()]
    assert not any(map(OWN_TRAINER.refuse, made))
    return dict(zip(points, train(points.values()), strict=True))


@pytest.mark.parametrize("name", [*DTYPES, "gpt2"])
def test_it_trains_at_every_stage_and_place(alone, name):
    results = {place: alone[name, place] for place in _places(name)}
    reference = alone["gpt2" if name == "gpt2" else "fp32", (3, "cpu", "none")]["losses"]
    assert reference[0] == pytest.approx(math.log(512), abs=0.3)
    for place, result in results.items():
        assert "error" not in result, (place, result)
        assert result["dtype"] == DTYPES.get(name, "torch.bfloat16")
        # Only rounding and the order of sums tell stages and devices apart. Stage 0 in 16 bits
        # begins with an Adam step on zero gradients, which is DeepSpeed's.
        assert result["losses"][0] == pytest.approx(reference[0], abs=2e-3)
        assert result["losses"] == pytest.approx(reference, abs=2e-3 if place[0] else 0.01)
        assert None not in result["digests"]
    for places in SAME_BITS:
        digests = [tuple(results[place]["digests"]) for place in places if place in results]
        assert len(set(digests)) == min(1, len(digests))


@pytest.fixture(scope="module")
def in_pairs(train):
    """Every point of two data-parallel ranks, trained in one process a rank."""
    points = {place: _point("bf16", place, dp=2) for place in IN_PAIRS}
    points |= {"gpt2": {"model": GPT2, "dp": 2}, "gpt2 stride": {"model": GPT2, "dp": 2, **HYBRID}}
    return dict(zip(points, train(points.values(), 2), strict=True))


@pytest.mark.parametrize("place", IN_PAIRS, ids=str)
def test_two_ranks_train_as_one_does(alone, in_pairs, place):
    expected = alone["bf16", place]["losses"]
    assert in_pairs[place]["losses"] == pytest.approx(expected, abs=2e-3)
    assert None not in in_pairs[place]["digests"]


def test_gpt2_ends_in_the_same_bits_under_both_engines(alone, in_pairs):
    of_one = alone["gpt2", (3, "cpu", "none")], alone["gpt2 stride"]
    for stock, ours in (of_one, (in_pairs["gpt2"], in_pairs["gpt2 stride"])):
        assert stock["parameters"] == Model(**GPT2).num_parameters()
        assert stock["losses"][2] != stock["losses"][0]
        assert (ours["losses"], ours["digests"]) == (stock["losses"], stock["digests"])


def test_gpt2s_tensor_parallel_ranks_hold_what_is_counted(alone, train):
    parts = train([{"model": GPT2, "tp": 2}], 2)[0]
    model = Model(**GPT2)
    # Norms, positions, and the biases added after a sum over the ranks are on each of them.
    norms = (2 * model.layers + 1) * 2 * model.hidden
    shared = norms + model.seq_length * model.hidden + model.layers * 2 * model.hidden
    assert 2 * parts["parameters"] - shared == model.num_parameters(2)
    whole = alone["gpt2", (3, "cpu", "none")]["losses"]
    assert parts["losses"] == pytest.approx(whole, abs=4e-3)


def test_apex_beside_megatron_core_changes_no_bit(alone, train, tmp_path):
    for name, text in APEX.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    place = (3, "cpu", "none")
    without = [alone["bf16", place], alone["gpt2", place]]
    assert [result["apex"] for result in without] == [False, False]
    found = train([{"model": MODEL}, {"model": GPT2}], path=str(tmp_path))
    assert found == [{**result, "apex": True} for result in without]
