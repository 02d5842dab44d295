import os
import subprocess
import sys

import psutil
import pytest
from processes import wait_for

from launch.process import members as module
from launch.process.members import TOKEN_VARIABLE, Members, end_leftovers, mark, new_token

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def leftover():
    """A process of a run whose driver is gone, and the run's token."""
    token = new_token()
    process = subprocess.Popen(SLEEP, env=mark(os.environ, token), start_new_session=True)
    yield process, token
    process.kill()
    process.wait()


def test_leftovers_are_found_by_the_token_alone_and_ended(leftover, sleeper):
    process, token = leftover
    assert end_leftovers(token) == [process.pid]
    assert process.wait() == -15
    assert sleeper.poll() is None
    assert end_leftovers(token) == []


def test_a_stopped_leftover_is_ended_without_waiting_for_the_grace(leftover, monkeypatch):
    monkeypatch.setattr(module, "GRACE_S", 3600.0)
    process, token = leftover
    stopped = psutil.Process(process.pid)
    stopped.suspend()
    wait_for(lambda: stopped.status() == psutil.STATUS_STOPPED)
    end_leftovers(token)
    assert process.wait() == -15


@pytest.mark.parametrize("token", ["", ":", "x", "*", "0" * 31, "../../etc"])
def test_what_is_no_token_ends_nothing(leftover, sleeper, monkeypatch, token):
    # Whatever breaks, this test can reach no process but its own two.
    own = [psutil.Process(leftover[0].pid), psutil.Process(sleeper.pid)]
    monkeypatch.setattr(psutil, "process_iter", lambda: own)
    assert end_leftovers(token) == []
    assert [process.status() != psutil.STATUS_ZOMBIE for process in own] == [True, True]
    with pytest.raises(ValueError, match="token"):
        Members(token)


def test_a_process_without_any_token_belongs_to_no_run(sleeper, monkeypatch):
    own = [psutil.Process(sleeper.pid)]
    monkeypatch.setattr(psutil, "process_iter", lambda: own)
    members = Members(new_token())
    assert members.all() == []
    members.token = ""  # even so
    assert members.all() == []


def test_tokens_of_outer_runs_stay():
    outer, inner = new_token(), new_token()
    environment = mark(mark({"A": "b"}, outer), inner)
    assert environment == {"A": "b", TOKEN_VARIABLE: f"{outer}:{inner}"}


def test_a_sample_sees_processes_come_and_go(leftover):
    process, token = leftover
    members = Members(token)
    assert [member.pid for member in members.sample()] == [process.pid]
    other = subprocess.Popen(SLEEP, env=mark(os.environ, token))
    try:
        both = {process.pid, other.pid}
        assert wait_for(lambda: {member.pid for member in members.sample()} == both)
    finally:
        other.kill()
        other.wait()
    assert [member.pid for member in members.sample()] == [process.pid]


def test_a_process_that_has_not_loaded_its_program_yet_is_looked_at_again(leftover, monkeypatch):
    process, token = leftover
    members = Members(token)
    answers = iter([False, True])
    monkeypatch.setattr(Members, "_has", lambda self, one: next(answers))
    monkeypatch.setattr(os, "listdir", lambda _: [str(process.pid)])
    born = psutil.Process(process.pid).create_time()
    monkeypatch.setattr(module.time, "time", lambda: born + 0.5)
    assert members.sample() == []
    assert [member.pid for member in members.sample()] == [process.pid]


def test_a_sample_judges_a_process_once(leftover, monkeypatch):
    members = Members(leftover[1])
    members.sample()
    judged = []
    monkeypatch.setattr(Members, "_has", lambda self, process: judged.append(process))
    for _ in range(5):
        members.sample()
    assert len(judged) < len(psutil.pids())  # those that were born meanwhile
