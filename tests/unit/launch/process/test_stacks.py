import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from processes import wait_for

from launch.process import stacks
from launch.process.stacks import add_note, catches, dump_stacks

ROOT = Path(__file__).resolve().parents[4]
ANSWERS = """
import faulthandler, signal, threading, time
faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
def waits_for_ever(): time.sleep(600)
threading.Thread(target=waits_for_ever, daemon=True).start()
def stuck_here(): print("begun", flush=True); time.sleep(600)
stuck_here()
"""
PLAIN = "import time; print('begun', flush=True); time.sleep(600)"


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts Python code or a command with its output in a log; ends it after the test."""
    monkeypatch.setattr(stacks, "ANSWER_S", 3600.0)
    started = []
    log = tmp_path / "a.log"

    def begin(*command, environment=None, until="begun"):
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, *command],
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
            )
        started.append(process)
        wait_for(lambda: until in log.read_text())
        return psutil.Process(process.pid)

    yield begin, log
    for process in started:
        process.kill()
        process.wait()


def test_the_stacks_of_all_threads_are_in_the_log(start):
    begin, log = start
    process = begin("-c", ANSWERS, environment={"RANK": "3"})
    dump_stacks([process], log)
    text = wait_for(lambda: "in stuck_here" in (text := log.read_text()) and text)
    head = f"[launch] process {process.pid} (rank 3): state S (sleeping)"
    assert head in text
    assert text.index(head) < text.index("in stuck_here")
    assert "in waits_for_ever" in text
    assert process.is_running()


def test_who_does_not_expect_the_signal_does_not_get_it(start):
    begin, log = start
    process = begin("-c", PLAIN)
    assert not catches(process.pid, signal.SIGUSR1)
    dump_stacks([process], log)
    assert process.is_running()
    assert f"process {process.pid} (python" in log.read_text()
    assert "its Python stacks" not in log.read_text()


def test_of_a_stopped_process_the_state_is_noted_without_waiting(start):
    begin, log = start
    process = begin("-c", ANSWERS)
    process.suspend()
    wait_for(lambda: process.status() == psutil.STATUS_STOPPED)
    dump_stacks([process], log)
    assert "state T (stopped)" in log.read_text()
    assert "cannot show its stacks" in log.read_text()


def test_no_answer_is_noted(start, monkeypatch):
    begin, log = start
    monkeypatch.setattr(stacks, "ANSWER_S", 0.3)
    code = "import signal; signal.signal(signal.SIGUSR1, lambda n, f: None)\n" + PLAIN
    dump_stacks([begin("-c", code)], log)
    assert "no answer within" in log.read_text()


def test_a_process_that_has_gone_is_no_error(start):
    begin, log = start
    process = begin("-c", ANSWERS)
    process.kill()
    process.wait()
    dump_stacks([process], log)
    assert f"process {process.pid} (gone)" in log.read_text()


def test_the_trainer_answers(start, tmp_path):
    begin, log = start
    fifo = tmp_path / "run.json"
    os.mkfifo(fifo)  # reading it waits for a writer who never comes
    log.write_text("begun")
    process = begin("-m", "launch.pretrain_gpt", str(fifo))
    wait_for(lambda: catches(process.pid, signal.SIGUSR1))
    wait_for(lambda: dump_stacks([process], log) or "in read_run_file" in log.read_text())
    assert process.is_running()


def test_a_note_that_cannot_be_written_is_no_error(tmp_path):
    add_note(Path("/dev/full"), "text")
    add_note(tmp_path, "a folder")
