"""The study of compressed communication: its models, schemes and sweeps."""

import dataclasses

import pytest

from configs.study import load_study
from configs.sweep import load_sweep, sweep_names
from launch.backends.own import PipelineTrainer
from optimus_cc import Settings
from optimus_cc.sizes import packed_bytes, pair_numel

STUDY = load_study("optimus-cc")
TRAINER = PipelineTrainer()


@pytest.mark.parametrize(
    ("name", "parameters"), [("gpt2-335M", 0.355e9), ("gpt2-2.5B", 2.40e9), ("gpt2-8.3B", 8.31e9)]
)
def test_the_published_models_have_the_parameters_of_a_gpt2(name, parameters):
    """Vocabulary and positions included, of which the names leave some out."""
    model, defaults = STUDY.load_model(name)
    assert model.num_parameters(defaults["tp"]) == pytest.approx(parameters, rel=0.01)
    point = STUDY.make_point({"model": name})
    assert (point.num_ranks, point.accumulation) == (64, 32)


def points(name, form):
    sweep = load_sweep(name, STUDY)
    return (sweep.small() if form == "tiny" else sweep).points(None)


@pytest.mark.parametrize("form", ["full", "tiny"])
@pytest.mark.parametrize("name", sweep_names(STUDY))
def test_every_point_of_every_sweep_can_be_run(name, form):
    found = points(name, form)
    for point in found:
        assert TRAINER.refuse(point) == []
        block = TRAINER.ds_config(point).get("optimus_cc", {})
        assert set(block) <= {field.name for field in dataclasses.fields(Settings)}
        Settings(**block).check_stages(point.pp)
        assert 0 < point.eval_interval <= point.iterations
    engines = {point.engine for point in found}
    assert {engine.trainer for engine in STUDY.engines.values()} == {TRAINER.name}
    # What takes how long does not depend on the seed, and quality is not asked for there.
    seeds = 1 if name in ("links", "ranks") else 3
    assert len({point.seed for point in found if point.engine == STUDY.reference}) == seeds
    assert STUDY.reference in engines


@pytest.mark.parametrize(
    ("form", "ranks", "gradients", "close"),
    [("full", {4: 121, 8: 235}, 37, 0.003), ("tiny", {4: 6, 8: 11}, 6, 0.06)],
)
def test_peers_are_compared_at_equal_bytes(form, ranks, gradients, close):
    """Of a message, and of the matrices of a layer on one tensor-parallel rank."""
    found = points("equal-bytes", form)
    assert {getattr(p, "inter_grad_comp_rank", 6) for p in found} >= set(ranks.values())
    model, tp = found[0].model, found[0].tp
    tokens = model.seq_length * found[0].micro_batch_size
    for bits, rank in ranks.items():
        pair = 4 * pair_numel(tokens, model.hidden, rank)
        packed = packed_bytes(tokens * model.hidden, bits)
        assert pair == pytest.approx(packed, rel=close)
    wide, ffn = model.hidden // tp, model.ffn // tp
    layer = [(3 * wide, model.hidden), (model.hidden, wide), (ffn, model.hidden),
             (model.hidden, ffn)]  # fmt: skip
    factors = sum(4 * pair_numel(*shape, gradients) for shape in layer)
    packed = packed_bytes(sum(a * b for a, b in layer), 4)
    assert factors == pytest.approx(packed, rel=close)
    assert {p.grad_comp_rank for p in found if p.engine == "fe+sc"} == {gradients}
    if form == "tiny":
        assert 4 * pair_numel(tokens, model.hidden, 11) == packed_bytes(tokens * model.hidden, 8)
