import json
import os
import socket
import subprocess
import sys
import time

import pytest

from launch.records.identity import changes, code_facts
from launch.records.ledger import Choice, decide, older as is_older, read_records
from launch.records.run_folder import Driver

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
            "point": {"name": "n", "engine": "vanilla", "iterations": 3},
            "point_key": point,
            "setup_key": setup,
            "repeat": repeat,
            "provenance": provenance,
            "log": "log-x.log",
            "started": f"2026-01-01T00:00:{len(made):02d}+00:00",
        }
        (path / "run.json").write_text(json.dumps(run))
        if status:
            fields = {"status": status, "cause": "because", "seconds": 4.0, "driver": driver}
            (path / "status.json").write_text(json.dumps(fields))
        return path

    make.root = tmp_path
    return make


def ran(folder, choice=Choice.MISSING, keys=KEYS):
    return decide(keys, read_records(folder.root), choice, {})


def test_a_point_never_run_is_run_unless_only_failures_are_asked_for(folder):
    assert ran(folder).run
    assert ran(folder, Choice.RESUME).run
    assert not ran(folder, Choice.RERUN_FAILED).run


def test_a_point_that_is_done_is_not_run_again(folder):
    folder("failed")
    folder("ok")
    for choice in (Choice.MISSING, Choice.RESUME, Choice.RERUN_FAILED):
        decision = ran(folder, choice)
        assert not decision.run
        assert "done before (stem/run-002)" in decision.why
    assert ran(folder, Choice.AGAIN).run


def test_a_later_failure_does_not_undo_a_good_run(folder):
    folder("ok")
    folder("failed")
    assert not ran(folder).run


@pytest.mark.parametrize("status", ["failed", "oom-host", "oom-device", "timeout", "hang"])
def test_failures_stay_on_resume_and_are_tried_again_otherwise(folder, status):
    folder(status)
    assert ran(folder).run
    assert ran(folder, Choice.RERUN_FAILED).run
    decision = ran(folder, Choice.RESUME)
    assert not decision.run
    assert "--rerun-failed" in decision.why


def test_an_interrupted_run_is_done_again_by_every_choice(folder):
    folder("interrupted")
    assert all(ran(folder, choice).run for choice in Choice)


def test_other_code_or_processors_make_it_another_run(folder):
    folder("ok", setup="older")
    assert ran(folder).run
    decision = ran(folder, Choice.RESUME)
    assert not decision.run
    assert "other code, versions or processors" in decision.why


def facts(code="1", torch="2.13", cores=2):
    files = {"launch/trainer/loop.py": code, "launch/trainer/log.py": "1"}
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
        (facts(code="0"), "code changed: launch/trainer/loop.py"),
        (facts(torch="2.12"), "torch was 2.12, is 2.13"),
        (facts(cores=4), "processor changed"),
        (facts(code="0", cores=4), "code changed: launch/trainer/loop.py; processor changed"),
        (facts() | {"code": code_facts(facts()["code"]["files"], "other")},
         "DeepSpeed's JSON, arguments or variables changed"),
    ],
)  # fmt: skip
def test_a_point_that_is_run_again_says_what_changed(folder, older, why):
    folder("ok", setup="older", provenance=older)
    records = read_records(folder.root)
    decision = decide(KEYS, records, Choice.MISSING, facts())
    assert decision.run
    assert decision.why == f"{why} (since stem/run-001; --keep accepts it)"
    kept = decide(KEYS, records, Choice.KEEP, facts())
    assert not kept.run
    assert kept.why.endswith(f"(stem/run-001): {why}")
    assert is_older(records[0], "setup", facts()) == why
    assert is_older(records[0], "older", facts()) == ""


def test_keeping_older_results_runs_what_has_none(folder):
    assert ran(folder, Choice.KEEP).run
    folder("failed", setup="older")
    assert ran(folder, Choice.KEEP).run
    assert ran(folder, Choice.KEEP).why == "failed before (stem/run-001)"


def test_many_changed_files_are_counted():
    many = [code_facts({f"{n}.py": text for n in range(5)}, "") for text in ("1", "2")]
    text = changes({"code": many[0]}, {"code": many[1]})
    assert text == "code changed: 0.py, 1.py, 2.py and 2 more"


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
    decision = ran(folder, Choice.AGAIN)
    assert not decision.run
    assert "is running now" in decision.why


def test_a_run_whose_launcher_is_gone_is_interrupted(folder):
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    dead = asdict(Driver.this_process()) | {"pid": gone.pid}
    folder("running", driver=dead)
    (record,) = read_records(folder.root)
    assert (record.status, record.cause) == ("interrupted", "its launcher is gone without a word")
    assert ran(folder).run


@pytest.mark.parametrize("change", [{"started": 5.0}, {"boot_id": "another"}])
def test_another_process_with_the_same_number_is_not_the_launcher(folder, change):
    folder("running", driver=asdict(Driver.this_process()) | change)
    (record,) = read_records(folder.root)
    assert record.status == "interrupted"


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


@pytest.mark.parametrize("text", ["", "[]", '{"point": 3}', '{"point": {}, "point_key": 7}', "\0"])
def test_damaged_folders_are_passed_over(folder, text):
    folder("ok")
    path = folder("ok")
    (path / "run.json").write_text(text)
    assert len(read_records(folder.root)) == 1
