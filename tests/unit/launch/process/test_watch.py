import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from processes import wait_for

from launch.process import watch as module
from launch.process.watch import OomKills, ProgressWatch, add_note, catches, dump_stacks


class Clock:
    def __init__(self):
        self.now = 1000.0

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
    """Let time pass in the supervisor's steps; the stall, if one is seen."""
    for _ in range(int(seconds)):
        clock.now += 1.0
        if stall := watch.look():
            return stall
    return None


def test_before_the_first_iteration_there_is_half_an_hour(files, clock):
    watch = ProgressWatch(*files, None, clock)
    append(files[0], "compiling\n")
    assert silence(watch, clock, 1790) is None
    stall = silence(watch, clock, 20)
    assert (round(stall.idle_s), stall.limit_s, stall.iterations) == (1800, 1800.0, 0)
    assert "no iteration yet" in stall.describe()


@pytest.mark.parametrize("which", [0, 1])
def test_growth_of_either_file_is_a_heartbeat(files, clock, which):
    watch = ProgressWatch(*files, 10.0, clock)
    for _ in range(5):
        append(files[which], "x")
        assert silence(watch, clock, 8) is None
    assert silence(watch, clock, 3) is not None


def test_fast_iterations_leave_five_minutes(files, clock):
    watch = ProgressWatch(*files, None, clock)
    append(files[1], iteration(1, 900.0) + iteration(2, 100.0))
    assert silence(watch, clock, 295) is None
    stall = silence(watch, clock, 10)
    assert (stall.limit_s, stall.iterations) == (300.0, 2)
    assert stall.describe() == "no progress for 300 s (limit 300 s) after iteration 2"


def test_slow_iterations_leave_twenty_times_the_slowest(files, clock):
    watch = ProgressWatch(*files, None, clock)
    append(files[1], iteration(1, 40_000.0) + iteration(2, 30_000.0))
    assert silence(watch, clock, 790) is None
    assert silence(watch, clock, 15).limit_s == 800.0


def test_without_metrics_the_iterations_of_the_log_count(tmp_path, clock):
    log = tmp_path / "a.log"
    watch = ProgressWatch(log, None, None, clock)
    append(log, " iteration 1/ 5 | elapsed time per iteration (ms): 20000.0 | lm loss: 9\n")
    assert silence(watch, clock, 390) is None
    stall = silence(watch, clock, 20)
    assert (stall.limit_s, stall.iterations) == (400.0, 1)


def test_a_given_limit_holds_from_the_start_and_0_is_none(files, clock):
    assert silence(ProgressWatch(*files, 5.0, clock), clock, 4) is None
    assert silence(ProgressWatch(*files, 5.0, clock), clock, 6) is not None
    assert silence(ProgressWatch(*files, 0.0, clock), clock, 10_000) is None


def test_time_in_which_the_launcher_itself_was_stopped_is_no_silence(files, clock):
    watch = ProgressWatch(*files, 60.0, clock)
    clock.now += 7200.0
    assert watch.look() is None
    assert silence(watch, clock, 50) is None
    assert silence(watch, clock, 12) is not None


def test_a_line_that_arrives_in_parts_is_one_iteration(files, clock):
    watch = ProgressWatch(*files, None, clock)
    line = iteration(1, 100.0)
    append(files[1], line[:20])
    silence(watch, clock, 1)
    append(files[1], line[20:])
    assert silence(watch, clock, 310).iterations == 1


@pytest.mark.parametrize(
    "line", ["\x00\xff", "[1]", "{", '{"event": "start"}', '{"event": "iteration"}']
)
def test_odd_lines_are_growth_and_nothing_else(files, clock, line):
    watch = ProgressWatch(*files, None, clock)
    append(files[1], line + "\n")
    stall = silence(watch, clock, 1810)
    assert stall.limit_s in (300.0, 1800.0)
    assert stall.iterations == int("iteration" in line)


def test_what_a_log_held_before_is_not_this_runs(files, clock):
    append(files[0], "elapsed time per iteration (ms): 90000.0\n")
    watch = ProgressWatch(*files, None, clock)
    assert silence(watch, clock, 1810).iterations == 0


def test_of_a_huge_growth_the_end_is_read(files, clock, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 1000)
    watch = ProgressWatch(*files, None, clock)
    append(files[0], "elapsed time per iteration (ms): 1.0\n" + "x" * 5000 + "\n")
    append(files[0], "elapsed time per iteration (ms): 50000.0\n")
    assert silence(watch, clock, 1100).limit_s == 1000.0


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


def test_the_stacks_of_all_threads_are_in_the_log(start):
    begin, log = start
    process = begin("-c", ANSWERS, environment={"RANK": "3"})
    dump_stacks([process], log)
    text = wait_for(lambda: "in stuck_here" in (text := log.read_text()) and text)
    # Whether it already sleeps or still runs towards that is the scheduler's affair.
    head = re.search(rf"\[launch\] process {process.pid} \(rank 3\): state \w \([\w -]+\)", text)
    assert head, text
    assert head.start() < text.index("in stuck_here")
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
    monkeypatch.setattr(module, "ANSWER_S", 0.3)
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


@pytest.fixture
def roots(tmp_path):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "proc", tmp_path / "cgroup"


def put(path, count):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"low 0\noom 4\noom_kill {count}\noom_group_kill 0\n")


CASES = {
    "version 2": ("0::/slurm/job_7", "slurm/job_7/memory.events"),
    "version 2 seen from its container": ("0::/kubepods/x", "memory.events"),
    "version 1": ("9:cpu,memory:/job\n0::/", "memory/job/memory.oom_control"),
    "version 1 of several hierarchies": (
        "7:cpu:/other\n4:memory:/job",
        "memory/job/memory.oom_control",
    ),
    "version 1 seen from its container": ("4:memory:/docker/x", "memory/memory.oom_control"),
}


@pytest.mark.parametrize("case", CASES)
def test_kills_of_the_own_control_group_count(roots, case):
    proc, cgroups = roots
    line, file = CASES[case]
    (proc / "self" / "cgroup").write_text(line + "\n")
    others = (proc / "vmstat", cgroups / "memory" / "other" / "memory.oom_control")
    for path in others:
        put(path, 100)
    put(cgroups / file, 3)
    kills = OomKills(proc, cgroups)
    for path in others:
        put(path, 150)  # somebody else's on the same machine
    assert kills.since() == 0
    put(cgroups / file, 5)
    assert kills.since() == 2


def test_without_a_group_the_machines_count(roots):
    put(roots[0] / "vmstat", 1)
    kills = OomKills(*roots)
    put(roots[0] / "vmstat", 2)
    assert kills.since() == 1


def test_where_nothing_can_be_read_nothing_is_said(roots):
    assert OomKills(*roots).since() is None


def test_this_kernel_counts_no_kill_in_between():
    assert OomKills().since() in (None, 0)
