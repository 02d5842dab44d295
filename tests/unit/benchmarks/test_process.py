"""Processes end in time, with all they started, and say why."""

import subprocess

import pytest
from processes import is_alive, wait_for

from benchmarks.process import explain_status, run_python


def test_status_comes_back(tmp_path):
    assert run_python(["-c", "raise SystemExit(3)"], tmp_path / "log", 3600) == 3


STARTS_A_CHILD = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize(("seconds", "limit_s", "status"), [("3600", 0.1, None), ("0", 3600, 0)])
def test_what_a_process_started_ends_with_it(tmp_path, monkeypatch, seconds, limit_s, status):
    pid_path = tmp_path / "child pid"

    class SlowToStart(subprocess.Popen):
        """Whose limit does not run before its child is there."""

        def wait(self, timeout=None):
            wait_for(lambda: pid_path.exists() and pid_path.read_text())
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", SlowToStart)
    command = ["-c", STARTS_A_CHILD, str(pid_path), seconds]
    assert run_python(command, tmp_path / "log", limit_s) == status
    wait_for(lambda: not is_alive(int(pid_path.read_text())))


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
