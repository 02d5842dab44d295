"""What the processes of a hung run do: their Python stacks, or what the kernel says, in the log.

The trainer answers SIGUSR1 with the stacks of all its threads. SIGUSR1 ends a process that does not
expect it, so it goes only to those that the kernel says catch it.
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from launch.process.members import POLL_S, proc_text, process_name

NOTE = "[launch] "
"""How every line begins that the launcher adds to a run's log."""
ANSWER_S = 2.0
"""Seconds a process has to begin its answer."""
QUIET_S = 0.2
"""Seconds without a new byte after which an answer is whole."""

_CANNOT_ANSWER = "TtDZX"
"""States of a process that runs no handler: stopped, traced, uninterruptible, dead."""


def add_note(log: Path, text: str) -> None:
    """Append a line of the launcher's own; a full disk loses it and nothing else."""
    with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as file:
        file.write(f"{NOTE}{text}\n")


def dump_stacks(processes: Iterable[psutil.Process], log: Path) -> None:
    """Let each process write its stacks to the log, one after the other.

    Args:
        processes: members of one run whose output goes to ``log``.
        log: where the states of the processes and what does not answer are noted.
    """
    for process in processes:
        state = _status_field(process.pid, "State") or "unknown"
        channel = proc_text(process.pid, "wchan")
        waits = f", waits in {channel}" if channel not in ("", "0") else ""
        head = f"{process_name(process)}: state {state}{waits}"
        if state[0] in _CANNOT_ANSWER:
            add_note(log, f"{head}; it cannot show its stacks")
        elif not catches(process.pid, signal.SIGUSR1):
            add_note(log, head)
        else:
            add_note(log, f"{head}; its Python stacks:")
            _ask(process, log)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal; False when nobody can say."""
    mask = _status_field(pid, "SigCgt")
    return bool(mask) and bool(int(mask, 16) >> (number - 1) & 1)


def _ask(process: psutil.Process, log: Path) -> None:
    size = log.stat().st_size
    try:
        process.send_signal(signal.SIGUSR1)
    except psutil.Error:
        return
    asked = time.monotonic()
    grown = None
    while True:
        time.sleep(POLL_S)
        now = time.monotonic()
        if (new_size := log.stat().st_size) != size:
            size, grown = new_size, now
        if grown is not None and now - grown > QUIET_S:
            return
        if grown is None and now - asked > ANSWER_S:
            add_note(log, f"{process_name(process)}: no answer within {ANSWER_S:.0f} s")
            return
        if now - asked > 5 * ANSWER_S:  # others of the run keep writing
            return


def _status_field(pid: int, name: str) -> str:
    match = re.search(rf"^{name}:\s*(.*)$", proc_text(pid, "status"), re.MULTILINE)
    return match[1] if match else ""
