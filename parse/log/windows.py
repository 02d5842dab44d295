"""The lines of one iteration, put together. Standard library alone.

Lines of an iteration come before its iteration line, so they collect in a *window* that the
iteration line closes. DeepSpeed without Megatron prints no iteration lines: there its last line of
timers closes the window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from parse.log.entries import IterationLine, Mark, ProgressLine, TimerLine
from parse.log.records import MemoryLine

AFTER_STEP = "Engine after step"
"""Title of memory that DeepSpeed prints behind the timers of its iteration."""

Entry = IterationLine | TimerLine | ProgressLine | MemoryLine | Mark | float
"""What one line says; a number is the interval timer of a rank, in s."""


@dataclass
class Window:
    """All that was printed since the iteration line before, up to its own."""

    line: IterationLine | None = None
    """Its iteration line; None in a log without any."""
    last_timers: TimerLine | None = None
    """Its last line of whole-iteration timers."""
    interval_timers: list[float] = field(default_factory=list)
    """One of each rank, in s."""
    phases: dict[str, float] = field(default_factory=dict)
    """DeepSpeed's timers, in ms."""
    micro: dict[str, float] = field(default_factory=dict)
    """Sums of the micro-batches' timers, in ms."""
    micro_lines: int = 0
    micro_complete: bool = True
    """Whether every line of timers could be read."""
    repeats: int = 0
    """How often a timer was printed again: the window spans as many lost iteration lines."""
    progress: list[ProgressLine] = field(default_factory=list)
    memory: list[MemoryLine] = field(default_factory=list)
    new_run: bool = False
    """Whether a run begins in it."""
    damaged: bool = False
    """Whether lines of it may be missing."""
    iteration: int | None = None
    """Position in the training run, from 1; None where the window is left out."""
    repeated: bool = False
    """Whether its line only repeats an iteration that was printed before."""
    lost_before: int = 0
    """Iterations between the window before and this one."""

    @property
    def is_whole(self) -> bool:
        """Whether it holds the lines of one iteration, none missing and no other's."""
        return not (self.damaged or self.repeats or self.lost_before)

    @property
    def steps(self) -> set[int]:
        """Iterations that DeepSpeed's progress lines name."""
        return {line.step for line in self.progress}

    def add_timers(self, line: TimerLine) -> None:
        """Take one line of timers; of a damaged one only its place counts."""
        if line.ends_iteration:
            self.last_timers = line
        self.micro_lines += bool(line.micro)
        if line.problem:
            self.micro_complete = False
            return
        if not self.phases.keys().isdisjoint(line.main):
            # The iteration line between the two is lost, and what is older belongs to it.
            self.phases, self.micro, self.micro_lines = {}, {}, 0
            self.repeats += 1
        self.phases |= line.main
        for name, value in line.micro.items():
            self.micro[name] = self.micro.get(name, 0.0) + value


def group(entries: Sequence[Entry]) -> list[Window]:
    """Sort the entries of a log into windows; the last one is still open at the log's end."""
    by_lines = any(isinstance(entry, IterationLine) for entry in entries)
    windows = [Window()]
    for entry in entries:
        window = windows[-1]
        # Without iteration lines, some lines follow the timers that close their window.
        closed = windows[-2] if not by_lines and windows[1:] and window == Window() else window
        match entry:
            case IterationLine():
                window.line = entry
                windows.append(Window())
            case TimerLine():
                window.add_timers(entry)
                if entry.ends_iteration and not by_lines:
                    windows.append(Window())
            case ProgressLine():
                window.progress.append(entry)
            case MemoryLine():
                (closed if entry.title == AFTER_STEP else window).memory.append(entry)
            case float():
                closed.interval_timers.append(entry)
            case Mark.LINES_LOST:
                window.damaged = True
            case Mark.RUN_START:
                window.new_run = True
    return windows


def reject_odd_timers(lines: Sequence[TimerLine]) -> None:
    """Note as damaged what has a label that no other line of timers has."""
    known = Counter(name for line in lines for name in (*line.main, *line.micro))
    unknown = Counter(label for line in lines for label in line.unknown)
    for line in lines:
        usual = any(known[name] > 1 for name in (*line.main, *line.micro))
        if usual and any(unknown[label] == 1 for label in line.unknown):
            line.problem = line.problem or "a timer line with a label that no other line has"
