"""From how a command ended, and what its log says, to the status of a run."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from launch.run_folder import Status
from launch.supervise import Ending

TIMEOUT_EXIT_CODE = 124
"""As coreutils' ``timeout`` has it."""

_OOM_DEVICE = re.compile(r"(?:CUDA|HIP) out of memory|CUDA error: out of memory")
_OOM_HOST = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)"
    r"|^(?:\[rank\d+\]:\s*)?MemoryError\b|std::bad_alloc|Cannot allocate memory"
)
_SIGKILL = re.compile(r"exitcode\s*:\s*-9\b|Signal 9 \(SIGKILL\)|exits with return code = -9\b")
_ERROR = re.compile(r"^(?:\[rank\d+\]:\s*)?([A-Za-z_][\w.]*(?:Error|Exception|Exit)\b.*)$")
_LAUNCHERS_OWN = "ChildFailedError"


def judge(ending: Ending, log_lines: Sequence[str], has_ended: bool) -> Status:
    """Status of a run.

    Args:
        ending: how the ranks' command ended.
        log_lines: the log's end; enough lines for the ranks' own errors.
        has_ended: whether the trainer wrote its last metrics line. Exit code 0 without it is a
            failure: a run that trained nothing must not pass for a good one.
    """
    seconds = round(ending.seconds, 3)
    if ending.exit_code == 0 and has_ended:
        return Status("ok", 0, seconds)
    if ending.stop_signal is not None:
        name = signal.Signals(ending.stop_signal).name
        return Status("interrupted", 128 + ending.stop_signal, seconds, f"stopped by {name}")
    if ending.timed_out:
        cause = f"not done after {ending.seconds:.0f} s; ended by --timeout"
        return Status("timeout", TIMEOUT_EXIT_CODE, seconds, cause)
    if ending.exit_code == 0:
        return Status("failed", 1, seconds, "exit code 0, but metrics.jsonl has no 'end' line")
    status, cause = _failure(ending.exit_code, log_lines)
    return Status(status, ending.exit_code, seconds, cause)


def _failure(exit_code: int, log_lines: Sequence[str]) -> tuple[str, str]:
    for status, pattern in (("oom-device", _OOM_DEVICE), ("oom-host", _OOM_HOST)):
        line = next((line for line in log_lines if pattern.search(line)), None)
        if line is not None:
            return status, line.strip()
    by_signal = exit_code - 128
    if by_signal == signal.SIGKILL or any(_SIGKILL.search(line) for line in log_lines):
        return "oom-host", "killed by SIGKILL; probably the kernel's out-of-memory killer"
    if by_signal in signal.valid_signals():
        return "failed", f"ended by {signal.Signals(by_signal).name}"
    errors = [match[1] for line in log_lines if (match := _ERROR.match(line))]
    own = [error for error in errors if _LAUNCHERS_OWN not in error]
    return "failed", own[-1] if own else f"exit code {exit_code}"
