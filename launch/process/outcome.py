"""From how a command ended, and what its log says, to the status of a run."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from launch.process.supervise import Ending
from launch.records import Status

TIMEOUT_EXIT_CODE = 124
"""As coreutils' ``timeout`` has it; for a run that hung as well."""

_OOM_DEVICE = re.compile(r"(?:CUDA|HIP) out of memory|CUDA error: out of memory")
_OOM_HOST = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)"
    r"|^(?:\[rank\d+\]:\s*)?(?!\S*OutOfMemoryError)[\w.]*MemoryError\b"
    r"|std::bad_alloc|Cannot allocate memory"
    r"|cuda(?:Host(?:Alloc|Register)|MallocHost)\b.*(?i:fail|error|out of memory)"
)
_PINNING = re.compile(r"pin_memory|cudaHost(?:Alloc|Register)|cudaMallocHost|HostAllocator")
"""In a traceback: CUDA says "out of memory" of page-locked host memory too."""
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_SIGKILL = re.compile(r"exitcode\s*:\s*-9\b|Signal 9 \(SIGKILL\)|exits with return code = -9\b")
_ROOT_CAUSE = re.compile(r"^Root Cause\b")
_EXIT_CODE = re.compile(r"exitcode\s*:")
_ERROR = re.compile(
    r"^(?:\[rank\d+\]:\s*)?([A-Za-z_][\w.]*(?:Error|Exception|Exit)\b.*|pretrain_gpt: error: .*)$"
)
_LAUNCHERS_OWN = "ChildFailedError"
_TRACEBACK_LINES = 30


def judge(
    ending: Ending,
    log_lines: Sequence[str],
    has_ended: bool,
    disk_is_full: bool = False,
    end_mark: str = "'end' line in metrics.jsonl",
) -> Status:
    """Return the status of a run.

    Exit code 0 without the trainer's end mark is a failure: a run that trained nothing must not
    pass for a good one. Where the disk is full, the log may lack the reason.
    """
    seconds = round(ending.seconds, 3)
    if ending.exit_code == 0 and has_ended:
        return Status("ok", 0, seconds)
    if ending.stop_signal is not None:
        name = signal.Signals(ending.stop_signal).name
        return Status("interrupted", 128 + ending.stop_signal, seconds, f"stopped by {name}")
    if ending.given_up is not None:
        status, cause = ending.given_up
        code = ending.exit_code or 1 if status == "failed" else TIMEOUT_EXIT_CODE
        return Status(status, code, seconds, cause)
    if ending.exit_code == 0:
        status, cause = "failed", f"exit code 0, but there is no {end_mark}"
    else:
        status, cause = _failure(ending, log_lines)
    if disk_is_full and status == "failed" and not _DISK_FULL.search(cause):
        cause = f"the disk of the results folder is full ({cause})"
    return Status(status, ending.exit_code or 1, seconds, cause)


def _failure(ending: Ending, log_lines: Sequence[str]) -> tuple[str, str]:
    if memory := _memory(log_lines):
        return memory
    if line := _first(_DISK_FULL, log_lines):
        return "failed", f"a disk is full: {line}"
    by_signal = ending.exit_code - 128
    if by_signal == signal.SIGKILL or _rank_was_killed(log_lines):
        return _killed(ending.oom_kills)
    if by_signal in signal.valid_signals():
        return "failed", f"ended by {signal.Signals(by_signal).name}"
    errors = [match[1] for line in log_lines if (match := _ERROR.match(line))]
    own = [error for error in errors if _LAUNCHERS_OWN not in error]
    return "failed", own[-1] if own else f"exit code {ending.exit_code}"


def _memory(log_lines: Sequence[str]) -> tuple[str, str] | None:
    """Status and line of an allocator that had no memory, the device's first."""
    for number, line in enumerate(log_lines):
        if _OOM_DEVICE.search(line):
            before = log_lines[max(0, number - _TRACEBACK_LINES) : number]
            pinned = "CUDA error" in line and any(map(_PINNING.search, before))
            return ("oom-host", f"page-locked memory: {line}") if pinned else ("oom-device", line)
    line = _first(_OOM_HOST, log_lines)
    return ("oom-host", line) if line else None


def _rank_was_killed(log_lines: Sequence[str]) -> bool:
    """Tell whether torchrun or DeepSpeed's launcher says SIGKILL of the rank that ended first.

    torchrun names that rank below "Root Cause"; those it killed itself stand above.
    """
    starts = [number for number, line in enumerate(log_lines) if _ROOT_CAUSE.search(line)]
    if not starts:
        return any(_SIGKILL.search(line) for line in log_lines)
    code = _first(_EXIT_CODE, log_lines[starts[-1] :])
    return bool(_SIGKILL.search(code))


def _killed(oom_kills: int | None) -> tuple[str, str]:
    if oom_kills is None:
        return "oom-host", "killed by SIGKILL; probably the kernel's out-of-memory killer"
    if oom_kills:
        return "oom-host", f"killed by the kernel's out-of-memory killer ({oom_kills} counted)"
    return "failed", "killed by SIGKILL from outside (no out-of-memory kill was counted)"


def _first(pattern: re.Pattern[str], lines: Sequence[str]) -> str:
    return next((line.strip() for line in lines if pattern.search(line)), "")
