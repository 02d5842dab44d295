import signal

import pytest

from launch.process.outcome import judge
from launch.process.supervise import Ending

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


@pytest.mark.parametrize(("word", "code"), [("timeout", 124), ("hang", 124), ("failed", 137)])
def test_the_reason_for_which_we_ended_a_run_beats_its_signal_and_its_words(word, code):
    got = status(137, ["ValueError: later"], given_up=(word, "why"))
    assert (got.status, got.exit_code, got.cause) == (word, code, "why")


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
        (1, "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8 GiB", "oom-host"),
        (1, "[rank1]: deep_optimizer_states.errors.HostMemoryError: the state needs", "oom-host"),
        (1, "RuntimeError: cudaHostAlloc failed with error 2", "oom-host"),
        (1, "torch.OutOfMemoryError: XPU out of memory", "failed"),
        (1, "no MemoryError was seen in the text", "failed"),
    ],
)
def test_memory_is_recognised(exit_code, line, expected):
    assert status(exit_code, [line]).status == expected


def test_cuda_out_of_page_locked_memory_is_the_hosts():
    lines = [
        '  File "deepspeed/runtime/zero/stage3.py", line 9, in _create',
        "    return tensor.pin_memory()",
        "RuntimeError: CUDA error: out of memory",
    ]
    got = status(1, lines)
    assert got.status == "oom-host"
    assert "CUDA error: out of memory" in got.cause
    assert status(1, [lines[1], *["x"] * 40, lines[2]]).status == "oom-device"


@pytest.mark.parametrize(
    ("kills", "name", "words"),
    [
        (1, "oom-host", "by the kernel's out-of-memory killer"),
        (0, "failed", "killed by SIGKILL from outside (no out-of-memory kill was counted)"),
        (None, "oom-host", "probably"),
    ],
)
@pytest.mark.parametrize(
    ("exit_code", "lines"), [(137, []), (1, ["Root Cause (first observed):", "  exitcode  : -9"])]
)
def test_sigkill_is_judged_by_the_kernels_count(kills, name, words, exit_code, lines):
    got = status(exit_code, lines, oom_kills=kills)
    assert got.status == name
    assert words in got.cause


def test_a_rank_that_torchrun_killed_is_not_the_cause():
    lines = [
        "[rank0]: ValueError: the real reason",
        "Failures:",
        "  exitcode  : -9 (pid: 12)",
        "Root Cause (first observed failure):",
        "  exitcode  : 1 (pid: 11)",
        "  traceback : exitcode  : -9",
    ]
    assert status(1, lines, oom_kills=0).cause == "ValueError: the real reason"


def test_a_full_disk_is_a_failure_that_says_so():
    line = "OSError: [Errno 28] No space left on device"
    assert status(1, [line]).cause == f"a disk is full: {line}"
    got = judge(Ending(1, 1.0), [], False, disk_is_full=True)
    assert got.cause == "the disk of the results folder is full (exit code 1)"
    assert judge(Ending(1, 1.0), [line], False, disk_is_full=True).cause.count("full") == 1
    assert judge(Ending(0, 1.0), [], True, disk_is_full=True).status == "ok"


def test_the_cause_is_the_ranks_error_and_not_the_launchers():
    assert status(1, TORCHRUN).cause == "RuntimeError: the real reason"
    assert status(139).cause == "ended by SIGSEGV"
    assert status(5, ["words"]).cause == "exit code 5"
    assert status(2, ["pretrain_gpt: error: x"]).cause == "pretrain_gpt: error: x"
