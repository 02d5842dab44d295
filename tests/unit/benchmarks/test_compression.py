"""The benchmark of compression: what it compresses, what it counts, and its tables and figures."""

import csv
import dataclasses

import pytest
import torch
from torch import distributed as dist

from benchmarks import compression
from benchmarks.compression import GRADIENTS, MESSAGES
from benchmarks.compression_calls import SIGNAL_RANK, made_up, most_allocated_bytes
from configs.study import load_study
from optimus_cc.memory import state_bytes

STUDY = load_study(compression.STUDY)
CPU = torch.device("cpu")


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_values_are_of_low_rank_with_noise():
    made = made_up(torch.Size((40, 5, 100)), torch.float32, CPU, seed=1)
    assert made.var().item() == pytest.approx(1.01, rel=0.2)
    sizes = torch.linalg.svdvals(made.view(200, 100))
    assert sizes[SIGNAL_RANK - 1] > 10 * sizes[SIGNAL_RANK] > 0
    assert torch.equal(made, made_up(torch.Size((40, 5, 100)), torch.float32, CPU, seed=1))
    assert not torch.equal(made, made_up(torch.Size((40, 5, 100)), torch.float32, CPU, seed=2))


def test_most_allocated_is_what_a_call_holds_at_one_time():
    given = torch.zeros(1000, 1000)

    def call():
        first = given + 1
        second = first + 1
        del first
        return second + 1

    assert most_allocated_bytes(call, CPU) == pytest.approx(2 * 4_000_000, rel=1e-3)


@pytest.mark.parametrize("part", [MESSAGES, GRADIENTS])
def test_every_way_to_compress_is_there_once(part):
    def way(engine):
        settings = compression.settings_of(STUDY.make_point({"model": "tiny", "engine": engine}))
        values = dataclasses.asdict(settings)
        own = {name: value for name, value in values.items() if name.startswith(part.setting)}
        return own | {"feedback": settings.use_error_feedback}

    found = [way(engine) for engine in compression.methods(STUDY, part, "tiny")]
    compressing = [way(engine) for engine in STUDY.engines if way(engine)[part.setting]]
    assert all(own in found for own in compressing)
    assert all(found.count(own) == 1 for own in found)
    assert len(found) < len(compressing) or part is GRADIENTS


def test_a_message_is_the_models_or_says_how_many_rows_it_was_cut_to():
    found = list(compression.points(STUDY, MESSAGES, "tiny", (2, 4)))
    every = map(compression.settings_of, found)
    low_rank = [s for s in every if s.inter_grad_comp_method == "low-rank"]
    assert {settings.inter_grad_comp_rank for settings in low_rank} == {2, 4}
    assert len(low_rank) < len(found)  # numbers of few bits have no rank
    ((whole,),), ((cut,),) = (compression.message_cases(found[:1], CPU, n) for n in (None, 48))
    assert (whole.what, whole.whole_bytes) == ("tiny, 128 x 64", 4 * 128 * 64)
    assert (cut.what, cut.whole_bytes) == ("tiny, 48 (of 128) x 64", 4 * 48 * 64)
    assert cut.calls.sent_bytes == 4 * 2 * (48 + 64)
    shape = torch.Size((24, 2, 64))
    assert cut.calls.state_bytes == state_bytes(cut.settings, 1, [shape], [])


def test_gradients_are_compressed_at_once_and_one_by_one(alone, monkeypatch):
    found = list(compression.points(STUDY, GRADIENTS, "tiny", (2,)))
    ((case,),) = compression.gradient_cases(found[:1], CPU, 128)
    assert case.what == "tiny, 2 x 64 (of 2 x 256) x 64"
    sizes = []
    stack = torch.stack
    monkeypatch.setattr(
        torch, "stack", lambda members: sizes.append(len(members)) or stack(members)
    )
    case.calls.at_once()
    case.calls.one_by_one()
    assert sizes == [2, 1, 1]
    assert case.calls.state_bytes == state_bytes(case.settings, 0, [], [torch.Size((64, 64))] * 2)


def test_tables_and_figures_are_written(tmp_path, capsys):
    out = tmp_path / "out"
    command = [str(out), "--models", "tiny", "--ranks", "2", "4", "--rows", "16"]
    command += ["--repeats", "2", "--device", "cpu"]
    assert compression.main(command) == 0
    printed = capsys.readouterr().out
    for part in (MESSAGES, GRADIENTS):
        assert (out / f"{part.figure}.png").stat().st_size > 0
        with (out / part.folder / "runs.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [float(row[part.rank]) for row in rows[:2]] == [2, 4]
        for row in rows:
            for way in part.ways:
                rate = float(row["whole_bytes"]) / float(row[f"{way}_ms"]) / 1e6
                assert float(row[f"{way}_gb_per_s"]) == pytest.approx(rate)
            assert row["case"] in printed
    assert compression.main(command) == 2
    message = f"benchmarks.compression: {out}: already there; give a new folder\n"
    assert capsys.readouterr().err == message


def test_a_model_that_is_not_known_is_named(tmp_path, capsys):
    assert compression.main([str(tmp_path / "out"), "--models", "gpt2-2B"]) == 2
    assert "gpt2-2B" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
