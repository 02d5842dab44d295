"""The study of film reviews from the command line to its report, with a few iterations a run."""

import csv
import json

import prepared
import pytest
from programs import python, rows_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SWEEP = """
name = "few"
description = "an epoch of a few strategies"
model = "tiny"
figures = ["strategies"]
point = { device = "cpu", dropout = 0.1, iterations = 40 }
engines = [
  { engine = ["no-deepspeed", "deepspeed-stage-3-offload-optimizer", "deep-optimizer-states"] },
]
"""
ON_TWO = """\
  { engine = ["deepspeed-stage-3-offload-optimizer", "deep-optimizer-states"], dp = 2, \
global_batch_size = 64, iterations = 20 },
]
"""
OURS, TWIN = "deep-optimizer-states", "deepspeed-stage-3-offload-optimizer"


@pytest.fixture(scope="module", params=[1, 2])
def ran(request, tmp_path_factory):
    """The sweep, run and told, with two ranks as well; what was said, and its folder."""
    folder = tmp_path_factory.mktemp("imdb")
    sweep = SWEEP if request.param == 1 else SWEEP.replace("\n]\n", f"\n{ON_TWO}")
    (folder / "few.toml").write_text(sweep)
    words = ("--sweep", folder / "few.toml", "--results-dir", folder / "results")
    done = python("-m", "launch.sweep", "--study", "imdb", *words)
    sweep = folder / "results" / "imdb" / "few"
    assert (sweep / "tables" / "runs.csv").is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    return done, sweep


def metrics_of(sweep, row):
    return events_of((sweep / row["path"]).with_name("metrics.jsonl"))


def events_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_our_strategy_trains_and_leaves_its_record(tmp_path):
    """Three iterations from the command line; what a whole epoch adds is below."""
    words = ("--engine", OURS, "--iterations", "3", "--device", "cpu", "--results-dir", tmp_path)
    words += ("--log-to", "csv")
    forked = prepared.variables(prepared.DEEPSPEED)
    done = python("-m", "launch.run", "tiny", "--study", "imdb", *words, **forked)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (path,) = tmp_path.rglob("metrics.jsonl")
    start, *rows, end = events_of(path)
    assert "synthetic" in start["reviews"]
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    assert len({row["grad_norm"] for row in rows}) == 3
    assert None not in (end["weights_sha256"], end["optimizer_sha256"])
    assert 0.3 < end["test_accuracy"] < 1
    assert end["test_error"] == pytest.approx(1 - end["test_accuracy"])
    # Lightning's own logger and its monitor of rates write beside.
    with (path.parent / "loggers" / "csv" / "metrics.csv").open() as file:
        entries = list(csv.DictReader(file))
    (rate,) = (name for name in entries[0] if name.startswith("lr-"))
    assert len([entry for entry in entries if entry[rate]]) == 3
    (accuracy,) = (entry["test_accuracy"] for entry in entries if entry["test_accuracy"])
    assert float(accuracy) == pytest.approx(end["test_accuracy"], rel=1e-5)


@pytest.mark.exhaustive
def test_every_strategy_runs_on_each_number_of_devices(ran, request):
    done, sweep = ran
    index = json.loads((sweep / "sweep.json").read_text())
    num_runs = 3 + 2 * (request.node.callspec.params["ran"] == 2)
    assert [run["status"] for run in index["runs"]] == ["ok"] * num_runs, done.stdout[-3000:]


@pytest.mark.exhaustive
def test_ours_equals_what_it_is_built_on_in_every_bit(ran):
    done, sweep = ran
    said = [line for line in done.stdout.splitlines() if f"equal to {TWIN} (" in line]
    ends = {(r["engine"], r["dp"]): metrics_of(sweep, r)[-1] for r in rows_of(sweep, "runs")}
    numbers = [ranks for engine, ranks in ends if engine == OURS]
    assert len(said) == len(numbers), done.stdout[-3000:]
    for line, losses in zip(said, ("40 losses, 40", "20 losses, 20"), strict=False):
        assert f"{losses} gradient norms, weights and optimizer state" in line
    for ranks in numbers:
        for key in ("weights_sha256", "optimizer_sha256", "test_loss"):
            assert ends[OURS, ranks][key] == ends[TWIN, ranks][key]
    # Else the digests would be of something that training does not change.
    digests = {ends[key]["weights_sha256"] for key in ends if key[0] in ("no-deepspeed", OURS)}
    assert len(digests) == 1 + len(numbers)


@pytest.mark.exhaustive
def test_the_table_has_time_memory_and_accuracy(ran):
    _, sweep = ran
    for row in rows_of(sweep, "runs"):
        for name in ("epoch_s", "batch_s", "rank_peak_gib", "test_loss", "validation_loss"):
            assert float(row[name]) > 0, name
        for name in ("train_accuracy", "validation_accuracy", "test_accuracy"):
            assert 0.3 < float(row[name]) < 1
        assert float(row["test_error"]) == pytest.approx(1 - float(row["test_accuracy"]))
        assert row["device_peak_gib"] == ""
        assert float(row["forward_ms"]) > 0
        assert float(row["update_ms"]) > 0


@pytest.mark.exhaustive
def test_metrics_tell_the_data_and_that_an_epoch_was_evaluated(ran):
    _, sweep = ran
    for row in rows_of(sweep, "runs"):
        start, *_, evaluation, end = metrics_of(sweep, row)
        assert "synthetic" in start["reviews"]
        assert start["pad_id"] == 1
        assert evaluation["event"] == "evaluation"
        assert evaluation["iteration"] == end["iterations"] == int(row["iterations"])
        norms = [line["grad_norm"] for line in metrics_of(sweep, row) if "grad_norm" in line]
        assert len(set(norms)) > 10


@pytest.mark.exhaustive
def test_without_deepspeed_and_with_zero_3_the_first_loss_is_the_same(ran):
    """The same weights, reviews and dropout: else strategies would not be compared."""
    _, sweep = ran
    first = {
        row["engine"]: float(row["loss_first"])
        for row in rows_of(sweep, "runs")
        if row["dp"] == "1"
    }
    assert first["no-deepspeed"] == pytest.approx(first[TWIN], abs=1e-5)
