"""Processes end in time, with all they started, and say why."""

import os
import sys
import time

import psutil
import pytest

from benchmarks.process import explain_status, run, run_python


def test_status_comes_back(tmp_path):
    assert run_python(["-c", "raise SystemExit(3)"], tmp_path / "log", 20) == 3


STARTS_A_CHILD = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(float(sys.argv[2]))
"""


def is_gone(pid):
    """Whether a process ends within a few seconds; nobody may be there to take its status."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(("seconds", "status"), [("60", None), ("0", 0)])
def test_what_a_process_started_ends_with_it(tmp_path, seconds, status):
    pid_path = tmp_path / "child pid"
    begin = time.monotonic()
    command = ["-c", STARTS_A_CHILD, str(pid_path), seconds]
    assert run_python(command, tmp_path / "log", 1.5) == status
    assert time.monotonic() - begin < 10
    assert is_gone(int(pid_path.read_text()))


STARTS_A_SESSION = STARTS_A_CHILD.replace('"])', '"], start_new_session=True)')


def test_a_child_with_a_session_of_its_own_ends_too(tmp_path):
    pid_path = tmp_path / "child pid"
    command = ["-c", STARTS_A_SESSION, str(pid_path), "60"]
    assert run_python(command, tmp_path / "log", 1.5) is None
    assert is_gone(int(pid_path.read_text()))


SAYS_WHEN_INTERRUPTED = """
import time
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("what there is", flush=True)
    time.sleep(60)
"""


def test_a_process_may_say_what_there_is_before_it_is_ended(tmp_path):
    command = [sys.executable, "-c", SAYS_WHEN_INTERRUPTED]
    assert run(command, tmp_path / "log", 2.0, os.environ, grace_s=2.0) is None
    assert (tmp_path / "log").read_text() == "what there is\n"


def test_reasons(tmp_path):
    log = tmp_path / "log"
    log.write_text("first\nRuntimeError: broken\n\n")
    assert explain_status(None, 20, log) == "not done after 20 s"
    assert "memory" in explain_status(-9, 20, log)
    assert explain_status(1, 20, log) == "ended with status 1: RuntimeError: broken"
    assert explain_status(-6, 20, log) == "ended by SIGABRT: RuntimeError: broken"


def test_log_holds_what_was_said(tmp_path):
    run_python(["-c", "print('hello')"], tmp_path / "log", 20)
    assert (tmp_path / "log").read_text() == "hello\n"
