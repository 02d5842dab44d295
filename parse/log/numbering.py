"""The number of each window's iteration. Standard library alone.

Megatron's lines count iterations, samples and tokens. A line whose counters do not agree is left
out, since which of them is damaged cannot be known. So a lost or damaged line leaves a gap and
never moves figures to another iteration.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import zip_longest

from parse.log.entries import CUT_OFF, IterationLine
from parse.log.fields import OPTIONAL
from parse.log.records import Log
from parse.log.windows import Window

Drop = Callable[[Window, str], None]
"""Leaves a window out for a reason."""


def number_by_lines(windows: Sequence[Window], log: Log, drop: Drop) -> Sequence[Window]:
    """Set ``iteration`` of the windows by their iteration lines.

    Returns:
        The windows of the log's last run, those that are left out among them.
    """
    _count(windows, log, drop)
    windows = _last_run(windows, log)
    _drop_odd_lines(windows, drop)
    _drop_odd_batch(windows, log, drop)
    _drop_falling(windows, drop)
    return windows


def _sound(windows: Sequence[Window]) -> list[tuple[Window, IterationLine]]:
    return [(w, w.line) for w in windows if w.line and not w.line.problem]


def _count(windows: Sequence[Window], log: Log, drop: Drop) -> None:
    """Number windows by the counters of their own line, where all of them agree."""
    sound = _sound(windows)
    columns = list(zip(*(_counters(line, log) for _, line in sound), strict=True))
    spoken = [column for column in columns if any(column)]
    batches = Counter(line.integer("global_batch_size") for _, line in sound)
    ramped = sum(count > 1 for count in batches.values()) > 1
    # A counter that contradicts the first one on most lines counts something else, and samples
    # say nothing of iterations while the batch grows.
    trusted = [c for c in spoken if c is spoken[0] or (_mostly_equal(c, spoken[0]) and not ramped)]
    for position, (window, _) in enumerate(sound):
        said = {column[position] for column in trusted} - {None} or window.steps
        if len(said) == 1 and 0 not in said:
            window.iteration = said.pop()
        elif said:
            drop(window, "an iteration line whose counters do not agree")
        else:
            drop(window, "an iteration whose number is lost")


def _counters(line: IterationLine, log: Log) -> list[int | None]:
    """The iteration by each counter of a line; 0 where it is between two iterations."""
    batch = line.integer("global_batch_size") or log.settings.get("global_batch_size")
    samples = batch if isinstance(batch, int) else 0
    sizes = {"iteration": 1, "samples": samples}
    sizes["tokens"] = samples * (line.integer("seq_length") or 0)
    found: list[int | None] = []
    for name, size in sizes.items():
        value = line.integer(name)
        if value is None or not size:
            found.append(None)
        else:
            found.append(value // size if value % size == 0 else 0)
    return found


def _mostly_equal(column: Sequence[int | None], lead: Sequence[int | None]) -> bool:
    both = [a == b for a, b in zip(column, lead, strict=True) if a is not None and b is not None]
    return 2 * sum(both) >= len(both)


def _last_run(windows: Sequence[Window], log: Log) -> Sequence[Window]:
    start, previous, new_run = 0, 0, False
    for position, window in enumerate(windows):
        new_run = new_run or window.new_run
        number = window.iteration
        if number is None:
            continue
        if number < previous and (new_run or number == 1):
            log.notes.append(f"the log starts anew at iteration {number}; the last run counts")
            start = position
        previous, new_run = number, False
    return windows[start:]


def _drop_odd_lines(windows: Sequence[Window], drop: Drop) -> None:
    """Lines of one writer look alike: drop those that lack a field, or have one too many."""
    sound = _sound(windows)
    names = Counter(name for _, line in sound for name in line.values)
    unknown = Counter(label for _, line in sound for label in line.unknown)
    usual = {n for n, count in names.items() if 2 * count >= len(sound)} - OPTIONAL
    bars = Counter(line.bar_at_end for _, line in sound)
    for window, line in sound:
        missing = usual - line.values.keys()
        if line.cut and (missing or len(sound) == 1):
            drop(window, CUT_OFF)
        elif missing:
            drop(window, f"an iteration line without {', '.join(sorted(missing))}")
        elif len(sound) > 1 and any(unknown[label] == 1 for label in line.unknown):
            drop(window, "an iteration line with a label that no other line has")
        elif bars[line.bar_at_end] < bars[not line.bar_at_end]:
            drop(window, "an iteration line that ends as no other does")


def _drop_odd_batch(windows: Sequence[Window], log: Log, drop: Drop) -> None:
    """Drop a line whose batch size is no other's; where several differ, the size is ramped up."""
    sound = _sound(windows)
    batches = [line.integer("global_batch_size") for _, line in sound]
    stated = log.settings.get("global_batch_size")
    counts = Counter([batch for batch in [*batches, stated] if batch])
    ranked = counts.most_common(2)
    if len(counts) == 2 and ranked[0][1] > ranked[1][1] == 1 and ranked[1][0] != stated:
        for (window, _), batch in zip(sound, batches, strict=True):
            if batch == ranked[1][0]:
                drop(window, "an iteration line with another global batch size")
    printed = {batch for batch in batches if batch}
    if len(printed) == 1 and log.settings.setdefault("global_batch_size", *printed) not in printed:
        log.notes.append("two global batch sizes in one log: the name's or the arguments' is kept")


def _drop_falling(windows: Sequence[Window], drop: Drop) -> None:
    """Drop numbers that do not rise."""
    numbered = [window for window in windows if window.iteration is not None]
    previous = 0
    for window, after in zip_longest(numbered, numbered[1:]):
        number = window.iteration or 0
        leaps = number > previous + 1
        if number == previous:
            window.repeated = True
            drop(window, "an iteration that was printed before")
        elif number < previous:
            drop(window, "an iteration number that goes back")
        elif leaps and after and (after.iteration or 0) <= number:
            drop(window, "an iteration number that the next one contradicts")
        else:
            previous = number


def number_by_steps(windows: Sequence[Window], log: Log, drop: Drop) -> Sequence[Window]:
    """Set ``iteration`` of windows that timers close, in a log without iteration lines.

    Windows are counted: from DeepSpeed's progress lines where there are any, else from 1.

    Returns:
        The windows of the log's last run, those that are left out among them.
    """
    for window, number in zip(windows, _numbers_by_steps(windows), strict=True):
        sound = window.last_timers and not window.last_timers.problem
        window.iteration = number if sound and number and number > 0 else None
        if window.iteration is None or window.steps - {number}:
            drop(window, "timers of an iteration whose number is lost")
    windows = _last_run(windows, log)
    _drop_falling(windows, drop)
    return windows


def _numbers_by_steps(windows: Sequence[Window]) -> list[int | None]:
    usual = Counter(window.micro_lines for window in windows).most_common(1)[0][0]
    sound = [w.micro_lines == usual and not (w.damaged or w.repeats) for w in windows]
    # What each progress line says the first window's number is: all the same where none is lost.
    first = {
        place: min(window.steps) - place
        for place, window in enumerate(windows)
        if sound[place] and len(window.steps) == 1
    }
    if len(set(first.values())) < 2 and all(sound):
        start = next(iter(first.values()), 1)
        return [start + place for place in range(len(windows))]
    # Elsewhere two progress lines must agree: those before and behind a window, or its own.
    numbers: list[int | None] = []
    marks = list(first)
    for place, is_sound in enumerate(sound):
        at = bisect_left(marks, place)
        near = [first[mark] for mark in marks[max(at - 1, 0) : at + 1 + (place in first)]]
        agreed = [number for number in near if near.count(number) > 1]
        numbers.append(agreed[0] + place if agreed and is_sound else None)
    return numbers


def count_lost(windows: Sequence[Window]) -> None:
    """Set how many iterations are missing before each window, those left out aside."""
    previous, left_out = 0, 0
    for position, window in enumerate(windows):
        if window.iteration is None:
            left_out += not window.repeated
            continue
        window.lost_before = max(0, window.iteration - previous - 1 - left_out)
        if position == 0 and window.steps == {window.iteration} and not window.damaged:
            window.lost_before = 0  # a run that goes on from a checkpoint
        previous, left_out = window.iteration, 0
