import signal

import pytest

from launch.outcome import judge
from launch.supervise import Ending

TORCHRUN = [
    "[rank1]: Traceback (most recent call last):",
    "[rank1]: RuntimeError: the real reason",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "  exitcode  : 1 (pid: 4711)",
]


def status(exit_code, lines=(), *, has_ended=False, **ending):
    return judge(Ending(exit_code, 12.3456, **ending), list(lines), has_ended)


def test_a_run_is_ok_when_it_left_with_0_and_wrote_its_end():
    got = status(0, has_ended=True)
    assert (got.status, got.exit_code, got.seconds, got.cause) == ("ok", 0, 12.346, "")


def test_exit_code_0_without_an_end_is_a_failure():
    got = status(0)
    assert (got.status, got.exit_code) == ("failed", 1)
    assert "'end'" in got.cause


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_has_the_shells_exit_code(number):
    got = status(1, TORCHRUN, stop_signal=number)
    assert (got.status, got.exit_code) == ("interrupted", 128 + number)
    assert number.name in got.cause


def test_a_run_that_was_done_when_the_signal_came_is_ok():
    assert status(0, has_ended=True, stop_signal=signal.SIGINT).status == "ok"


def test_timeout_beats_the_signal_it_was_ended_with():
    got = status(137, timed_out=True)
    assert (got.status, got.exit_code) == ("timeout", 124)


@pytest.mark.parametrize(
    ("exit_code", "line", "expected"),
    [
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.", "oom-device"),
        (1, "RuntimeError: CUDA error: out of memory", "oom-device"),
        (1, "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", "oom-host"),
        (1, "MemoryError", "oom-host"),
        (134, "terminate called after throwing an instance of 'std::bad_alloc'", "oom-host"),
        (137, "anything", "oom-host"),
        (1, "  exitcode  : -9 (pid: 77)", "oom-host"),
        (1, "no MemoryError was seen in the text", "failed"),
    ],
)
def test_memory_is_recognised(exit_code, line, expected):
    assert status(exit_code, [line]).status == expected


def test_sigkill_is_explained():
    assert "out-of-memory killer" in status(137).cause


def test_the_cause_is_the_ranks_error_and_not_the_launchers():
    assert status(1, TORCHRUN).cause == "RuntimeError: the real reason"
    assert status(139).cause == "ended by SIGSEGV"
    assert status(5, ["words"]).cause == "exit code 5"
