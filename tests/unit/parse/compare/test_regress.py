import json
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
    return {point["label"]: point["word"] for point in json.loads(out)["points"]}


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
    folders = sides(hybrid=new)
    found, out, _ = compare(capsys, *folders, "--json")
    assert (words(out)["tiny hybrid stride 2"], words(out)["tiny vanilla"]) == (word, "same")
    assert found == code
    assert json.loads(out)["exit_code"] == code
    found, out, _ = compare(capsys, *folders)
    assert found == code
    assert sum(line.startswith("!") for line in out.splitlines()) == code


def test_the_tolerance_and_the_phase_decide(sides, capsys):
    folders = sides(hybrid={"seconds": slower(1.2)})
    assert compare(capsys, *folders, "--tolerance", "0.5")[0] == 0
    assert compare(capsys, *folders, "--phase", "update")[0] == 0
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


def test_strict_fails_what_may_be_too_slow(sides, capsys):
    noisy = {"seconds": (9.0, *(0.3 + 0.08 * (i % 4) for i in range(9)))}
    folders = sides(hybrid=noisy)
    assert compare(capsys, *folders)[0] == 0
    code, out, _ = compare(capsys, *folders, "--strict", "--json")
    assert code == 1
    assert words(out) == {"tiny vanilla": "same", "tiny hybrid stride 2": "too wide"}
    assert "the tolerance is 5.0%" in json.loads(out)["points"][1]["detail"]
    assert compare(capsys, *folders, "--strict", "--tolerance", "0.9")[0] == 0


def test_strict_fails_what_has_no_interval(sides, capsys):
    short = {"losses": LOSSES[:4], "seconds": STEADY[:4]}
    folders = sides(vanilla=short, hybrid=short)
    shutil.copytree(folders[1], folders[0], dirs_exist_ok=True)
    assert compare(capsys, *folders)[0] == 2
    code, out, _ = compare(capsys, *folders, "--strict")
    assert (code, out.count("too wide: no interval")) == (1, 2)


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
    assert compare(capsys, *sides_of, "--any-hardware")[0] == 1


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
        (("OLD", "NEW", "--phase", "sideways"), "invalid choice"),
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


@pytest.fixture
def kept(sides, tmp_path, capsys):
    """Keeps the old sweep's values, and returns both sweeps and the file."""
    folders = sides(hybrid={"seconds": slower(1.2)})
    file = tmp_path / "references" / "basic.json"
    assert main(["keep", folders[0], str(file)]) == 0
    assert "2 points kept" in capsys.readouterr().out
    return *folders, str(file)


def rename_machine(folder, name):
    for path in Path(folder).rglob("metrics.jsonl"):
        path.write_text(path.read_text().replace("Test GPU", name))


def test_results_are_compared_with_the_values_kept_of_their_machine(kept, capsys):
    old, new, file = kept
    with_values, with_results = compare(capsys, file, new), compare(capsys, old, new)
    assert with_values == with_results
    assert with_values[0] == 1
    assert "slower" in with_values[1]
    assert compare(capsys, file, old)[0] == 0


def test_each_machine_has_values_of_its_own(kept, capsys):
    old, new, file = kept
    rename_machine(new, "Slow GPU")
    code, _, err = compare(capsys, file, new)
    assert code == 2
    assert "has no values of cuda Slow GPU" in err
    assert "parse keep" in err
    assert main(["keep", new, file]) == 0
    capsys.readouterr()
    for folder in (old, new):
        code, out, _ = compare(capsys, file, folder)
        assert (code, "0 regressions in 2 points" in out) == (0, True)


def test_values_are_replaced_only_when_asked(kept, capsys):
    _, new, file = kept
    before = Path(file).read_text()
    assert main(["keep", new, file]) == 2
    assert "has values of tiny vanilla on this machine already" in capsys.readouterr().err
    assert Path(file).read_text() == before
    assert main(["keep", new, file, "--replace"]) == 0
    assert "2 replaced" in capsys.readouterr().out
    assert compare(capsys, file, new)[0] == 0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"status": "failed"}, "tiny hybrid stride 2: failed"),
        ({"losses": (9.0, 8.5, *[float("nan")] * 8)}, "tiny hybrid stride 2: nan"),
    ],
)
def test_what_failed_is_not_kept(sides, tmp_path, capsys, change, why):
    _, new = sides(hybrid=change)
    assert main(["keep", new, str(tmp_path / "r.json")]) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()


def test_a_file_that_is_not_ours_is_neither_read_nor_replaced(sides, tmp_path, capsys):
    old, new = sides()
    mine = tmp_path / "mine.json"
    mine.write_text('{"reference_values": [{"label": 1}]}')
    code, _, err = compare(capsys, str(mine), new)
    assert (code, "holds no reference values" in err) == (2, True)
    mine.write_text('{"mine": 1}')
    assert main(["keep", old, str(mine)]) == 2
    assert mine.read_text() == '{"mine": 1}'
    assert compare(capsys, str(tmp_path / "none.json"), new)[0] == 2
