"""Runs of several drivers on one machine take turns."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from processes import wait_for

from configs.files import ROOT
from launch.process import machine_lock as module
from launch.process.machine_lock import LOCK_VARIABLE, turn

HOLDER = """
import sys
from launch.process.machine_lock import turn
with turn(print):
    print("mine", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def own_lock(monkeypatch, tmp_path):
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "lock"))
    monkeypatch.setattr(module, "LOOK_S", 0.02)


def lock_path():
    return Path(os.environ[LOCK_VARIABLE])


@pytest.fixture
def holder():
    """Another driver in its turn; it gives it back when its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "mine\n"
        yield process
        process.kill()


def test_the_second_waits_for_the_first_with_one_clear_line(holder):
    said, entered = [], threading.Event()

    def second():
        with turn(said.append):
            entered.set()

    thread = threading.Thread(target=second)
    thread.start()
    wait_for(lambda: said)
    assert not entered.is_set()
    holder.stdin.close()
    thread.join()
    assert entered.is_set()
    (line,) = said
    assert line.startswith("waits for its turn: ")


def test_a_driver_that_is_killed_gives_its_turn_back(holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    said = []
    with turn(said.append):
        assert said == []


@pytest.mark.usefixtures("holder")
def test_share_waits_for_nobody():
    said = []
    with turn(said.append, share=True):
        assert said == []


@pytest.mark.own_process
def test_a_signal_ends_the_wait(holder):
    def interrupt(_line):
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), turn(interrupt):
        pytest.fail("it was not its turn")


def test_the_lock_is_for_every_user():
    before = os.umask(0o077)
    try:
        with turn(print):
            assert lock_path().stat().st_mode & 0o777 == 0o666
    finally:
        os.umask(before)


def test_a_lock_that_cannot_be_had_is_said_and_does_not_stop_the_run(monkeypatch, tmp_path):
    (tmp_path / "elsewhere").symlink_to(tmp_path / "victim")
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "elsewhere"))
    said = []
    with turn(said.append):
        said.append("ran")
    assert len(said) == 2
    assert "would not be noticed" in said[0]
    assert not (tmp_path / "victim").exists()
