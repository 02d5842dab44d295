import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from processes import wait_for

from configs.files import ROOT
from launch.process import watch as module
from launch.process.watch import (
    GrowingFile,
    ProgressWatch,
    add_note,
    catches,
    count_oom_kills,
    dump_stacks,
    duration_text,
)


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def files(tmp_path):
    return tmp_path / "a.log", tmp_path / "metrics.jsonl"


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def iteration(number, milliseconds):
    event = {"event": "iteration", "iteration": number, "iteration_ms": milliseconds}
    return json.dumps(event) + "\n"


def silence(watch, clock, seconds):
    """Let time pass in the supervisor's steps; the stall in words, if one is seen."""
    for _ in range(int(seconds)):
        clock.now += 1.0
        if watch.look():
            return watch.stall
    return ""


LINE = " iteration 1/ 5 | elapsed time per iteration (ms): {} | lm loss: 9\n"


@pytest.mark.parametrize(
    ("log", "metrics", "limit", "after"),
    [
        ("compiling\n", "", 1800, "its start, no iteration yet"),
        ("", iteration(1, 900.0) + iteration(2, 100.0), 300, "iteration 2"),
        ("", iteration(1, 40_000.0) + iteration(2, 30_000.0), 800, "iteration 2"),
        (LINE.format(20_000.0), "", 400, "iteration 1"),
        ("", "\x00\xff\n[1]\n{\n", 1800, "its start, no iteration yet"),
        ("", '{"event": "start"}\n', 1800, "its start, no iteration yet"),
        ("", '{"event": "iteration"}\n', 300, "iteration 1"),
    ],
)
def test_a_silence_may_last_as_long_as_the_run_so_far_makes_likely(
    files, clock, log, metrics, limit, after
):
    watch = ProgressWatch(*files, None, clock)
    append(files[0], log)
    append(files[1], metrics)
    assert silence(watch, clock, limit - 10) == ""
    assert silence(watch, clock, 20) == f"no progress for {limit} s (limit {limit} s) after {after}"


@pytest.mark.parametrize("which", [0, 1])
def test_growth_of_either_file_is_a_heartbeat(files, clock, which):
    watch = ProgressWatch(*files, 10.0, clock)
    for _ in range(5):
        append(files[which], "x")
        assert not silence(watch, clock, 8)
    assert silence(watch, clock, 3)


def test_a_given_limit_holds_from_the_start_and_0_is_none(files, clock):
    assert not silence(ProgressWatch(*files, 5.0, clock), clock, 4)
    assert silence(ProgressWatch(*files, 5.0, clock), clock, 6)
    assert not silence(ProgressWatch(*files, 0.0, clock), clock, 10_000)


def test_time_in_which_the_launcher_itself_was_stopped_is_no_silence(files, clock):
    watch = ProgressWatch(*files, 60.0, clock)
    clock.now += 7200.0
    assert not watch.look()
    assert not silence(watch, clock, 50)
    assert silence(watch, clock, 12)


def test_what_a_log_held_before_is_not_this_runs(files, clock):
    append(files[0], LINE.format(90_000.0))
    watch = ProgressWatch(*files, None, clock)
    assert silence(watch, clock, 1810).endswith("no iteration yet")


def test_of_a_huge_growth_the_end_is_read(files, clock, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 1000)
    watch = ProgressWatch(*files, None, clock)
    append(files[0], LINE.format(1.0) + "x" * 5000 + "\n" + LINE.format(50_000.0))
    assert "limit 1000 s" in silence(watch, clock, 1100)


def test_a_growing_file_is_read_piece_by_piece(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = GrowingFile(path)
    assert file.new_lines() == []
    path.write_text("whole\nha")
    assert file.new_lines() == [b"whole"]
    append(path, "lf\n")
    assert file.new_lines() == [b"half"]


def test_each_state_of_a_progress_bar_is_a_line(tmp_path):
    """Or the bar would be read again at every look until it ends."""
    path = tmp_path / "a.log"
    file = GrowingFile(path)
    path.write_bytes(b"1%\r2%\r")
    assert file.new_lines() == [b"1%", b"2%"]
    append(path, "3%\r\nnext\r\n")
    assert file.new_lines() == [b"3%", b"next"]


def test_of_a_line_without_an_end_the_end_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 1000)
    path = tmp_path / "a.log"
    file = GrowingFile(path)
    for _ in range(20):
        append(path, "x" * 900)
        assert file.new_lines() == []
    append(path, "end\n")
    (line,) = file.new_lines()
    assert len(line) == 1003
    assert line.endswith(b"xend")


PLAIN = "import time; print('begun', flush=True); time.sleep(600)"


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts Python code or a command with its output in a log; ends it after the test."""
    monkeypatch.setattr(module, "ANSWER_S", 3600.0)
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


def test_who_does_not_expect_the_signal_does_not_get_it(start):
    begin, log = start
    process = begin("-c", PLAIN)
    assert not catches(process.pid, signal.SIGUSR1)
    dump_stacks([process], log)
    assert process.is_running()
    assert f"process {process.pid} (python" in log.read_text()
    assert "its Python stacks" not in log.read_text()


def test_no_answer_is_noted_and_a_process_that_has_gone_is_no_error(start, monkeypatch):
    begin, log = start
    monkeypatch.setattr(module, "ANSWER_S", 0.3)
    code = "import signal; signal.signal(signal.SIGUSR1, lambda n, f: None)\n" + PLAIN
    process = begin("-c", code)
    dump_stacks([process], log)
    assert "no answer within" in log.read_text()
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


@pytest.mark.parametrize(
    ("text", "count"), [("pgfault 9\noom_kill 3\nswap 1\n", 3), ("pgfault 9\n", None), ("", None)]
)
def test_the_kernels_count_of_killed_processes(tmp_path, text, count):
    (tmp_path / "vmstat").write_text(text)
    assert count_oom_kills(tmp_path) == count
    assert count_oom_kills(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.4, "8 s"), (89, "89 s"), (720, "12 min"), (12_000, "3 h 20 min")]
)
def test_durations_have_a_unit_that_fits(seconds, text):
    assert duration_text(seconds) == text
