"""Which iteration lines of memory are of. Standard library alone."""

from __future__ import annotations

from parse.log.memory import MemoryLine
from parse.log.records import Iteration
from parse.log.window import Window

_FIRST_TITLE, _LAST_TITLE = "Engine before forward", "Engine after step"
"""Of an iteration's memory lines; the last is printed after the timers."""
_MIDDLE_TITLES = frozenset(
    f"Engine {place}"
    for place in ("after forward", "before backward", "after backward", "before step")
)


def attach_memory(
    memory: list[MemoryLine], counted: list[Window], records: list[Iteration]
) -> None:
    """The largest figures of each window; none where a line is damaged or may be another's."""
    by_window: dict[int, list[MemoryLine]] = {}
    for line in memory:
        by_window.setdefault(line.window, []).append(line)
    for window, record in zip(counted, records, strict=True):
        lines = by_window.get(window.index, ())
        alone = not (window.damaged or window.lost_before or window.repeats)
        if (
            not lines or not alone or window.by_timers
        ):  # timers come before an iteration's last line
            continue
        device = [line.max_allocated_gib for line in lines]
        host = [line.host_used_gib for line in lines]
        record.device_memory_gib = (
            None if None in device else max(v for v in device if v is not None)
        )
        record.host_memory_gib = None if None in host else max(v for v in host if v is not None)


def number_memory(memory: list[MemoryLine], counted: list[Window], open_window: Window) -> None:
    """Set the iteration of memory lines; the setup before the first forward has none."""
    whole = [w for w in counted if not (w.lost_before or w.repeats or w.damaged)]
    numbers = {window.index: window.iteration for window in whole}
    by_timers = any(window.by_timers for window in counted)
    first = next((i for i, line in enumerate(memory) if line.title == _FIRST_TITLE), 0)
    for line in memory[first:]:
        if not by_timers or line.title == _FIRST_TITLE or line.title in _MIDDLE_TITLES:
            line.iteration = numbers.get(line.window)
        elif line.title == _LAST_TITLE:
            # It is of the window before, if no line of timers is lost between the two.
            last = line.window == open_window.index and not open_window.damaged
            sound = not line.after_timers and (last or line.window in numbers)
            line.iteration = numbers.get(line.window - 1) if sound else None
