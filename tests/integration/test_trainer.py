"""The trainer as users start it: real processes, real data, stock DeepSpeed."""

import math
import re

import pytest
import torch
from trainer_runs import ITERATIONS, MODEL, events_of, launch, train_together, write_run

from configs.study import default_study

Point = default_study().point_type
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TOGETHER = {
    "plain": {},
    "again": {},
    "seed": {"seed": 7},
    "kept activations": {"activation_checkpointing": False},
    "lower": {"min_lr": 0.0},
    "sdpa": {"attention": "sdpa"},
    "large micro-batch": {"micro_batch_size": 4},
    "async": {"engine": "all-host"},
    "stride": {"engine": "stride", "stride": 2},
    "diverges": {"lr": 1e38, "min_lr": 0},
    "learns": {"iterations": 8, "lr": 3e-3},
    "no tokens": {"split": "0,1,0"},
}
"""Points that one process trains in turn: nothing is asked of them but losses and state."""
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def together(corpus, folder):
    folders = [folder / name.replace(" ", "-") for name in TOGETHER]
    pairs = zip(folders, TOGETHER.values(), strict=True)
    words = [str(write_run(each, corpus, fields)) for each, fields in pairs]
    return dict(zip(TOGETHER, train_together(folders, words), strict=True))


@pytest.fixture(scope="module")
def launched(corpus, folder):
    """Log and events of a run of the trainer's own program; each is run once."""
    found = {}

    def run(**fields):
        key = repr(fields)
        if key not in found:
            here = folder / f"launched-{len(found)}"
            done = launch(write_run(here, corpus, fields))
            assert done.returncode == 0, done.stdout[-3000:]
            found[key] = done.stdout, events_of(here)
        return found[key]

    return run


def test_it_learns(together):
    first, *_, last = together["learns"]["losses"]
    assert first == pytest.approx(math.log(512), abs=0.3)
    assert last < first - 0.3


@pytest.mark.parametrize("device", DEVICES)
def test_it_says_what_it_did(launched, device):
    _, (start, *rows, end) = launched(**({} if device == "cpu" else {"device": device}))
    assert [row["event"] for row in rows] == ["iteration"] * ITERATIONS
    assert start["parameters"] == Point(model=MODEL).model.num_parameters()
    assert (start["engine"], start["num_ranks"], start["seed"]) == ("stock", 1, 1234)
    assert (start["vocab_size"], start["padded_vocab_size"]) == (500, 512)
    assert set(start["versions"]) >= {"python", "torch", "deepspeed", "megatron-core"}
    for row in rows:
        phases = [row["forward_ms"], row["backward_ms"], row["update_ms"]]
        assert min(phases) > 0
        assert sum(phases) <= row["iteration_ms"]
        assert row["grad_norm"] > 0
        assert row["skipped"] is False
        assert (row["device_memory_bytes"] is None) == (device == "cpu")
    assert [row["tokens"] for row in rows] == [128 * k for k in range(1, ITERATIONS + 1)]
    assert end["iterations"] == ITERATIONS
    assert end["weights_sha256"] not in (None, end["optimizer_sha256"])


def test_the_record_says_which_policy_the_plugin_chose(together, folder):
    (row,) = [row for row in events_of(folder / "stride") if row["event"] == "policy"]
    assert row == {"event": "policy", "iteration": 1, "update": 1, "policy": "stride 2", "why": ""}
    assert not [row for row in events_of(folder / "plain") if row["event"] == "policy"]


def test_two_runs_with_one_seed_end_in_the_same_bits_and_another_seed_in_others(together):
    plain, other = together["plain"], together["seed"]
    for name in ("again", "kept activations", "async", "stride"):
        assert together[name]["losses"] == plain["losses"], name
        assert together[name]["digests"] == plain["digests"], name
    assert None not in plain["digests"]
    assert other["losses"][0] != plain["losses"][0]
    assert not set(plain["digests"]) & set(other["digests"])


def test_the_learning_rate_follows_the_cosine_and_reaches_the_optimizer(launched, together):
    log, (_, *rows, _) = launched()
    expected = [3e-4, 2.325e-4, 9.75e-5, 3e-5]
    assert [row["learning_rate"] for row in rows] == pytest.approx(expected)
    printed = re.findall(r"\| learning rate: (\S+) \|", log)
    assert printed == ["3.000E-04", "2.325E-04", "9.750E-05", "3.000E-05"]
    # The first update has the peak in both; the second is the first to differ.
    lower, plain = together["lower"]["losses"], together["plain"]["losses"]
    assert lower[:2] == plain[:2]
    assert lower[2] != plain[2]


def test_tensor_parallel_ranks_train_nearly_as_one_does(launched, together):
    rows = launched(tp=2)[1][1:-1]
    assert [row["loss"] for row in rows] == pytest.approx(together["plain"]["losses"], abs=4e-3)
    assert [row["grad_norm"] for row in rows] == pytest.approx(together["plain"]["norms"], rel=0.05)


@pytest.mark.parametrize(("name", "tolerance"), [("sdpa", 4e-3), ("large micro-batch", 2e-3)])
def test_another_attention_or_split_of_the_batch_is_the_same_training(together, name, tolerance):
    assert together[name]["losses"] == pytest.approx(together["plain"]["losses"], abs=tolerance)


@pytest.mark.parametrize("fields", [{}, {"tp": 2}], ids=["one", "tp2"])
def test_the_authors_parser_reads_the_log(launched, fields):
    log, (_, *rows, _) = launched(**fields)
    lines = log.splitlines()
    num_ranks, tp = max(fields.values(), default=1), fields.get("tp", 1)
    intervals = [line for line in lines if "<TIMER:interval-time" in line]
    assert len(intervals) == ITERATIONS * num_ranks
    assert all(re.fullmatch(r"<TIMER:interval-time,([\d\.]+)>", line) for line in intervals)
    for name in ("model-and-optimizer-setup", "train/valid/test-data-iterators-setup"):
        assert sum(line.startswith(f"<TIMER:{name},") for line in lines) == num_ranks
    iterations = [line for line in lines if line.startswith(" elapsed_time ")]
    assert len(iterations) == ITERATIONS
    assert all(re.search(r"\| lm loss: \d\.\d{6}E[+-]\d\d \|", line) for line in iterations)
    if num_ranks == 1:  # The line is the last rank's and the metrics are rank 0's: two clocks.
        seconds = [float(re.search(r"elapsed_time (\S+)", line)[1]) for line in iterations]
        assert seconds == pytest.approx([row["iteration_ms"] / 1000 for row in rows], abs=1e-6)
    pattern = r"number of parameters on \(tensor, pipeline\) model parallel rank \((\d), 0\): (\d+)"
    counted = {int(rank): int(count) for rank, count in re.findall(pattern, log)}
    assert sorted(counted) == list(range(tp))
    norms = (2 * MODEL["layers"] + 1) * MODEL["hidden"]
    assert sum(counted.values()) == Point(model=MODEL).model.num_parameters(tp) + norms * (tp - 1)


def test_deepspeeds_own_lines_are_there(launched):
    log, _ = launched()
    shape = r"fwd: \S+ \| bwd: \S+ \| bwd_inner: \S+ \| bwd_allreduce: \S+ \| step: \S+$"
    assert len(re.findall(rf"(?m)\[Rank 0\] time \(ms\) \| {shape}", log)) == ITERATIONS
    assert len(re.findall(r"(?m)^Engine after step$", log)) == 2 * ITERATIONS
    assert len(re.findall(r"(?m)^CPU Virtual Memory:  used = \S+ GB, percent = ", log)) > 0
    assert "Warning" not in log
    assert "Traceback" not in log


def test_a_loss_that_is_not_a_number_is_reported_and_the_run_goes_on(together, folder):
    first, *others = together["diverges"]["losses"]
    assert first is not None
    assert others == [None] * (ITERATIONS - 1)
    for row in events_of(folder / "diverges")[1:]:
        assert (row["loss_text"], row["grad_norm"], row["skipped"]) == ("nan", None, True)


def test_nothing_is_written_beside_the_data(together, corpus, folder):
    assert "digests" in together["plain"]
    assert sorted(path.name for path in corpus.parent.iterdir()) == ["corpus.bin", "corpus.idx"]
    assert any((folder / "plain" / "index-cache").iterdir())


def test_data_without_a_token_are_an_error(together):
    said = "split = '0,1,0': leaves 0 tokens of 60 documents"
    assert said in together["no tokens"]["error"]


def test_an_error_of_the_users_ends_the_run_with_one_line(corpus, tmp_path):
    wrong = {"deep_optimizer_states": {"enabled": True, "policy": "none"}}
    result = launch(write_run(tmp_path, corpus, {}, **wrong))
    assert result.returncode == 2
    (error,) = [line for line in result.stdout.splitlines() if "pretrain_gpt: error:" in line]
    assert "deep_optimizer_states: " in error
    assert "Traceback" not in result.stdout
    assert not (tmp_path / "metrics.jsonl").exists()
