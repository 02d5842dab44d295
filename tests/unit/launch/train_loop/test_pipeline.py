"""The pipeline's optimizer on one rank, and what ranks bring together of an iteration."""

import math
from types import SimpleNamespace

import pytest
import torch

from configs.study import load_study
from launch.train_loop import pipeline_adapter
from launch.train_loop.loop import learning_rate
from launch.train_loop.pipeline_adapter import COMMUNICATION, Optimizer, PipelineAdapter
from optimus_cc import Kind
from optimus_cc.error_statistics import STATISTICS

MODEL = {
    **{"name": "test", "hidden": 8, "ffn": 8, "layers": 2, "heads": 2, "kv_heads": 2},
    **{"seq_length": 4, "vocab_size": 8, "architecture": "gpt2"},
}


def point(**fields):
    study = load_study("optimus-cc")
    common = {
        "model": MODEL,
        "engine": "uncompressed",
        "iterations": 10,
        "lr": 0.1,
        "clip_grad": 0.0,
    }
    return study.point_type(**{**common, **fields})


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No other rank holds a part of the model."""
    monkeypatch.setattr(pipeline_adapter.dist, "all_reduce", lambda *_args, **_options: None)


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((3, 4), (4,))]


def give_gradients(given, scale=1.0):
    torch.manual_seed(1)
    for parameter in given:
        parameter.grad = (scale * torch.randn(parameter.shape)).to(parameter.dtype)


def norm_of(given):
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in given))


def optimizer(given, is_first_shard=True, **fields):
    named = {f"weight-{index}": parameter for index, parameter in enumerate(given)}
    return Optimizer(named, point(**fields), None, is_first_shard=is_first_shard)


def test_it_is_torchs_adamw_at_the_schedules_rate():
    ours, theirs = parameters(), parameters()
    mine = optimizer(ours)
    adam = torch.optim.AdamW(theirs, betas=(0.9, 0.95), weight_decay=0.1)
    for iteration in (1, 2, 3):
        for given in (ours, theirs):
            give_gradients(given, iteration)
        assert mine.step(iteration) == pytest.approx(norm_of(theirs))
        adam.param_groups[0]["lr"] = learning_rate(point(), iteration)
        adam.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("limit", "clipped"), [(0.5, True), (1e3, False)])
def test_gradients_are_clipped_to_the_norm_that_is_told(limit, clipped, monkeypatch):
    given = parameters()
    mine = optimizer(given, clip_grad=limit)
    seen = []
    monkeypatch.setattr(mine._adam, "step", lambda: seen.append(norm_of(given)))
    give_gradients(given)
    told = norm_of(given)
    assert mine.step(1) == pytest.approx(told)
    assert seen == [pytest.approx(limit if clipped else told, rel=1e-4)]


def test_a_copy_of_the_embedding_and_what_every_shard_holds_count_once():
    given = parameters()
    given[0].shared = True
    give_gradients(given)
    assert optimizer(given).step(1) == pytest.approx(float(given_norm(1)))
    given = parameters()
    given[0].tensor_model_parallel = True
    give_gradients(given)
    assert optimizer(given, is_first_shard=False).step(1) == pytest.approx(float(given_norm(0)))


def given_norm(index):
    given = parameters()
    give_gradients(given)
    return given[index].grad.norm()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_updates_nothing(bad):
    given, before = parameters(), parameters()
    mine = optimizer(given)
    give_gradients(given)
    given[0].grad[0, 0] = bad
    assert not math.isfinite(mine.step(1))
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def test_a_bf16_model_is_updated_in_fp32():
    """Updates below half a step of bf16 add up in the master weights."""
    given = [torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]
    mine = optimizer(given, lr=1e-3, min_lr=1e-3, weight_decay=0.0, dtype="bf16")
    values = []
    for _ in range(8):
        given[0].grad = torch.ones_like(given[0])
        mine.step(1)
        values.append(float(given[0].detach()[0]))
    assert values[0] == 1.0
    assert values[-1] == pytest.approx(1 - 8e-3, abs=4e-3) != 1.0
    assert mine.state[0].dtype == torch.float32


def test_times_are_means_over_ranks_and_bytes_are_sums(monkeypatch):
    """Four ranks that measured the same."""
    monkeypatch.setattr(pipeline_adapter.dist, "all_reduce", lambda total: total.mul_(4))
    traffic = SimpleNamespace(
        seconds=lambda: dict.fromkeys(COMMUNICATION.values(), 0.001),
        sent={kind: SimpleNamespace(sent_bytes=10 + i) for i, kind in enumerate(Kind)},
    )
    clock = SimpleNamespace(take=lambda: {"schedule_ms": 20.0, "update_ms": 5.0})
    measured = SimpleNamespace(
        _clock=clock, traffic=traffic, device="cpu", point=SimpleNamespace(num_ranks=4)
    )
    sent_bytes, times = PipelineAdapter._over_ranks(measured, 0.03)
    assert sent_bytes == {f"{kind}_bytes": 4 * (10 + i) for i, kind in enumerate(Kind)}
    assert times == pytest.approx([30.0, 15.0, *[1.0] * len(COMMUNICATION), 5.0])


@pytest.mark.parametrize(
    ("fields", "counts", "missing", "reason"),
    [
        (
            {"pp": 2},
            [0, 0, 0, 5],
            3,
            "stages a link's epilogue has 1 at most; give inter_grad_comp",
        ),
        ({"pp": 2, "global_batch_size": 1}, [0, 0, 0, 5], 3, "accumulate two or more"),
        ({"pp": 2}, [0, 0, 0, 0], 4, "every message was sent whole"),
        ({"pp": 2}, [5, 5, 5, 5], 0, ""),
    ],
)
def test_statistics_that_are_missing_have_a_reason(fields, counts, missing, reason):
    adapter = PipelineAdapter.__new__(PipelineAdapter)
    adapter.point = point(**{"engine": "cb", "global_batch_size": 4, **fields})
    adapter.device, adapter._epilogue_only = torch.device("cpu"), True
    nothing = SimpleNamespace(state_dict=dict, statistics="asked for")
    adapter.communicator, adapter.reduction = SimpleNamespace(compressor=nothing), nothing
    adapter._sent_bytes, adapter._validation_loss = {}, None
    adapter._errors = torch.tensor([[[1.0] * 4], [counts]], dtype=torch.float64)
    found = adapter.results()
    assert [found[name] is None for name in STATISTICS].count(True) == missing
    assert set(found["reasons"]) == {name for name in STATISTICS if found[name] is None}
    assert all(reason in text for text in found["reasons"].values())
