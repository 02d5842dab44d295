import json

import pytest

from launch.process import growing
from launch.process.progress_watch import ProgressWatch


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
    monkeypatch.setattr(growing, "MOST_BYTES", 1000)
    watch = ProgressWatch(*files, None, clock)
    append(files[0], "elapsed time per iteration (ms): 1.0\n" + "x" * 5000 + "\n")
    append(files[0], "elapsed time per iteration (ms): 50000.0\n")
    assert silence(watch, clock, 1100).limit_s == 1000.0
