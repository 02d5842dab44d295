import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.study import default_study, make_point
from launch import records
from launch.ds_json import deepspeed_config
from launch.identity import code_facts
from launch.records import (
    Driver,
    RunFolder,
    Status,
    create_run_folder,
    decide,
    disk_is_full,
    older as is_older,
    read_records,
    results_of,
    sweep_dir,
)

KEYS = ("point", "setup", 1)


@pytest.fixture
def folder(tmp_path):
    """Makes run folders; each call is a run, the newest last."""
    made = []

    def make(status, repeat=1, setup="setup", point="point", driver=None, provenance=None):
        path = tmp_path / "stem" / f"run-{len(made) + 1:03d}"
        path.mkdir(parents=True)
        made.append(path)
        run = {
            "point": {"name": "n", "engine": "stock", "iterations": 3},
            "point_key": point,
            "setup_key": setup,
            "repeat": repeat,
            "provenance": provenance,
            "log": "log-x.log",
            "started": f"2026-01-01T00:00:{len(made):02d}+00:00",
        }
        (path / "run.json").write_text(json.dumps(run))
        for name in ("log-x.log", "metrics.jsonl"):
            (path / name).touch()
        if status:
            fields = {"status": status, "cause": "because", "seconds": 4.0, "driver": driver}
            (path / "status.json").write_text(json.dumps(fields))
        return path

    make.root = tmp_path
    return make


def ran(folder, again=False, keys=KEYS, writes_metrics=True):
    return decide(keys, read_records(folder.root), again, {}, writes_metrics)


@pytest.mark.parametrize(
    ("before", "why", "again"),
    [
        ([], "", ""),
        (["failed", "ok", "failed"], None, "--again"),
        (["interrupted"], "interrupted before (stem/run-001)", "--again"),
        (["hang"], "hang before (stem/run-001)", "--again"),
    ],
)
def test_what_is_run_after_what_was_run(folder, before, why, again):
    for status in before:
        folder(status)
    done = "done before (stem/run-002)"
    decision = ran(folder)
    assert (decision.run, decision.why) == (why is not None, done if why is None else why)
    decision = ran(folder, again=True)
    assert (decision.run, decision.why) == (True, again)


def facts(code="1", torch="2.13", cores=2):
    files = {"launch/train_loop/loop.py": code, "launch/train_loop/log.py": "1"}
    versions = {"torch": torch, "numpy": "2"}
    return {
        "code": code_facts(files, "settings"),
        "versions": versions,
        "gpus": [],
        "cpu": {"model": "x", "cores_usable": cores},
        "git": {"commit": code},
    }


@pytest.mark.parametrize(
    ("older", "why"),
    [
        (facts(code="0"), "code changed: launch/train_loop/loop.py"),
        (facts(torch="2.12"), "torch was 2.12, is 2.13"),
        (facts(cores=4), "processor changed"),
        (facts(code="0", cores=4), "code changed: launch/train_loop/loop.py; processor changed"),
        (facts() | {"code": code_facts(facts()["code"]["files"], "other")},
         "DeepSpeed's JSON, arguments or variables changed"),
    ],
)  # fmt: skip
def test_a_point_that_is_run_again_says_what_changed(folder, older, why):
    folder("ok", setup="older", provenance=older)
    records = read_records(folder.root)
    decision = decide(KEYS, records, False, facts(), writes_metrics=True)
    assert decision.run
    assert decision.why == f"{why} (since stem/run-001)"
    assert is_older(records[0], "setup", facts()) == why
    assert is_older(records[0], "older", facts()) == ""


def test_other_data_are_the_reason_of_a_new_run(folder):
    folder("ok", point="settings-old")
    decision = ran(folder, keys=("settings-new", "setup", 1))
    assert (decision.run, decision.why) == (True, "data changed (since stem/run-001)")
    assert ran(folder, keys=("other-old", "setup", 1)).why == ""


def test_repeats_and_points_are_told_apart(folder):
    folder("ok", repeat=1)
    assert not ran(folder).run
    assert ran(folder, keys=("point", "setup", 2)).run
    assert ran(folder, keys=("another", "setup", 1)).run


def asdict(driver):
    return dict(vars(driver))


def test_a_run_whose_launcher_lives_is_left_alone(folder):
    folder("running", driver=asdict(Driver.this_process()))
    decision = ran(folder, again=True)
    assert not decision.run
    assert "is running now" in decision.why


@pytest.mark.parametrize("change", [{"pid": None}, {"started": 5.0}])
def test_a_run_whose_launcher_is_gone_is_interrupted(folder, change):
    """Or is another process that has its number by now."""
    if "pid" in change:
        gone = subprocess.Popen([sys.executable, "-c", "pass"])
        gone.wait()
        change = {"pid": gone.pid}
    folder("running", driver=asdict(Driver.this_process()) | change)
    (record,) = read_records(folder.root)
    assert (record.status, record.cause) == ("interrupted", "its launcher is gone without a word")
    assert ran(folder).run


def test_another_machines_run_counts_while_its_files_grow(folder):
    assert socket.gethostname() != "elsewhere"
    path = folder("running", driver=asdict(Driver.this_process()) | {"host": "elsewhere"})
    (record,) = read_records(folder.root)
    assert record.status == "running"
    old = time.time() - 4000
    for file in path.iterdir():
        os.utime(file, (old, old))
    (record,) = read_records(folder.root)
    assert record.status == "interrupted"


@pytest.mark.parametrize("status", [None, ""])
def test_a_run_without_a_status_is_interrupted(folder, status):
    path = folder(status)
    if status == "":
        (path / "status.json").write_text("{tru")
    (record,) = read_records(folder.root)
    assert record.status == "interrupted"


@pytest.mark.parametrize("status", ["ok", "failed"])
def test_a_run_whose_log_is_gone_is_not_done(folder, status):
    whole, path = folder(status), folder("ok")
    assert not ran(folder).run
    (path / "log-x.log").unlink()
    decision = ran(folder)
    if status == "ok":
        assert decision == records.Decision(False, "done before (stem/run-001)", is_done=True)
        (whole / "log-x.log").unlink()
        decision = ran(folder)
    assert (decision.run, decision.why) == (True, "its log is missing (stem/run-002)")
    assert not decision.is_done
    assert path.is_dir()


def test_a_run_without_its_metrics_is_not_done_where_its_trainer_writes_them(folder):
    path = folder("ok")
    (path / "metrics.jsonl").unlink()
    assert not ran(folder, writes_metrics=False).run
    decision = ran(folder)
    assert (decision.run, decision.why) == (True, "its metrics.jsonl is missing (stem/run-001)")


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"point": 3}', '{"point": {}, "point_key": 7}', "\0",
     '{"point": {}, "point_key": "point", "repeat": ["a"]}'],
)  # fmt: skip
def test_damaged_folders_are_passed_over(folder, text):
    folder("ok")
    path = folder("ok")
    (path / "run.json").write_text(text)
    assert len(read_records(folder.root)) == 1


def test_a_folder_is_read_again_when_its_files_change_and_not_before(folder, monkeypatch):
    read, asked = records.read_json, []
    monkeypatch.setattr(records, "read_json", lambda path: asked.append(path) or read(path))
    settled, running = folder("ok"), folder("running")
    for _ in range(4):
        assert [one.status for one in read_records(folder.root)] == ["ok", "interrupted"]
    assert len(asked) == len(set(asked)) == 4
    (running / "status.json").write_text('{"status": "failed"}')
    (settled / "status.json").unlink()
    assert [one.status for one in read_records(folder.root)] == ["interrupted", "failed"]
    assert len(asked) == 8


TINY = make_point({"model": "tiny"})


def test_runs_count_up_and_leave_what_is_there(odd_dir):
    first = create_run_folder(odd_dir, "basic", TINY)
    (first.path / "mine").write_text("kept")
    second = create_run_folder(odd_dir, "basic", TINY)
    assert (first.path.name, second.path.name) == ("run-001", "run-002")
    assert first.path.parent == odd_dir / "basic" / TINY.log_name.removesuffix(".log")
    assert (first.path / "mine").read_text() == "kept"


def test_a_gap_is_not_filled_and_a_file_is_not_replaced(tmp_path):
    stem = create_run_folder(tmp_path, "basic", TINY).path.parent
    (stem / "run-0041").write_text("a file")
    assert create_run_folder(tmp_path, "basic", TINY).path.name == "run-042"


def _make_many(results_dir, barrier, queue):
    barrier.wait()
    queue.put([create_run_folder(results_dir, "s", TINY).path.name for _ in range(30)])


def test_racing_launchers_never_share_a_folder(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(2), context.Queue()
    racers = [context.Process(target=_make_many, args=(tmp_path, barrier, queue)) for _ in range(2)]
    for racer in racers:
        racer.start()
    names = queue.get() + queue.get()
    for racer in racers:
        racer.join()
    assert sorted(names) == [f"run-{n:03d}" for n in range(1, 61)]


@pytest.mark.parametrize("name", ["", "..", "a/b", "a b", ".hidden", "a\n"])
def test_a_sweep_is_the_name_of_one_folder(tmp_path, name):
    with pytest.raises(ConfigError, match="sweep"):
        sweep_dir(tmp_path, name)


def test_a_results_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be made.*--results-dir"):
        create_run_folder(tmp_path / "file", "basic", TINY)


def test_inputs_and_status_follow_the_contract(odd_dir):
    folder = create_run_folder(odd_dir, "basic", TINY)
    keys = {"point_key": "p", "setup_key": "s", "repeat": 2}
    facts = {"data_prefix": "/data/x", "command": ["python"], "provenance": {"git": None}}
    folder.write_inputs(TINY, keys | facts, deepspeed_config(TINY))
    run = json.loads((folder.path / "run.json").read_text())
    assert set(run) == {
        "schema_version",
        "run_id",
        "point",
        "study",
        "point_key",
        "setup_key",
        "repeat",
        "started",
        "log",
        "metrics",
        "data_prefix",
        "command",
        "provenance",
    }
    assert make_point(run["point"]) == TINY
    assert (run["point_key"], run["setup_key"], run["repeat"]) == ("p", "s", 2)
    assert run["log"] == TINY.log_name
    folder.log.write_text("".join(f"line {i}\n\n" for i in range(100)))
    folder.write_status(Status("failed", 3, 1.5, "why"))
    status = json.loads((folder.path / "status.json").read_text())
    assert (status["status"], status["exit_code"], status["cause"]) == ("failed", 3, "why")
    assert status["last_lines"] == [f"line {i}" for i in range(80, 100)]
    assert sorted(path.name for path in folder.path.iterdir()) == sorted(
        ["run.json", "ds_config.json", "status.json", folder.log_name]
    )


def test_losses_and_end_are_read_from_metrics(tmp_path):
    folder = create_run_folder(tmp_path, "basic", TINY)
    assert folder.last_loss() is None
    assert not folder.has_ended()
    folder.metrics.write_text(
        '{"event": "iteration", "loss": 3.0}\n{"event": "iteration", "loss": 2.0}\n'
        '[1]\n\x00\n{"event": "end"}\n{"event": "iter'
    )
    assert folder.last_loss() == 2.0
    assert folder.has_ended()


def test_a_file_system_without_room_is_full(tmp_path):
    assert disk_is_full(Path("/proc"))
    assert not disk_is_full(tmp_path)


def test_a_folder_that_was_removed_is_said_and_survived(tmp_path, capsys):
    got = RunFolder(tmp_path / "gone", "a.log").record_end(Status("ok", 0, 1.0))
    assert got.status == "ok"
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("below", ["", "/deeper"])
def test_a_file_in_the_place_of_the_results_is_named_before_anything_starts(below, tmp_path):
    (tmp_path / "file").touch()
    given = Path(f"{tmp_path}/file{below}")
    with pytest.raises(ConfigError, match=rf"--results-dir {given}: {tmp_path}/file is a file; gi"):
        results_of(given, default_study())
