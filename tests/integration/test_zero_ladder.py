"""Rungs of the ladder for real: trained, compared, drawn, saved and evaluated."""

import json

import prepared
import pytest
from deepspeed.accelerator import get_accelerator
from programs import python, rows_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SMALL = ("--model.layers", "1", "--model.hidden", "64", "--model.ffn", "128", "--model.heads", "2")
SMALL += ("--model.kv-heads", "2", "--model.seq-length", "32", "--iterations", "4")


@pytest.fixture(scope="module")
def ladder(corpus, tmp_path_factory):
    """A sweep of two rungs, each of which saves after 3 of 4 iterations and at the end."""
    folder = tmp_path_factory.mktemp("results")
    words = ["--study", "zero-ladder", "--engines", "stage-1,stage-2-offload", *SMALL]
    often = folder / "ds.json"
    often.write_text('{"steps_per_print": 2}')
    words += ["--dtype", "fp32", "--dp", "1", "--save-interval", "3", "--eval-interval", "4"]
    words += ["--deepspeed-config", str(often), "--device", "cpu", "--results-dir", str(folder)]
    words += ["--share", "--data-prefix", str(corpus)]
    words += ["--monitor-interval", "0.05"]  # a fast machine makes a run in less than a second
    done = python("-m", "launch.sweep", *words, **prepared.variables(prepared.MEGATRON))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "zero-ladder" / "ladder"


def test_two_rungs_are_what_their_rows_say_agree_closely_and_pass_their_gate(ladder):
    compared = {row["engine"]: row for row in rows_of(ladder, "comparisons")}
    assert list(compared) == ["stage-2-offload"]
    compared = compared["stage-2-offload"]
    assert compared["equality"] in ("close", "equal")
    assert "gate close passed" in compared["verdict"]
    assert float(compared["reference_ms"]) > 0
    configs = [json.loads(path.read_text()) for path in ladder.glob("*/run-001/ds_config.json")]
    zero = {config["zero_optimization"]["stage"]: config for config in configs}
    assert "offload_optimizer" not in zero[1]["zero_optimization"]
    assert zero[2]["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert (ladder / "figures" / "ladder.png").stat().st_size > 10_000


def test_deepspeeds_own_figures_are_in_the_tables(ladder):
    # DeepSpeed times no update before the third, and prints every second.
    lines = rows_of(ladder, "throughput")
    assert [(row["engine"], row["step"]) for row in lines] == [
        ("stage-1", "4"),
        ("stage-2-offload", "4"),
    ]
    assert all(float(row["running_samples_per_s"]) > 0 for row in lines)
    for row in rows_of(ladder, "runs"):
        assert float(row["max_allocated_gib"]) > 0.01
        assert float(row["host_peak_gib"]) > 0.01


def test_a_rung_that_saves_evaluates_what_it_saves(ladder):
    [folder] = ladder.glob("*engine_stage-2-offload/run-001")
    saved = sorted(path.name for path in (folder / "checkpoints").iterdir() if path.is_dir())
    assert saved == ["iteration-000003", "iteration-000004"]
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    found = [line for line in lines if line["event"] == "evaluation"]
    assert [line["iteration"] for line in found] == [4]
    assert found[0]["samples_per_s"] > 0
    assert 5 < found[0]["loss"] < 12


@pytest.mark.skipif(
    not get_accelerator().is_fp16_supported(), reason="DeepSpeed trains fp16 on no such device"
)
@pytest.mark.exhaustive
def test_fp16_that_skips_every_update_fails_by_name(tmp_path):
    scale = tmp_path / "ds.json"
    scale.write_text('{"fp16": {"initial_scale_power": 60}}')
    words = ["tiny", "--study", "zero-ladder", "--engine", "stage-1", "--dtype", "fp16", *SMALL]
    words += ["--deepspeed-config", str(scale), "--share", "--device", "cpu"]
    done = python("-m", "launch.run", *words, "--results-dir", str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "skipped: ended, but its loss is that of unchanged weights: all 4 updates" in done.stderr
    [status] = tmp_path.rglob("status.json")
    assert json.loads(status.read_text())["status"] == "skipped"
