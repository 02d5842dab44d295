import json
import re
import shutil
from pathlib import Path

import pytest
from programs import parse_logs as main

STEADY = (9.0, *(0.4 + 0.001 * (i % 4) for i in range(9)))
LOSSES = tuple(9.0 - 0.1 * i for i in range(10))
DEVICE = {"gpus": [{"name": "Test GPU", "driver": "1"}]}


def slower(factor):
    return tuple(seconds * factor for seconds in STEADY)


@pytest.fixture
def sides(sweep_writer, tmp_path):
    """Writes two sweeps of vanilla and hybrid, and says where; ``new`` changes the second."""
    sweep_writer.device = "Test GPU"

    def write(**new):
        folders = []
        for name, changes in (("old", {}), ("new", new)):
            sweep_writer.folder = tmp_path / name
            runs = []
            for engine, stride in (("vanilla", 0), ("hybrid", 2)):
                fields = {"losses": LOSSES, "seconds": STEADY, "provenance": DEVICE}
                change = changes.get(engine, {})
                if change is not None:
                    runs.append((engine, stride, fields | change))
            folders.append(str(sweep_writer.write_runs(runs)))
        return folders

    return write


def compare(capsys, *arguments):
    code = main(["compare", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def words(out):
    """Word of each point of the table, by its label; a point's row has two spaces between cells."""
    rows = [re.split(r"  +", line.lstrip("! ").rstrip()) for line in out.splitlines()[2:-1]]
    return {row[0]: row[-1].partition(":")[0] for row in rows}


def test_equal_sides_have_no_regression(sides, capsys):
    code, out, _ = compare(capsys, *sides())
    assert code == 0
    assert "0 regressions in 2 points" in out
    assert "inside a run" in out
    assert "vanilla" in out


@pytest.mark.parametrize(
    ("new", "word", "code"),
    [
        ({"seconds": slower(1.2)}, "slower", 1),
        ({"seconds": slower(1.03)}, "same", 0),
        ({"seconds": slower(0.8)}, "faster", 0),
        ({"seconds": (9.0, *(0.3 + 0.08 * (i % 4) for i in range(9)))}, "same", 0),
        ({"seconds": (9.0, *(0.3 + 0.12 * (i % 5) for i in range(9)))}, "perhaps slower", 0),
        (None, "missing", 1),
        ({"status": "oom-device"}, "failed", 1),
        ({"log": False, "status": "failed"}, "failed", 1),
        ({"losses": (9.0, 8.5, *[8.0] * 8)}, "loss worse", 1),
        ({"losses": (9.0, 8.5, *[float("nan")] * 8)}, "loss worse", 1),
        ({"digest": "bb"}, "equality worse", 1),
    ],
)
def test_what_is_a_regression(sides, capsys, new, word, code):
    found, out, _ = compare(capsys, *sides(hybrid=new))
    assert found == code
    assert (words(out)["tiny hybrid stride 2"], words(out)["tiny vanilla"]) == (word, "same")
    assert sum(line.startswith("!") for line in out.splitlines()) == code


def test_the_tolerance_and_the_side_decide(sides, capsys):
    folders = sides(hybrid={"seconds": slower(1.2)})
    assert compare(capsys, *folders, "--tolerance", "0.5")[0] == 0
    assert compare(capsys, *reversed(folders))[0] == 0


def test_lost_iterations_are_a_regression_whatever_the_times(sides, capsys):
    folders = sides()
    (log,) = Path(folders[1]).rglob("*gaps2.log")
    text = log.read_text()
    for number in (4, 6, 8):
        text = text.replace(f"lm loss: {LOSSES[number]:.6E}", "lm loss: x")
    log.write_text(text)
    metrics = log.with_name("metrics.jsonl")
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    # While the exact figures are there, damage in the log costs nothing.
    assert compare(capsys, *folders)[0] == 0
    kept = [e for e in events if e["event"] != "iteration" or e["iteration"] not in (5, 7, 9)]
    metrics.write_text("".join(json.dumps(event) + "\n" for event in kept))
    code, out, _ = compare(capsys, *folders)
    assert code == 1
    assert "fewer iterations: 10 before, 7 now; 3 lines rejected" in out
    assert compare(capsys, *reversed(folders))[0] == 0


def test_run_folders_and_logs_can_be_compared(sides, capsys):
    old, new = sides(vanilla={"seconds": slower(1.3)})
    logs = [next(iter(sorted(Path(f).rglob("*gaps0.log")))) for f in (old, new)]
    assert compare(capsys, *map(str, logs))[0] == 1
    code, out, _ = compare(capsys, *(str(log.parent) for log in logs))
    assert code == 1
    assert "+30.0%" in out


def test_another_machine_is_not_judged_unasked(sides, capsys):
    sides_of = sides(hybrid={"seconds": slower(1.2)})
    metrics = list(Path(sides_of[1]).rglob("metrics.jsonl"))
    for path in metrics:
        path.write_text(path.read_text().replace("Test GPU", "Other GPU"))
    code, out, _ = compare(capsys, *sides_of)
    assert code == 2
    assert "cuda Test GPU before, cuda Other GPU now" in out


def test_too_few_iterations_decide_nothing(sides, capsys):
    short = {"losses": LOSSES[:4], "seconds": slower(2)[:4]}
    old, new = sides(vanilla=short, hybrid=short)
    shutil.copytree(new, old, dirs_exist_ok=True)
    code, out, _ = compare(capsys, old, new)
    assert code == 2
    assert out.count("too few iterations: no interval") == 2


def test_a_new_point_is_none(sides, capsys):
    old, new = sides(hybrid=None)
    code, out, _ = compare(capsys, new, old)
    assert code == 0
    assert [line.split()[-1] for line in out.splitlines() if "hybrid" in line] == ["new"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "required"),
        (("OLD",), "required"),
        (("OLD", "NEW", "--tolerance", "-1"), "give a number"),
        (("OLD", "NEW", "--tolerance", "nan"), "give a number"),
        (("OLD", "nowhere\n"), "nowhere?: no such file"),
        (("OLD", "EMPTY"), "no training log there"),
    ],
)
def test_wrong_usage_is_exit_code_2(sides, tmp_path, capsys, arguments, why):
    old, new = sides()
    (tmp_path / "empty").mkdir()
    places = {"OLD": old, "NEW": new, "EMPTY": str(tmp_path / "empty")}
    code, out, err = compare(capsys, *(places.get(a, a) for a in arguments))
    assert (code, out) == (2, "")
    assert why in err


def test_nothing_in_common_is_exit_code_2(sides, sweep_writer, tmp_path, capsys):
    old, _ = sides()
    sweep_writer.folder = tmp_path / "other"
    other = sweep_writer.write_runs([("vanilla", 0, {"point": {"micro_batch_size": 2}})])
    code, _, err = compare(capsys, old, str(other))
    assert code == 2
    assert "no point is on both sides (2 and 1 points)" in err
