"""A study in a folder that the code has never heard of, run from the command line to its report.

In ``make test`` a stand-in for the trainer writes what a trainer would.
"""

import json

import pytest
from fake_runs import FAKES
from processes import python_path
from programs import python, rows_of

STUDY = """
title = "Buckets of gradients"
source = "a test"
reference = "plain"
small_model = "small"
default_sweep = "buckets"

[gate]
kind = "close"
quantity = "loss"
tolerance = 1e-3

[phases]
forward = { title = "forward", colour = "#56B4E9" }
backward = { title = "backward", colour = "#E69F00" }
update = { title = "update", colour = "#009E73" }

[fields.bucket_numel]
default = 600_000
minimum = 1
title = "bucket"
axis = "bucket (elements)"
is_count = true
description = "Elements after which gradients are reduced."
in_pairs = "prefer"

[ds_config.zero_optimization]
reduce_bucket_size = "{bucket_numel}"

[engines.plain]
title = "one after the other"
description = "Gradients are reduced when backward is over."
ds_config = { zero_optimization = { overlap_comm = false } }

[engines.overlapped]
title = "beside backward"
description = "Gradients are reduced while backward goes on."
ds_config = { zero_optimization = { overlap_comm = true } }

[engines.elsewhere]
title = "on another machine"
needs = ["gpu", "no-such-package>=2"]

[figures.bucket]
kind = "swept"
title = "Iteration time against the bucket"
x = "bucket_numel"
y = ["iteration_ms"]
"""
MODEL = """
name = "small"
hidden = 64
ffn = 128
layers = 2
heads = 2
kv_heads = 2
seq_length = 32
vocab_size = 8192

[defaults]
micro_batch_size = 2
global_batch_size = 2
iterations = 4
"""
SWEEP = """
name = "buckets"
description = "two sizes of bucket"
model = "small"
figures = ["bucket"]
point = { device = "cpu" }
grid = { bucket_numel = [600_000, 1_200_000] }
engines = [{ engine = ["plain", "overlapped", "elsewhere"] }]
"""
SLOW = [pytest.mark.slow, pytest.mark.timeout(900)]
NAMES = [
    f"small bucket {size} {engine}"
    for size in ("600k", "1.2M")
    for engine in ("plain", "overlapped", "elsewhere")
]


@pytest.fixture(
    scope="module",
    params=["a stand-in", pytest.param("our trainer", marks=[pytest.mark.exhaustive, *SLOW])],
)
def ran(request, tmp_path_factory):
    """The study's sweep, run and told; its output and folder."""
    folder = tmp_path_factory.mktemp("studies") / "buckets-of-mine"
    for kind, name, text in (("models", "small", MODEL), ("sweeps", "buckets", SWEEP)):
        (folder / kind).mkdir(parents=True)
        (folder / kind / f"{name}.toml").write_text(text)
    (folder / "study.toml").write_text(STUDY)
    results = folder.parent / "results"
    words, variables = ["--study", folder, "--results-dir", results], {}
    if request.param == "a stand-in":
        for end in (".bin", ".idx"):
            (folder / f"data{end}").touch()
        words += ["--data-prefix", folder / "data", "--trainer-module", "fake_trainer"]
        variables = {"PYTHONPATH": python_path(FAKES), "FAKE_TRAINER": "falls"}
    done = python("-m", "launch.sweep", *words, **variables)
    sweep = results / "buckets-of-mine" / "buckets"
    assert (sweep / "sweep.json").is_file(), done.stdout + done.stderr
    return done, sweep


def test_its_runs_are_made_and_carry_it(ran):
    done, sweep = ran
    index = json.loads((sweep / "sweep.json").read_text())
    assert index["study"]["name"] == "buckets-of-mine"
    assert index["study"]["gate"]["tolerance"] == 1e-3
    assert [run["status"] for run in index["runs"]] == ["ok"] * 4, done.stdout + done.stderr
    for run in index["runs"]:
        folder = sweep / run["run_dir"]
        saved = json.loads((folder / "run.json").read_text())
        config = json.loads((folder / "ds_config.json").read_text())["zero_optimization"]
        assert saved["study"] == index["study"]
        assert config["reduce_bucket_size"] == saved["point"]["bucket_numel"]
        assert config["overlap_comm"] == (run["engine"] == "overlapped")
    reason = "needs a GPU, and this run has none; needs no-such-package>=2, and no-such-package"
    skipped = {point["name"]: point.get("skipped", "") for point in index["points"]}
    assert list(skipped) == NAMES
    assert [name for name, why in skipped.items() if why.startswith(reason)] == NAMES[2::3]
    assert f"[3/6] {NAMES[2]}: left out: {reason}" in done.stdout
    assert "6 runs: 4 ok, 2 left out" in done.stdout


def test_its_field_is_a_column_and_its_gate_gives_the_verdict(ran):
    _, sweep = ran
    runs = rows_of(sweep, "runs")
    assert [row["bucket_numel"] for row in runs] == ["600000"] * 2 + ["1200000"] * 2
    assert [row["label"] for row in runs] == [name for name in NAMES if "elsewhere" not in name]
    pairs = rows_of(sweep, "comparisons")
    assert {row["engine"] for row in pairs} == {"overlapped"}
    assert {row["bucket_numel"] for row in pairs} == {"600000", "1200000"}
    assert {row["gate"] for row in pairs} == {"close"}
    assert {row["equality"] for row in pairs} <= {"equal", "close"}


def test_its_figure_is_drawn_and_its_report_tells_title_gate_and_engines(ran):
    done, sweep = ran
    for ending in ("png", "pdf", "svg"):
        assert (sweep / "figures" / f"bucket.{ending}").stat().st_size > 1000
    report = (sweep / "report.html").read_text()
    for words in ("Buckets of gradients", "loss within 0.001", "overlapped", "bucket 1.2M"):
        assert words in report
    assert done.returncode == 0, done.stdout + done.stderr
