"""Evaluations and checkpoints of our trainer: neither changes a bit of what is trained."""

import hashlib
import json
import math

import numpy as np
import prepared
import pytest
from programs import python
from trainer_runs import MODEL, train_together, write_run

from dataset import indexed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GPT2 = {**MODEL, "architecture": "gpt2"}
BOTH = {"save_interval": 2, "eval_interval": 2, "eval_iterations": 2}
HYBRID = {"engine": "stride", "stride": 2}
FP16 = {"dtype": "fp16", "zero_stage": 2, "offload_optimizer": "none"}
RUNS = {
    "plain": {},
    "stock": BOTH,
    "plugin": {**HYBRID, **BOTH, "checkpoint": "background"},
    "fp16": {**FP16, "save_interval": 2},
    "gpt2": {"model": GPT2, **HYBRID, "save_interval": 2},
    # From here on: what continues which run, from its checkpoint of iteration 2.
    "stock from stock": {},
    "plugin from plugin": {**HYBRID, **BOTH},
    "plugin from stock": HYBRID,
    "stock from plugin": {},
    "fp16 from fp16": FP16,
    "gpt2 from gpt2": {"model": GPT2, **HYBRID},
}
ITERATIONS = 5


def train_all(runs, corpus, folder, num_ranks=1):
    """Train runs by their names in one process a rank; a result each."""
    folders, words = {}, []
    same = {"iterations": ITERATIONS, "micro_batch_size": 4 // num_ranks}  # one for each iteration
    for name, fields in runs.items():
        folders[name] = folder / name.replace(" ", "-")
        word = str(write_run(folders[name], corpus, {**same, **fields}))
        _, _, first = name.partition(" from ")
        words.append(f"{word}={folders[first]}/checkpoints/iteration-000002" if first else word)
    results = train_together(list(folders.values()), words, num_ranks)
    return dict(zip(runs, results, strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def alone(corpus, folder):
    return train_all(RUNS, corpus, folder)


@pytest.mark.parametrize("name", ["stock", "plugin"])
def test_evaluations_and_checkpoints_change_no_bit(alone, name, folder):
    plain, found = alone["plain"], alone[name]
    assert len(plain["losses"]) == ITERATIONS
    assert None not in plain["digests"]
    for what in ("losses", "norms", "digests"):
        assert found[what] == plain[what]
    assert not plain["evaluations"]
    checkpoints = folder / name / "checkpoints"
    assert (checkpoints / "latest").read_text() == "iteration-000005"
    names = {path.name for path in checkpoints.iterdir() if path.is_dir()}
    assert names == {"iteration-000002", "iteration-000004", "iteration-000005"}


def test_an_evaluation_is_of_the_same_samples_and_says_what_it_saw(alone):
    events = alone["stock"]["evaluations"]
    assert [event["iteration"] for event in events] == [2, 4, 5]
    assert [event["tokens"] for event in events] == [2 * 4 * 32] * 3
    for event in events:
        assert event["loss"] == pytest.approx(math.log(512), abs=0.3)
        assert event["perplexity"] == pytest.approx(math.exp(event["loss"]))
    assert events[0]["loss"] != events[1]["loss"]
    assert alone["plugin"]["evaluations"] == events
    assert alone["plugin from plugin"]["evaluations"] == events[1:]


@pytest.mark.parametrize("name", [name for name in RUNS if " from " in name])
def test_a_run_that_goes_on_ends_as_if_it_had_never_stopped(alone, name):
    whole = alone[name.partition(" from ")[2]]
    found = alone[name]
    assert "error" not in found
    assert found["losses"] == whole["losses"][2:]
    assert found["norms"] == whole["norms"][2:]
    assert found["digests"] == whole["digests"]


def test_two_ranks_go_on_too(corpus, tmp_path):
    two = {"dp": 2}
    saves = {**two, **HYBRID, **BOTH, "checkpoint": "background"}
    runs = {"stock": {**two, **BOTH}, "plugin": saves}
    runs |= {"plugin from stock": {**two, **HYBRID}, "stock from plugin": two}
    found = train_all(runs, corpus, tmp_path, 2)
    whole = found["stock"]
    for name, result in found.items():
        first = 2 if " from " in name else 0
        assert result["losses"] == whole["losses"][first:], name
        assert result["digests"] == whole["digests"], name


def test_a_new_run_on_the_users_own_pair_continues_an_old_one_and_leaves_it_as_it_is(tmp_path):
    random, prefix = np.random.default_rng(0), tmp_path / "my own.v1"
    indexed.write(prefix, (random.integers(0, 99, 500) for _ in range(40)), 99, 100)
    command = ["-m", "launch.run", "tiny", "--model.layers", "1"]
    command += ["--iterations", "4", "--results-dir", str(tmp_path), "--monitor-interval", "0"]
    command += ["--device", "cpu", "--engine", "stride", "--stride", "2"]
    command += ["--checkpoint", "background", "--data-prefix", str(prefix)]
    assert python(*command, "--save-interval", "3", "--log-to", "csv").returncode == 0
    (old,) = tmp_path.glob("single/*/run-001")
    # DeepSpeed's own monitor, a file for each figure.
    logged = old / "loggers" / "csv"
    rows = (logged / "Train_Samples_train_loss.csv").read_text().splitlines()
    assert (rows[0], len(rows)) == ("step,train_loss", 5)
    names = {path.stem.removeprefix("Train_Samples_") for path in logged.glob("*.csv")}
    assert {"lr", "grad_norm", "elapsed_time_ms_step"} <= names
    run = json.loads((old / "run.json").read_text())
    data = run["provenance"]["data"]
    digest = hashlib.sha256((tmp_path / "my own.v1.bin").read_bytes()).hexdigest()
    assert (data["name"], data["tokens"], data[".bin"]["sha256"]) == ("my own.v1", 20_040, digest)
    assert (data["checked"], run["data_prefix"]) == ("sizes", str(prefix))
    before = {path: path.stat().st_mtime_ns for path in old.rglob("*") if path.is_file()}
    third = old / "checkpoints" / "iteration-000003"
    assert (old / "checkpoints" / "latest").read_text().strip() == "iteration-000004", "at the end"
    stalls = [json.loads(line) for line in (old / "metrics.jsonl").read_text().splitlines()]
    stalls = [event for event in stalls if event["event"] == "checkpoint"]
    assert [event["iteration"] for event in stalls] == [3, 4]
    assert all(event["stall_ms"] > 0 for event in stalls)
    refused = python(*command, "--continue-from", str(third), "--seed", "9")
    assert refused.returncode == 2
    assert "seed = 9: the checkpoint" in refused.stderr
    assert not old.with_name("run-002").exists()
    done = python(*command, "--continue-from", str(third), **prepared.variables(prepared.MEGATRON))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before
    ends = []
    for folder in (old, old.with_name("run-002")):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        ends.append([events[-1][key] for key in ("weights_sha256", "optimizer_sha256")])
    assert ends[0] == ends[1]
    assert [event["iteration"] for event in events if event["event"] == "iteration"] == [4]
    assert events[0]["continued_from"] == str(third)
