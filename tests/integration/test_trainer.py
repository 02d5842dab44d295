"""The trainer as users start it: real processes, real data, stock DeepSpeed."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import ITERATIONS, MODEL, launch, train_together, write_corpus, write_run

from configs.schema import Point

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]


@dataclass(frozen=True)
class Finished:
    """What a run left behind."""

    run_dir: Path
    log: str
    start: dict[str, Any]
    iterations: list[dict[str, Any]]
    end: dict[str, Any]

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.iterations]

    @property
    def digests(self) -> tuple[str, str]:
        return self.end["weights_sha256"], self.end["optimizer_sha256"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("data") / "corpus"
    write_corpus(prefix)
    return prefix


Train = Callable[..., Finished]
TOGETHER: list[dict[str, Any]] = [
    {"seed": 7},
    {"activation_checkpointing": False},
    {"min_lr": 0.0},
    {"attention": "sdpa"},
    {"micro_batch_size": 4},
]
"""Points that one process trains in turn: nothing is asked of them but losses and state."""


@pytest.fixture(scope="module")
def train(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Run a point once; the same point again is another run only when asked for."""
    finished: dict[str, Finished] = {}

    def run(again: bool = False, **fields: Any) -> Finished:
        key = json.dumps([again, fields], sort_keys=True)
        if key not in finished and fields in TOGETHER:
            run_dirs = [tmp_path_factory.mktemp("run") for _ in TOGETHER]
            runs = zip(TOGETHER, _train_together(run_dirs, corpus), strict=True)
            finished.update({json.dumps([again, each], sort_keys=True): run for each, run in runs})
        if key not in finished:
            run_dir = tmp_path_factory.mktemp("run")
            finished[key] = _train(run_dir, corpus, fields)
        return finished[key]

    return run


def _train_together(run_dirs: list[Path], corpus: Path) -> list[Finished]:
    pairs = zip(run_dirs, TOGETHER, strict=True)
    files = [str(write_run(run_dir, corpus, fields)) for run_dir, fields in pairs]
    results = train_together(run_dirs, files)
    names = ("weights_sha256", "optimizer_sha256")
    return [
        Finished(run_dir, "", {}, _rows(run_dir), dict(zip(names, result["digests"], strict=True)))
        for run_dir, result in zip(run_dirs, results, strict=True)
    ]


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _train(run_dir: Path, corpus: Path, fields: dict[str, Any]) -> Finished:
    result = launch(write_run(run_dir, corpus, fields), anew=not fields)
    assert result.returncode == 0, result.stdout[-3000:]
    rows = _rows(run_dir)
    assert [row["event"] for row in rows] == ["start", *["iteration"] * (len(rows) - 2), "end"]
    return Finished(run_dir, result.stdout, rows[0], rows[1:-1], rows[-1])


@pytest.mark.parametrize("device", DEVICES)
def test_it_learns_and_says_what_it_did(train: Train, device: str) -> None:
    run = train(device=device, iterations=8, lr=3e-3)
    assert run.losses[0] == pytest.approx(math.log(512), abs=0.3)
    assert run.losses[-1] < run.losses[0] - 0.3
    assert run.start["parameters"] == Point(model=MODEL).model.num_parameters()
    assert (run.start["engine"], run.start["num_ranks"], run.start["seed"]) == ("vanilla", 1, 1234)
    assert (run.start["vocab_size"], run.start["padded_vocab_size"]) == (500, 512)
    assert set(run.start["versions"]) >= {"python", "torch", "deepspeed", "megatron-core"}
    for row in run.iterations:
        phases = row["forward_ms"] + row["backward_ms"] + row["update_ms"]
        assert 0 < phases <= row["iteration_ms"]
        assert min(row["forward_ms"], row["backward_ms"], row["update_ms"]) > 0
        assert row["grad_norm"] > 0
        assert row["skipped"] is False
        assert (row["device_memory_bytes"] is None) == (device == "cpu")
    assert [row["tokens"] for row in run.iterations] == [128 * k for k in range(1, 9)]
    assert run.end["iterations"] == 8


@pytest.mark.parametrize("device", DEVICES)
def test_two_runs_with_one_seed_end_in_the_same_bits(train: Train, device: str) -> None:
    one, two = train(device=device), train(again=True, device=device)
    assert one.losses == two.losses
    assert one.digests == two.digests
    assert None not in one.digests
    assert one.digests[0] != one.digests[1]


def test_another_seed_is_another_run(train: Train) -> None:
    assert train().losses[0] != train(seed=7).losses[0]
    assert not set(train().digests) & set(train(seed=7).digests)


def test_recomputed_activations_change_nothing(train: Train) -> None:
    kept = train(activation_checkpointing=False)
    assert kept.losses == train().losses
    assert kept.digests == train().digests


def test_the_learning_rate_follows_the_cosine(train: Train) -> None:
    rates = [row["learning_rate"] for row in train().iterations]
    assert rates == pytest.approx([3e-4, 2.325e-4, 9.75e-5, 3e-5])
    printed = re.findall(r"\| learning rate: (\S+) \|", train().log)
    assert printed == ["3.000E-04", "2.325E-04", "9.750E-05", "3.000E-05"]


def test_the_schedule_reaches_the_optimizer(train: Train) -> None:
    lower = train(min_lr=0.0)
    # The first update has the peak in both; the second is the first to differ.
    assert lower.losses[:2] == train().losses[:2]
    assert lower.losses[2] != train().losses[2]


@pytest.mark.parametrize(
    "fields", [{"engine": "async-gradients"}, {"engine": "hybrid", "stride": 2}], ids=["a", "h"]
)
def test_every_engine_ends_in_the_same_bits(train: Train, fields: dict[str, Any]) -> None:
    run = train(**fields)
    assert run.start["engine"] == fields["engine"]
    assert run.losses == train().losses
    assert run.digests == train().digests


@pytest.mark.parametrize(
    ("fields", "tolerance"),
    [({"dp": 2}, 2e-3), ({"tp": 2}, 4e-3), ({"attention": "sdpa"}, 4e-3)],
    ids=["dp2", "tp2", "sdpa"],
)
def test_the_same_global_batches_give_nearly_the_same_losses(
    train: Train, fields: dict[str, Any], tolerance: float
) -> None:
    run = train(**fields)
    assert run.losses == pytest.approx(train().losses, abs=tolerance)
    norms = [row["grad_norm"] for row in run.iterations]
    expected = [row["grad_norm"] for row in train().iterations]
    assert norms == pytest.approx(expected, rel=0.05)


def test_one_rank_with_accumulation_equals_one_large_micro_batch(train: Train) -> None:
    whole = train(micro_batch_size=4)
    assert whole.losses == pytest.approx(train().losses, abs=2e-3)


@pytest.mark.parametrize("fields", [{}, {"dp": 2}, {"tp": 2}], ids=["one", "dp2", "tp2"])
def test_the_authors_parser_reads_the_log(train: Train, fields: dict[str, Any]) -> None:
    lines = train(**fields).log.splitlines()
    num_ranks = max(fields.values(), default=1)
    intervals = [line for line in lines if "<TIMER:interval-time" in line]
    assert len(intervals) == ITERATIONS * num_ranks
    pattern = re.compile(r"<TIMER:interval-time,([\d\.]+)>")
    assert all(pattern.fullmatch(line) for line in intervals)
    for name in ("model-and-optimizer-setup", "train/valid/test-data-iterators-setup"):
        assert sum(line.startswith(f"<TIMER:{name},") for line in lines) == num_ranks
    iterations = [line for line in lines if line.startswith(" elapsed_time ")]
    assert len(iterations) == ITERATIONS
    assert all(re.search(r"\| lm loss: \d\.\d{6}E[+-]\d\d \|", line) for line in iterations)
    seconds = [float(re.search(r"elapsed_time (\S+)", line)[1]) for line in iterations]
    measured = [row["iteration_ms"] / 1000 for row in train(**fields).iterations]
    assert all(second > 0 for second in seconds)
    if num_ranks == 1:  # The line is the last rank's and the metrics are rank 0's: two clocks.
        assert seconds == pytest.approx(measured, abs=1e-6)


def test_deepspeeds_own_lines_are_there(train: Train) -> None:
    log = train().log
    shape = r"fwd: \S+ \| bwd: \S+ \| bwd_inner: \S+ \| bwd_allreduce: \S+ \| step: \S+$"
    assert len(re.findall(rf"(?m)\[Rank 0\] time \(ms\) \| {shape}", log)) == ITERATIONS
    assert len(re.findall(r"(?m)^Engine after step$", log)) == 2 * ITERATIONS
    assert len(re.findall(r"(?m)^CPU Virtual Memory:  used = \S+ GB, percent = ", log)) > 0
    assert "Warning" not in log
    assert "Traceback" not in log


@pytest.mark.parametrize(("tp", "parts"), [(1, 1), (2, 2)])
def test_parameters_are_counted_by_tensor_parallel_rank(train: Train, tp: int, parts: int) -> None:
    log = train(**({"tp": tp} if tp > 1 else {})).log
    pattern = r"number of parameters on \(tensor, pipeline\) model parallel rank \((\d), 0\): (\d+)"
    counted = {int(rank): int(count) for rank, count in re.findall(pattern, log)}
    assert sorted(counted) == list(range(parts))
    norms = (2 * MODEL["layers"] + 1) * MODEL["hidden"]
    total = Point(model=MODEL).model.num_parameters(tp)
    assert sum(counted.values()) == total + norms * (tp - 1)


def test_a_loss_that_is_not_a_number_is_reported_and_the_run_goes_on(train: Train) -> None:
    run = train(lr=1e38, min_lr=0)
    assert run.losses[0] is not None
    for row in run.iterations[1:]:
        assert (row["loss"], row["loss_text"], row["grad_norm"]) == (None, "nan", None)
        assert row["skipped"] is True
    assert run.log.count("| lm loss: nan | ") == ITERATIONS - 1
    assert run.end["iterations"] == ITERATIONS


def test_nothing_is_written_beside_the_data(train: Train, corpus: Path) -> None:
    run = train()
    assert sorted(path.name for path in corpus.parent.iterdir()) == ["corpus.bin", "corpus.idx"]
    assert any((run.run_dir / "index-cache").iterdir())


@pytest.mark.parametrize(
    ("fields", "ds_changes", "named"),
    [
        ({"split": "0,1,0"}, {}, "split = '0,1,0': leaves 0 tokens of 60 documents"),
        (
            {},
            {"deep_optimizer_states": {"enabled": True, "policy": "none"}},
            "deep_optimizer_states: ",
        ),
    ],
    ids=["split", "plugin"],
)
def test_an_error_of_the_users_ends_the_run_with_one_line(
    corpus: Path,
    tmp_path: Path,
    fields: dict[str, Any],
    ds_changes: dict[str, Any],
    named: str,
) -> None:
    result = launch(write_run(tmp_path, corpus, fields, **ds_changes))
    assert result.returncode == 2
    errors = [line for line in result.stdout.splitlines() if "pretrain_gpt: error:" in line]
    assert len(errors) == 1
    assert named in errors[0]
    assert "Traceback" not in result.stdout
    assert not (tmp_path / "metrics.jsonl").exists()
