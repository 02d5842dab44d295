"""`make gpu-check`: parts that fail or take too long, the summary, packages that lack."""

import json
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import MINUTES, PARTS, Part
from configs.errors import ConfigError
from configs.study import load_study
from configs.sweep import load_sweep
from launch.sweep import build_parser

ROOT = Path(__file__).resolve().parents[3]
PASS = (sys.executable, "-c", "")
SAYS_ITS_DEVICES = "import os; print('devices', repr(os.environ.get('CUDA_VISIBLE_DEVICES')))"


def part(code, limit_s=3600):
    return Part(limit_s, ("-c", code), "nothing of a GPU", "^seen|^devices")


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Runs ``main`` with parts of the test's own; returns its code and the summary."""
    monkeypatch.setattr(gpu_check, "NEEDED", ())
    monkeypatch.setattr(gpu_check, "GRACE_S", 0.1)

    def run(parts, *words, gpu=False):
        facts = f"print({json.dumps(json.dumps([gpu, 'a machine']))})"
        monkeypatch.setattr(gpu_check, "FACTS", facts)
        monkeypatch.setattr(gpu_check, "PARTS", parts)
        code = gpu_check.main([*words, "--folder", str(tmp_path / "found")])
        return code, (tmp_path / "found" / "summary.txt").read_text()

    return run


def test_a_part_that_fails_costs_no_other_and_is_explained(check):
    parts = {
        "build": part("print('seen first')"),
        "tests": part("print('last words'); raise SystemExit(3)"),
        "peers": part("print('seen third'); print('not shown')"),
    }
    code, text = check(parts)
    assert code == gpu_check.EXIT_FAILED
    heads = [line.split(",")[0] for line in text.splitlines() if line and line[0] != " "]
    assert heads[2:] == [
        *("build: ok", "tests: FAILED: ended with status 3: last words", "peers: ok")
    ]
    assert "    seen third\n" in text
    assert "    | last words\n" in text
    assert "not shown" not in text


def test_a_part_that_takes_too_long_is_ended(check):
    code, text = check({"build": part("import time; time.sleep(3600)", limit_s=0.3)}, gpu=True)
    assert code == gpu_check.EXIT_FAILED
    assert "build: FAILED: not done after 0 s" in text


def test_parts_of_several_calls_are_summed_up_together(check, tmp_path):
    parts = dict.fromkeys(("build", "tests", "peers"), part("print('seen')"))
    assert check(parts, "peers", "--out", str(tmp_path / "out"))[0] == 0
    assert "not run: tests" in (tmp_path / "out" / "summary.txt").read_text()
    code, text = check(parts, "tests")
    assert code == 0
    named = [line.partition(": ok")[0] for line in text.splitlines() if ": ok" in line]
    assert named == ["build", "tests", "peers"]
    assert "not run" not in text


def test_the_sweep_gets_its_model_and_minutes_and_the_time_for_them(check, monkeypatch, tmp_path):
    calls = []

    def run(command, log, limit_s, *_, **__):
        log.write_text("")
        calls.append((command[3:], limit_s))
        return 0

    monkeypatch.setattr(gpu_check, "run", run)
    parts = {"build": part("pass"), "peers": part("pass", limit_s=580)}
    check(parts, "peers", "--minutes", "9.5", "--model", "1.3B", gpu=True)
    (_, (words, limit_s)) = calls
    assert words[2:6] == ["--minutes", "9.5", "--model", "1.3B"]
    assert limit_s == pytest.approx(580 + 120 - 0.1)


def test_without_a_gpu_each_part_says_so_and_sees_none(check):
    parts = {"build": part(SAYS_ITS_DEVICES)}
    _, text = check(parts)
    assert "NO GPU HERE" in text
    assert "(without a GPU: nothing of a GPU)" in text
    assert "devices ''" in text
    _, text = check(parts, gpu=True)
    assert "GPU HERE" not in text
    assert "without a GPU" not in text
    assert "devices ''" not in text


def test_an_unknown_part_is_named(tmp_path):
    with pytest.raises(ConfigError, match="unknown part 'smoke'; known: build, tests, calibrate"):
        gpu_check.main(["smoke", "--folder", str(tmp_path)])


def test_what_is_run_is_there():
    assert [*PARTS] == ["build", "tests", "calibrate", "equality", "peers"]
    assert sum(part.limit_s <= 600 for part in PARTS.values()) == len(PARTS)
    paths = [word for part in PARTS.values() for word in part.words if word.startswith("tests/")]
    assert len(paths) == 2
    assert all((ROOT / path).exists() for path in paths)
    words = PARTS["peers"].words
    given = build_parser(load_study("peers")).read(words[2:])
    assert load_sweep(given.sweep, load_study(given.study)).name == "gpu"
    assert PARTS["peers"].limit_s > MINUTES * 60 + 60


def make_wheel(folder, name):
    info = f"{name}-1.0.dist-info"
    dashed = name.replace("_", "-")
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {dashed}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def test_packages_that_lack_come_from_wheels_and_others_stay(tmp_path, monkeypatch):
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    make_wheel(wheels, "not_on_any_machine")
    make_wheel(wheels, "pydantic")
    monkeypatch.setattr(gpu_check, "SITE", site)
    monkeypatch.setattr(gpu_check, "NEEDED", ("pydantic", "not-on-any-machine", "nor-this"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    needed = gpu_check.needed_by(["build"])
    assert gpu_check.install_what_lacks(needed, wheels) == ["nor-this"]
    assert (site / "not_on_any_machine.py").is_file()
    assert not (site / "pydantic.py").exists()
    with pytest.raises(ConfigError, match=r"not installed: nor-this; run `make setup`, or, on "):
        gpu_check.main(["build", "--wheels", str(wheels), "--folder", str(tmp_path / "f")])


@pytest.mark.parametrize(
    ("words", "lacking"),
    [
        (["peers"], ""),
        (["calibrate", "build"], ""),
        (["tests"], "pytest-nowhere"),
        (["equality", "peers"], "pytest-nowhere"),
        ([], "pytest-nowhere"),
    ],
)
def test_only_a_part_of_tests_asks_for_the_packages_of_tests(words, lacking, check, monkeypatch):
    monkeypatch.setattr(gpu_check, "FOR_TESTS", ("pytest", "pytest-nowhere"))
    run = gpu_check.run
    monkeypatch.setattr(gpu_check, "run", lambda _, *rest, **more: run(PASS, *rest, **more))
    if not lacking:
        assert check(PARTS, *words)[0] == 0
        return
    with pytest.raises(ConfigError, match=f"not installed: {lacking}; run `make setup-tests`, or"):
        check(PARTS, *words)
