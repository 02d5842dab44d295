"""What `make gpu-check` does with its pieces; the pieces here do nothing but end, or fail to."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest
from processes import is_alive, wait_for

from benchmarks.gpu_check import __main__ as command, driver
from benchmarks.gpu_check.driver import Check, FolderError
from benchmarks.gpu_check.pieces import (
    BY_NAME,
    GROUPS,
    LEFT_OUT_STATUS,
    PIECES,
    Piece,
    Setting,
    chosen_pieces,
)
from benchmarks.gpu_check.summary import as_text, write_summary
from configs.study import load_study
from configs.sweep import sweep_names

ROOT = Path(__file__).resolve().parents[3]
WRITE_FACTS = (
    "import json, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(json.dumps("
    "{'cuda': False, 'machine': 'made up', 'key': [sys.argv[2]]}))"
)


def facts(machine="one"):
    return Piece(
        "facts",
        "what machine",
        3600,
        0,
        lambda setting: ("-c", WRITE_FACTS, str(setting.results / "facts.json"), machine),
        needs=(),
    )


def piece(name, code="print('* done')", limit_s=3600.0, least_s=0.0, needs=("facts",)):
    return Piece(name, "nothing", limit_s, least_s, lambda setting: ("-c", code), needs=needs)


def counted(name, path):
    """A piece that notes each time it runs."""
    return piece(name, f"open({str(path)!r}, 'a').write('x'); print('* ran')")


def run(folder, *pieces, again=(), **options):
    check = Check(folder / "results", **options)
    check.run(pieces, again, lambda: None)
    return check


def statuses(check):
    return {name: record.status for name, record in check.records.items()}


@pytest.fixture
def signals():
    """Puts back the handlers that the command sets."""
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_what_is_done_is_not_run_again(tmp_path):
    runs = tmp_path / "runs"
    run(tmp_path, facts(), counted("a", runs))
    check = run(tmp_path, facts(), counted("a", runs))
    assert runs.read_text() == "x"
    assert statuses(check) == {"facts": "ok", "a": "ok"}
    assert check.records["a"].lines == ("ran",)


def test_a_piece_that_is_asked_for_again_runs_and_keeps_its_older_results(tmp_path):
    runs = tmp_path / "runs"
    run(tmp_path, facts(), counted("a", runs))
    run(tmp_path, facts(), counted("a", runs), again=("a",))
    assert runs.read_text() == "xx"
    assert (tmp_path / "results" / "a.1" / "log").is_file()
    assert (tmp_path / "results" / "a" / "log").is_file()


def test_a_piece_finds_what_was_installed_and_the_small_form_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/given")
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    check = Check(tmp_path / "results")
    small, whole = (check._environment(small=is_small) for is_small in (True, False))
    site = tmp_path / "results" / "built" / "site"
    for environment in (small, whole):
        first, *others = environment["PYTHONPATH"].split(os.pathsep)
        assert first == str(site)
        assert others == [str(ROOT / "src"), str(ROOT), str(ROOT / "tests" / "support"), "/given"]
        assert str(site / "bin") in environment["PATH"].split(os.pathsep)
        assert environment["HF_HUB_OFFLINE"] == "1"
    assert (small["DS_ACCELERATOR"], small["CUDA_VISIBLE_DEVICES"]) == ("cpu", "")
    assert not {"DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"} & whole.keys()


def test_another_machine_or_other_code_runs_everything_again(tmp_path, monkeypatch):
    runs, code = tmp_path / "runs", tmp_path / "code.py"
    code.write_text("first")
    monkeypatch.setattr(driver, "SOURCE_FOLDER", tmp_path)
    monkeypatch.setattr(driver, "_code_files", lambda: [code])
    run(tmp_path, facts(), counted("a", runs))
    run(tmp_path, facts("another"), counted("a", runs))
    assert runs.read_text() == "xx"
    code.write_text("second")
    run(tmp_path, facts("another"), counted("a", runs))
    assert runs.read_text() == "xxx"


def test_the_engine_and_the_checks_own_code_are_part_of_what_is_done():
    names = {str(path.relative_to(ROOT)) for path in driver._code_files()}
    assert "src/deep_optimizer_states/kernels/host_adam.cpp" in names
    assert "tests/integration/engine/equality_worker.py" in names
    assert "benchmarks/gpu_check/driver.py" in names
    assert "requirements/run.txt" in names


def test_a_piece_that_fails_costs_only_those_that_need_it(tmp_path):
    check = run(
        tmp_path,
        facts(),
        piece("bad", "raise RuntimeError('broken')"),
        piece("child", needs=("facts", "bad")),
        piece("other"),
    )
    assert statuses(check) == {"facts": "ok", "bad": "failed", "child": "left-out", "other": "ok"}
    assert "RuntimeError: broken" in check.records["bad"].reason
    assert check.records["child"].reason == "bad did not succeed"
    assert check.failed == ["bad"]
    assert "| RuntimeError: broken" in as_text(check)


def test_a_failed_piece_is_tried_again(tmp_path):
    run(tmp_path, facts(), piece("a", "raise SystemExit(3)"))
    assert statuses(run(tmp_path, facts(), piece("a")))["a"] == "ok"


STARTS_A_CHILD = """
import pathlib, subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True
)
pathlib.Path({path!r}).write_text(str(child.pid))
print("* before the limit", flush=True)
time.sleep(3600)
"""


def test_a_piece_ends_at_its_limit_with_all_it_started(tmp_path, limits_begin_when):
    pid, log = tmp_path / "pid", tmp_path / "results" / "slow" / "log"
    limits_begin_when(lambda: log.exists() and "before the limit" in log.read_text())
    slow = piece("slow", STARTS_A_CHILD.format(path=str(pid)), limit_s=0.1)
    check = run(tmp_path, facts(), slow, piece("other"))
    assert statuses(check) == {"facts": "ok", "slow": "timeout", "other": "ok"}
    assert check.records["slow"].lines == ("before the limit",)
    assert check.failed == ["slow"]
    wait_for(lambda: not is_alive(int(pid.read_text())))


def test_without_time_for_it_a_piece_is_left_out(tmp_path):
    check = run(tmp_path, facts(), piece("long", least_s=5e6), piece("short"), seconds=1e6)
    assert statuses(check) == {"facts": "ok", "long": "left-out", "short": "ok"}
    assert "it needs 5000000 s" in check.records["long"].reason
    assert check.failed == []
    # A later call does not repeat a reason that may be gone.
    assert statuses(run(tmp_path, facts(), piece("short"))) == {"facts": "ok", "short": "ok"}


def test_a_piece_is_never_given_more_than_what_is_left(tmp_path):
    limits = []

    def arguments(setting):
        limits.append(setting.limit_s)
        return ("-c", "")

    run(tmp_path, facts(), Piece("a", "", 5e6, 0, arguments, needs=()), seconds=1e6)
    assert 0 < limits[0] < 1e6


def test_a_piece_may_say_that_the_machine_cannot_run_it(tmp_path):
    code = f"print('* no such tool here'); raise SystemExit({LEFT_OUT_STATUS})"
    check = run(tmp_path, facts(), piece("a", code))
    assert check.records["a"].status == "left-out"
    assert check.records["a"].reason == "no such tool here"


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(FolderError, match="holds other files"):
        Check(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_summary_says_what_became_of_each_piece(tmp_path):
    check = run(tmp_path, facts(), piece("good"), piece("bad", "raise SystemExit(3)"))
    out = tmp_path / "carried away"
    (check.folder / driver.BUILT).mkdir(exist_ok=True)
    (check.folder / driver.BUILT / "large").write_text("compiled")
    write_summary(check, out)
    text = (out / "summary.txt").read_text()
    assert "small form, on the CPU: made up" in text
    assert "good       ok" in text
    assert "    done" in text
    assert "2 ok, 1 failed" in text
    content = json.loads((out / "summary.json").read_text())
    assert [(p["name"], p["status"]) for p in content["pieces"]] == [
        ("facts", "ok"),
        ("good", "ok"),
        ("bad", "failed"),
    ]
    assert content["facts"]["machine"] == "made up"
    with tarfile.open(out / "logs.tar.gz") as archive:
        names = archive.getnames()
    assert {"good/log", "bad/log", "facts/facts.json", "summary.txt"} <= set(names)
    assert not any(name.startswith(driver.BUILT) for name in names)
    assert sorted(path.name for path in out.iterdir()) == [
        "logs.tar.gz",
        "summary.json",
        "summary.txt",
    ]


@pytest.mark.parametrize(("code", "status"), [("", 0), ("raise SystemExit(3)", 1)])
def test_the_exit_status_says_whether_a_piece_failed(tmp_path, monkeypatch, signals, code, status):
    monkeypatch.setattr(command, "chosen_pieces", lambda *_: [facts(), piece("a", code)])
    assert command.main(["--folder", str(tmp_path / "results")]) == status


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.own_process
def test_ctrl_c_keeps_what_there_is_and_the_next_call_goes_on(
    tmp_path, monkeypatch, capsys, number
):
    pid, runs, results = tmp_path / "pid", tmp_path / "runs", tmp_path / "results"
    pieces = [facts(), counted("first", runs), piece("slow", STARTS_A_CHILD.format(path=str(pid)))]
    monkeypatch.setattr(command, "chosen_pieces", lambda *_: [*pieces, piece("last")])

    def interrupt():
        wait_for(lambda: pid.is_file() and pid.read_text())
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert command.main(["--folder", str(results)]) == 128 + number
    thread.join()
    wait_for(lambda: not is_alive(int(pid.read_text())))
    assert "slow       interrupted" in capsys.readouterr().out
    kept = {p["name"]: p for p in json.loads((results / "summary.json").read_text())["pieces"]}
    assert {name: found["status"] for name, found in kept.items()} == {
        "facts": "ok",
        "first": "ok",
        "slow": "interrupted",
    }
    pieces[2] = piece("slow")
    assert command.main(["--folder", str(results)]) == 0
    assert runs.read_text() == "x"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["nothing"], "unknown piece or group 'nothing'; known: first, "),
        (["--wheels", "nowhere"], "--wheels nowhere: no such folder"),
        (["--seconds", "0"], "--seconds 0.0: give a number above 0"),
        (["--seconds", "nan"], "--seconds nan: give a number above 0"),
        (["--memory", "-1"], "--memory -1: give a whole number of GiB, 0 for none"),
    ],
)
def test_wrong_values_are_said_in_a_line(tmp_path, monkeypatch, capsys, flags, said):
    monkeypatch.chdir(tmp_path)
    assert command.main(flags) == command.EXIT_USAGE
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_piece_brings_what_it_needs():
    assert [p.name for p in chosen_pieces(["smoke"], 0)] == ["facts", "install", "build", "smoke"]
    assert [p.name for p in chosen_pieces(["mappings"], 0)] == ["facts", "mappings"]
    everything = [p.name for p in chosen_pieces([], 0)]
    assert everything == [p.name for p in PIECES if p.name != "memory"]
    # Memory that shows once it is used is touched before anything asks how much is free.
    assert [p.name for p in chosen_pieces(["calibrate"], 100)][:2] == ["facts", "memory"]
    grouped = [p.name for group in GROUPS for p in PIECES if p.group == group]
    assert {*grouped, "facts", "install", "build", "memory"} == set(BY_NAME)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("name", BY_NAME)
def test_every_piece_has_a_command_that_exists(tmp_path, name, small):
    setting = Setting(ROOT, tmp_path, tmp_path / "site", tmp_path, small, 300.0, 8)
    dash_m, module, *arguments = BY_NAME[name].arguments(setting)
    assert dash_m == "-m"
    if module.startswith(("benchmarks", "deep_optimizer_states")):
        path = module.replace(".", "/")
        folders = (ROOT, ROOT / "src")
        found = [f / f"{path}{end}" for f in folders for end in (".py", "/__main__.py")]
        assert any(file.is_file() for file in found)
    if module.endswith(".rows"):
        _, study, sweep, seconds = arguments
        assert sweep in sweep_names(load_study(study))
        assert 0 < float(seconds) < setting.limit_s


def test_the_driver_runs_before_any_package_is_installed():
    # -S leaves out site-packages, and -I the environment's own paths.
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import benchmarks.gpu_check.__main__"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
