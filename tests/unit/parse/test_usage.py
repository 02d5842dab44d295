"""What a run took of its machine, in columns of runs.csv and tables of their own."""

import json

import pytest
from programs import parse_logs as main
from rows import rows

from parse.summary import summary

LINES = [
    f"epoch=0/micro_step={step}/global_step={step}, RunningAvgSamplesPerSec={rate}, "
    f"CurrSamplesPerSec={rate}, MemAllocated={now}GB, MaxMemAllocated={peak}GB"
    for step, rate, now, peak in ((3, 4.0, 0.5, 0.9), (6, 5.5, 0.25, 0.9))
]
GIB = 2**30


def sample(**figures):
    return json.dumps({"time_s": 1.0, **figures})


@pytest.fixture
def tables(tmp_path, write_log, recipe):
    """Tables of one run with these samples."""

    def make(samples, lines=()):
        log = write_log("run/log.log", text="".join(f"{x}\n" for x in lines) + recipe().text())
        log.with_name("run.json").write_text(json.dumps({"log": log.name, "point": {"model": "m"}}))
        log.with_name("monitor.jsonl").write_text("".join(f"{text}\n" for text in samples))
        assert main([str(log), "--out", str(tmp_path / "t")]) in (0, 1)
        return tmp_path / "t"

    return make


def test_deepspeeds_lines_become_columns_and_a_table(tables):
    out = tables([], LINES)
    [run] = rows(out / "runs.csv")
    assert float(run["running_samples_per_s"]) == 5.5
    assert (float(run["allocated_gib"]), float(run["max_allocated_gib"])) == (0.5, 0.9)
    found = [(row["step"], row["current_samples_per_s"]) for row in rows(out / "throughput.csv")]
    assert found == [("3", "4.0"), ("6", "5.5")]


def test_a_run_that_says_nothing_has_empty_cells_and_no_table(tables):
    out = tables([])
    [run] = rows(out / "runs.csv")
    assert run["max_allocated_gib"] == run["host_peak_gib"] == run["gpu_util_percent"] == ""
    assert not (out / "throughput.csv").exists()


def test_a_gpu_counts_while_the_run_holds_memory_of_it(tables):
    def of(device, held, used, util):
        return sample(device_id=device, gpu_memory_run_bytes=held * GIB,
                      gpu_memory_used_bytes=used * GIB, gpu_util_percent=util)  # fmt: skip

    out = tables([of(0, 0, 9, 99.0), of(0, 3, 12, 40.0), of(1, 5, 14, 60.0)])
    [run] = rows(out / "runs.csv")
    assert float(run["gpu_peak_gib"]) == 5
    assert float(run["gpu_util_percent"]) == 50


def test_a_run_is_summed_up_in_ten_lines(write_log, recipe, tmp_path):
    log = write_log("run/log.log", text=recipe().text())
    log.with_name("run.json").write_text(json.dumps({"log": log.name, "point": {"model": "m"}}))
    log.with_name("monitor.jsonl").write_text(f"{sample(host_used_bytes=3 * GIB)}\n")
    found = summary(log)
    assert found[:4] == [
        "  iteration    130.9 ms (median of 4)",
        "  forward      12.8 ms",
        "  backward     22.5 ms",
        "  update       33.2 ms",
    ]
    assert "  rate         15.28 samples/s, 2.5 TFLOP/s a rank" in found
    assert any(line.startswith("  loss         9.0000 to 8.0000 in 5 iterations") for line in found)
    assert "  peak memory  3.00 GiB all ranks on the host" in found
    assert found[-1] == "  files        its log, monitor.jsonl, run.json"
    assert len(found) <= 10
    assert summary(tmp_path / "none.log") == []


def test_tokens_a_second_are_those_of_an_iteration_over_its_median(write_log, recipe):
    """The trainer counts them up; a study names the column in its results."""
    log = write_log("run/log.log", text=recipe().text())
    with log.with_name("metrics.jsonl").open("w") as metrics:
        print(json.dumps({"event": "start"}), file=metrics)
        for number, loss in enumerate(recipe().losses, 1):
            line = {"iteration": number, "tokens": 128 * number, "loss": loss}
            print(json.dumps({"event": "iteration", **line}), file=metrics)
    [line] = [line for line in summary(log) if line.startswith("  rate")]
    tokens, samples = (
        float(rate.split()[0]) for rate in line.removeprefix("  rate").split(",")[:2]
    )
    assert tokens / samples == pytest.approx(128 / 2, rel=1e-3)
