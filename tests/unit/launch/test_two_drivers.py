"""Two calls of one sweep in one results folder, on one machine."""

import json
import os
import threading
from dataclasses import replace

import psutil
import pytest
from processes import wait_for

from configs.sweep import load_sweep
from deep_optimizer_states.predict.memory import GIB
from launch import sweep_runner, task as task_module
from launch.execute import execute
from launch.fit import Machine
from launch.process.turn import LOCK_VARIABLE, lock_path
from launch.records.run_folder import Driver
from launch.sweep_runner import Plan, Progress, Request, run_all
from launch.task import RunOptions
from launch.trainers.own import OwnTrainer

BASIC = load_sweep("basic")


@pytest.fixture
def plan(tmp_path, monkeypatch, fake_trainer):
    """The basic sweep on a file of data, with runs ended by the fake trainer."""
    for end in (".bin", ".idx"):
        (tmp_path / f"data{end}").write_bytes(b"tokens")
    monkeypatch.setattr(task_module, "data_prefix", lambda given: str(tmp_path / "data"))
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "lock"))
    trainer = OwnTrainer(module=fake_trainer("ok"))
    points = BASIC.points("tiny", {"device": "cpu"})
    options = RunOptions(tmp_path / "results", BASIC.name, trainer=trainer, monitor_s=0)
    return Plan(BASIC, tuple(points), Machine(20 * GIB), options)


def call_both(plan):
    """Two calls at the same time; how each went."""
    went = []

    def call():
        went.append(run_all(plan, Request()))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return went


def index_of(plan):
    return json.loads((plan.folder / "sweep.json").read_text())


def test_they_share_the_points_and_never_measure_at_once(plan, monkeypatch, capsys):
    now, most = [], []

    def counted(*given):
        now.append(given)
        most.append(len(now))
        try:
            return execute(*given)
        finally:
            now.pop()

    monkeypatch.setattr(sweep_runner, "execute", counted)
    first, second = call_both(plan)
    assert max(most) == 1
    assert first.ok + second.ok == 3 == len(list(plan.folder.glob("*/run-*")))
    assert first.failed == second.failed == 0
    assert [run["status"] for run in index_of(plan)["runs"]] == ["ok"] * 3
    assert "waits for its turn" in capsys.readouterr().out


def set_running(plan, pid):
    """Let a run that is done look as if a process still had it going on."""
    path = next(plan.folder.glob("*/run-001/status.json"))
    done = json.loads(path.read_text())
    started = psutil.Process(pid).create_time()
    driver = vars(replace(Driver.this_process("0" * 32), pid=pid, started=started))
    path.write_text(json.dumps({**done, "status": "running", "driver": driver}))
    return path, done


def test_the_index_of_the_second_has_what_the_first_still_ran(plan, sleeper, capsys):
    run_all(plan, Request())
    path, done = set_running(plan, sleeper.pid)
    went: list[Progress] = []
    thread = threading.Thread(target=lambda: went.append(run_all(plan, Request())))
    thread.start()
    said = []
    wait_for(lambda: said.append(capsys.readouterr().out) or "another call" in "".join(said))
    path.write_text(json.dumps(done))
    thread.join()
    assert (went[0].failed, went[0].skipped) == (0, 3)
    assert {run["status"] for run in index_of(plan)["runs"]} == {"ok"}


def test_a_run_of_its_own_that_could_not_be_recorded_is_not_waited_for(plan):
    run_all(plan, Request())
    set_running(plan, os.getpid())
    assert run_all(plan, Request()).skipped == 3


def test_each_run_says_how_busy_the_machine_was_before(plan):
    run_all(plan, Request())
    for path in plan.folder.glob("*/run-001/run.json"):
        before = json.loads(path.read_text())["provenance"]["before"]
        assert set(before) == {"cpu_percent", "load_1min", "gpu_processes", "busy"}


def test_while_a_run_lasts_its_turn_names_it(plan, monkeypatch):
    seen = []

    def look(*given):
        seen.append(lock_path().read_text().partition(" measures ")[2])
        return execute(*given)

    monkeypatch.setattr(sweep_runner, "execute", look)
    run_all(plan, Request())
    assert seen == [f"basic {point.name}" for point in plan.points]
