"""Processes end in time, with all they started, and say why."""

import os
import subprocess
import sys

import pytest
from processes import is_alive, wait_for

from benchmarks.process import explain_status, run


@pytest.fixture
def limits_begin_when(monkeypatch):
    """``limits_begin_when(first, second)`` makes the first wait for a process begin with ``first``.

    Its second one begins with ``second``, and so on. A process that has ended is not waited for.
    """

    def install(*conditions):
        class Patient(subprocess.Popen):
            num_waits = 0

            def wait(self, timeout=None):
                if self.num_waits < len(conditions):
                    condition = conditions[self.num_waits]
                    self.num_waits += 1
                    wait_for(lambda: self.poll() is not None or condition())
                return super().wait(timeout)

        monkeypatch.setattr(subprocess, "Popen", Patient)

    return install


def run_python(arguments, log, limit_s):
    return run([sys.executable, *arguments], log, limit_s, os.environ, 0.0, log.parent)


def test_status_comes_back(tmp_path):
    assert run_python(["-c", "raise SystemExit(3)"], tmp_path / "log", 3600) == 3


STARTS_A_CHILD = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(float(sys.argv[2]))
"""


STARTS_A_SESSION = STARTS_A_CHILD.replace('"])', '"], start_new_session=True)')


@pytest.mark.parametrize(
    ("code", "seconds", "limit_s", "status"),
    [
        (STARTS_A_CHILD, "3600", 0.1, None),
        (STARTS_A_SESSION, "3600", 0.1, None),
        (STARTS_A_CHILD, "0", 3600, 0),
    ],
)
def test_what_a_process_started_ends_with_it(
    tmp_path, limits_begin_when, code, seconds, limit_s, status
):
    pid_path = tmp_path / "child pid"
    limits_begin_when(lambda: pid_path.exists() and pid_path.read_text())
    command = ["-c", code, str(pid_path), seconds]
    assert run_python(command, tmp_path / "log", limit_s) == status
    wait_for(lambda: not is_alive(int(pid_path.read_text())))


SAYS_WHEN_INTERRUPTED = """
import time
try:
    print("ready", flush=True)
    time.sleep(3600)
except KeyboardInterrupt:
    print("what there is", flush=True)
    time.sleep(3600)
"""


def test_a_process_may_say_what_there_is_before_it_is_ended(tmp_path, limits_begin_when):
    log = tmp_path / "log"
    limits_begin_when(lambda: "ready" in log.read_text(), lambda: "what" in log.read_text())
    command = [sys.executable, "-c", SAYS_WHEN_INTERRUPTED]
    assert run(command, log, 0.1, os.environ, 0.1, tmp_path) is None
    assert log.read_text() == "ready\nwhat there is\n"


def test_reasons(tmp_path):
    log = tmp_path / "log"
    log.write_text("first\nRuntimeError: broken\n\n")
    assert explain_status(None, 20, log) == "not done after 20 s"
    assert "memory" in explain_status(-9, 20, log)
    assert explain_status(1, 20, log) == "ended with status 1: RuntimeError: broken"
    assert explain_status(-6, 20, log) == "ended by SIGABRT: RuntimeError: broken"


def test_log_holds_what_was_said(tmp_path):
    run_python(["-c", "print('hello')"], tmp_path / "log", 3600)
    assert (tmp_path / "log").read_text() == "hello\n"
