import csv
import json
import math
import re

import pytest

from parse.report import main


def run(folder, capsys, *options):
    code = main([str(folder), *options])
    captured = capsys.readouterr()
    report = folder / "report.md"
    return code, captured.out.splitlines(), report.read_text() if report.is_file() else ""


def test_three_equal_engines_on_a_cpu(sweep_writer, capsys):
    folder = sweep_writer.write()
    code, lines, report = run(folder, capsys)
    equal = "equal to vanilla (5 losses, 5 gradient norms, weights and optimizer state)"
    assert lines == [f"async-gradients: {equal}", f"hybrid (stride 2): {equal}"]
    assert code == 0
    assert "no speed-up is claimed" in report
    assert "measured on CPU, not a speed claim" in report
    assert "none claimed: measured on a CPU" in report
    assert not re.search(r"speed-up \d|\d\.\d{3}x", report)
    for expected in (
        "# small \\| sweep", "](figures/loss.png)", "](figures/iteration-breakdown.png)",
        "python 'a b'", "| torch | 2.13.0 |", "| triton | not installed |", "A CPU",
        "abc with uncommitted changes", "8.0 GiB",
    ):  # fmt: skip
        assert expected in report
    assert "| vanilla | 130.9 / 130.9 | 12.8 / 12.8 | 22.5 / 22.5 | 33.2 / 33.2 | 4 |" in report
    with (folder / "tables" / "runs.csv").open(newline="") as file:
        paths = [row["path"] for row in csv.DictReader(file)]
    assert all(path.startswith("log-tiny-") for path in paths)


def test_every_table_of_the_report_has_rows_as_wide_as_its_head(sweep_writer, capsys):
    _, _, report = run(sweep_writer.write(), capsys)
    for block in re.findall(r"(?:^\|.*\n)+", report, re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1, block
        assert block.count("\n") >= 3


def test_a_speed_up_is_claimed_on_a_gpu_alone(sweep_writer, capsys):
    sweep_writer.device = "NVIDIA Test GPU"
    _, _, report = run(sweep_writer.write(), capsys)
    assert "speed-up 1.000x" in report
    assert "not a speed claim" not in report
    assert "cuda NVIDIA Test GPU" in report


def test_a_pair_that_differs_is_exit_code_1_and_withholds_the_speed_up(sweep_writer, capsys):
    sweep_writer.device = "NVIDIA Test GPU"
    losses = (9.0, 8.5, 8.0, 8.0, 8.0)
    code, lines, report = run(sweep_writer.write(hybrid={"losses": losses}), capsys)
    assert code == 1
    assert lines[1].startswith("hybrid (stride 2): differs from vanilla from iteration 3 (5 losses")
    assert "frozen at 8.0 from iteration 3" in lines[1]
    assert "withheld: the loss of deep-optimizer-states is frozen at 8.0" in report


def test_weights_that_differ_are_exit_code_1(sweep_writer, capsys):
    code, lines, _ = run(sweep_writer.write(hybrid={"digest": "bb"}), capsys)
    assert code == 1
    assert lines[1] == (
        "hybrid (stride 2): differs from vanilla: the losses agree, the final weights and "
        "optimizer state do not"
    )


@pytest.mark.parametrize("log", [True, False])
def test_a_failed_run_is_listed_and_does_not_break_the_report(sweep_writer, capsys, log):
    failed = {"status": "oom-host", "cause": "killed | by <kernel>", "log": log}
    code, lines, report = run(sweep_writer.write(hybrid={**failed, "losses": (9.0, 8.5)}), capsys)
    assert code == 1
    assert lines[0].startswith("async-gradients: equal")
    assert "oom-host (killed | by <kernel>)" in lines[1]
    assert ("as far as it got equal to vanilla" in lines[1]) == log
    assert "| oom-host | 1.5 |" in report
    assert "killed \\| by \\<kernel\\>" in report


def test_a_failed_vanilla_run_leaves_nothing_equal(sweep_writer, capsys):
    failed = {"status": "failed", "cause": "no memory", "log": False}
    code, lines, _ = run(sweep_writer.write(vanilla=failed), capsys)
    assert code == 1
    assert lines == [
        f"{label}: not compared: vanilla run failed (no memory)"
        for label in ("async-gradients", "hybrid (stride 2)")
    ]


def test_a_sweep_of_failures_alone_still_has_a_report(sweep_writer, capsys):
    failed = {"status": "failed", "cause": "x", "log": False}
    engines = ("vanilla", "async-gradients", "hybrid")
    code, _, report = run(sweep_writer.write(**dict.fromkeys(engines, failed)), capsys)
    assert code == 1
    assert "## Figures" not in report
    assert "no log" in report


def test_runs_of_another_point_are_not_paired(sweep_writer, capsys):
    folder = sweep_writer.write()
    path = next(folder.glob("*opt_gaps2/run-001/run.json"))
    table = json.loads(path.read_text())
    table["point"]["seed"] = 2
    path.write_text(json.dumps(table))
    code, lines, _ = run(folder, capsys)
    assert code == 1
    assert lines[1] == "hybrid (stride 2): not compared: no vanilla run of this point"


def test_equal_nan_is_said(sweep_writer, capsys):
    losses = (9.0, math.nan, math.nan)
    names = ("vanilla", "async-gradients", "hybrid")
    _, lines, _ = run(sweep_writer.write(**{n: {"losses": losses} for n in names}), capsys)
    assert lines[0].endswith("; loss: nan from iteration 2")


@pytest.mark.parametrize("text", [None, "{}", "[1]", '{"runs": [{"name": 1}, 3]}', "\0"])
def test_no_sweep_is_one_line_and_exit_code_2(tmp_path, capsys, text):
    if text is not None:
        (tmp_path / "sweep.json").write_text(text)
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "sweep.json" in error
