import json
import os
import re
from pathlib import Path

import pytest
from programs import report as main

GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "report" / "report.md"
GPU = {"provenance": {"gpus": [{"name": "Test GPU", "driver": "1", "memory": "80 GB"}]}}


def draw(folder, *names):
    (folder / "figures").mkdir(exist_ok=True)
    for name in names:
        (folder / "figures" / name).write_bytes(b"not a real image")


def summary(report):
    """Rows of the table of points."""
    section = report.split("## Times")[1].split("##")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in lines[1:]]


def run(folder, capsys, *options):
    code = main([str(folder), *options])
    captured = capsys.readouterr()
    report = folder / "report.md"
    return (
        code,
        captured.out.partition("\n\n")[0].splitlines(),
        report.read_text() if report.is_file() else "",
    )


def test_repeats_are_one_row_and_one_comparison(sweep_writer, capsys):
    sweep_writer.device = "Test GPU"
    seconds = {"stock": (9.0, 0.4, 0.4, 0.42, 0.4), "stride": (9.0, 0.2, 0.2, 0.22, 0.2)}
    runs = [
        (engine, stride, {**GPU, "repeat": repeat, "seconds": seconds[engine]})
        for repeat in (1, 2, 3)
        for engine, stride in (("stock", 0), ("stride", 2))
    ]
    code, lines, report = run(sweep_writer.write_runs(runs), capsys)
    assert (code, len(lines)) == (0, 3)
    assert [line.split(":")[0] for line in lines][1:] == [
        "tiny stride 2 #2",
        "tiny stride 2 #3",
    ]
    theirs, ours = summary(report)
    assert (theirs[1], theirs[5:]) == ("400.0 (5.0) / 405.0", ["12 in 3", "", ""])
    assert (ours[1], ours[5:]) == ("200.0 (5.0) / 205.0", ["12 in 3", "equal", "2.000x"])
    assert "in each of 3 repeats; speed-up 2.000x (95% interval 2.000 to 2.000)" in report
    assert "| 2.000 \\[2.000, 2.000\\] |" in report


def test_a_run_whose_launcher_is_gone_is_what_the_index_says(sweep_writer, capsys):
    fields = {"repeat": 1, "status": "running"}
    folder = sweep_writer.write_runs([("stock", 0, {"repeat": 1}), ("stride", 2, fields)])
    index = json.loads((folder / "sweep.json").read_text())
    index["runs"][1]["status"] = "interrupted"
    (folder / "sweep.json").write_text(json.dumps(index))
    code, lines, report = run(folder, capsys)
    assert code == 1
    assert "run interrupted" in lines[0]
    assert "| interrupted | 1.5 |" in report


def test_a_large_sweep_has_counts_at_the_top(sweep_writer, capsys):
    runs = []
    for size in range(1, 21):
        point = {"point": {"micro_batch_size": size}}
        worse = {"digest": "bb"} if size == 7 else {}
        runs += [("stock", 0, point), ("all-host", 0, point)]
        runs += [("stride", 2, {**point, **worse})]
    code, _, report = run(sweep_writer.write_runs(runs), capsys)
    assert code == 1
    top = report.split("## Times")[0]
    assert "40 points against stock: 39 equal, 1 differs" in top
    assert "tiny micro-batch 7 stride 2: differs" in top
    assert top.count("\n- ") == 3
    assert len(summary(report)) == 60


def test_golden_report(sweep_writer, capsys):
    data = {"name": "own", "source": "/x/own", "tokens": 3000, ".bin": {"sha256": "ab12"}}
    fp32 = {"point": {"dtype": "fp32"}, "dtype_reason": "no bf16 here"}
    runs = [("stock", 0, {"repeat": r, "provenance": {"data": data}, **fp32}) for r in (1, 2)]
    runs += [("all-host", 0, {"repeat": r, **fp32}) for r in (1, 2)]
    failed = {"status": "oom-host", "cause": "the kernel killed rank 0", "log": False, **fp32}
    failed["last_lines"] = ["one", "  two | <b>", ""]
    runs += [("stride", 2, {"repeat": 1, **fp32}), ("stride", 2, {"repeat": 2, **failed})]
    points = [{"name": e, "engine": e, "repeats": 2} for e in ("stock", "all-host")]
    points += [{"name": e, "engine": e, "repeats": 3} for e in ("stride", "auto")]
    folder = sweep_writer.write_runs(
        runs, points=points, figures=["stride", "loss"], description="a golden"
    )
    draw(folder, "loss.png", "loss.pdf", "zzz.png")
    _, _, report = run(folder, capsys)
    for block in re.findall(r"(?:^\|.*\n)+", report, re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(widths) == 1, block
    if os.environ.get("GOLDEN_REWRITE"):
        GOLDEN.write_text(report)
    assert report == GOLDEN.read_text()
    page = (folder / "report.html").read_text()
    for words in ("own (/x/own), 3,000 tokens", "fp32, since no bf16 here"):
        assert f'<td class="words">{words}' in page


@pytest.mark.parametrize("log", [True, False])
def test_a_failed_run_is_listed_and_does_not_break_the_report(sweep_writer, capsys, log):
    failed = {"status": "oom-host", "cause": "killed | by <kernel>", "log": log}
    code, lines, report = run(sweep_writer.write(stride={**failed, "losses": (9.0, 8.5)}), capsys)
    assert code == 1
    assert [row[6] for row in summary(report)] == ["", "equal", "not compared"]
    assert summary(report)[2][5] == ("no times; 1 of 1 oom-host")
    assert lines[0].startswith("tiny all-host: equal")
    assert "oom-host (killed | by <kernel>)" in lines[1]
    assert ("as far as it got equal to stock" in lines[1]) == log
    assert "| oom-host | 1.5 |" in report
    assert "killed \\| by \\<kernel\\>" in report


@pytest.mark.parametrize("text", [None, "{}", "[1]", '{"runs": [{"name": 1}, 3]}', "\0"])
def test_no_sweep_is_one_line_and_exit_code_2(tmp_path, capsys, text):
    if text is not None:
        (tmp_path / "sweep.json").write_text(text)
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "sweep.json" in error
