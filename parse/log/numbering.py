"""Which iteration each window of a log is of. Standard library alone.

A log says it several times: Megatron's counter, samples and tokens consumed, DeepSpeed's progress
lines. A number counts where these witnesses agree; so a lost line leaves a gap, and a damaged digit
never moves figures to another iteration. What cannot be placed is left out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from parse.log.records import Log, Reject
from parse.log.window import Window

_Votes = dict[str, list[int | None]]


def number_windows(windows: Sequence[Window], log: Log) -> list[Window]:
    """Set ``iteration`` and ``lost_before``; returns the windows that make a record, in order.

    Of several runs in one log the last counts. Rejects and notes go to ``log``.
    """
    votes = _kept(_votes(windows, log))
    if any(value is not None for values in votes.values() for value in values):
        for position, window in enumerate(windows):
            window.iteration = _agreed([values[position] for values in votes.values()])
        windows, votes = _last_run(windows, votes, log)
        _fill(windows, votes)
    else:
        micro_lines = _constant(window.micro_lines for window in windows)
        for position, window in enumerate(windows, 1):
            if not window.by_timers or _is_doubtful(window, micro_lines):
                break  # every iteration line has a number; timers are counted while none is lost
            window.iteration = position
    counted = [w for w in windows if w.iteration is not None and _has_record(w)]
    _count_lost(windows, log)
    return counted


def _has_record(window: Window) -> bool:
    return window.reading is not None or window.by_timers


def _votes(windows: Sequence[Window], log: Log) -> _Votes:
    readings = [window.reading for window in windows]
    batch = _constant(r.integer("global_batch_size") for r in readings if r)
    batch = batch or _constant([log.settings.get("global_batch_size")])
    length = _constant(r.integer("seq_length") for r in readings if r)
    per_iteration = {"samples": batch, "tokens": batch * length if batch and length else None}
    votes: _Votes = {"iteration": [r.integer("iteration") if r else None for r in readings]}
    for name, size in per_iteration.items():
        values = [r.integer(name) if r else None for r in readings]
        votes[name] = [v // size if v and size and v % size == 0 else None for v in values]
    micro_lines = _constant(window.micro_lines for window in windows)
    votes["step"] = [
        None if _is_doubtful(window, micro_lines) or not window.steps else window.steps[-1]
        for window in windows
    ]
    return votes


def _is_doubtful(window: Window, micro_lines: int | None) -> bool:
    """Whether its timers may be of a later iteration than the progress line before them."""
    if window.damaged:
        return True
    uneven = micro_lines is not None and window.micro_lines != micro_lines
    return window.by_timers and (window.repeats > 0 or uneven or len(set(window.steps)) > 1)


def _constant(values: Iterable[object]) -> int | None:
    """The value that all share, an odd one out aside; None where it changes along the run."""
    counts = Counter(value for value in values if isinstance(value, int) and value > 0)
    ranked = counts.most_common(2)
    if not ranked or (len(ranked) > 1 and not ranked[0][1] > ranked[1][1] == 1):
        return None
    return ranked[0][0]


def _kept(votes: _Votes) -> _Votes:
    """The witnesses that tell the same story as the first one that speaks."""
    kept: _Votes = {}
    lead: list[int | None] | None = None
    for name, values in votes.items():
        if not any(values):
            continue
        if lead is None:
            lead = values
        both = [(a, b) for a, b in zip(lead, values, strict=True) if a and b]
        if not both or 2 * sum(a == b for a, b in both) >= len(both):
            kept[name] = values
    return kept


def _agreed(values: Sequence[int | None]) -> int | None:
    counts = Counter(value for value in values if value)
    ranked = counts.most_common(2)
    if not ranked or (len(ranked) > 1 and ranked[0][1] == ranked[1][1]):
        return None
    return ranked[0][0]


def _last_run(
    windows: Sequence[Window], votes: _Votes, log: Log
) -> tuple[Sequence[Window], _Votes]:
    """The windows of the last run; of them, numbers that do not rise are forgotten."""
    start, previous = 0, 0
    for position, window in enumerate(windows):
        number = window.iteration
        if number is None:
            continue
        if number < previous and (window.new_run or number == 1):
            log.notes.append(f"the log starts anew at iteration {number}; the last run counts")
            start = position
        elif number == previous and not window.by_timers:
            _reject(log, window, "an iteration that was printed before")
            window.iteration, window.reading, window.repeated = None, None, True
        previous = number
    windows = windows[start:]
    numbered = [window for window in windows if window.iteration is not None]
    certain = _certain_rise([window.iteration or 0 for window in numbered])
    for window, is_certain in zip(numbered, certain, strict=True):
        if not is_certain:
            window.iteration = None
    return windows, {name: values[start:] for name, values in votes.items()}


def _certain_rise(numbers: Sequence[int]) -> list[bool]:
    """Which numbers belong to every longest rising subsequence."""
    up = _rise_lengths(numbers)
    down = _rise_lengths([-number for number in reversed(numbers)])[::-1]
    longest = max(up, default=0)
    on_one = [a + b - 1 == longest for a, b in zip(up, down, strict=True)]
    at_level = Counter(level for level, on in zip(up, on_one, strict=True) if on)
    return [on and at_level[level] == 1 for level, on in zip(up, on_one, strict=True)]


def _rise_lengths(numbers: Sequence[int]) -> list[int]:
    """Length of the longest rising subsequence that ends with each number."""
    tails: list[int] = []
    lengths = []
    for number in numbers:
        place = bisect_left(tails, number)
        tails[place : place + 1] = [number]
        lengths.append(place + 1)
    return lengths


def _fill(windows: Sequence[Window], votes: _Votes) -> None:
    """Number what its neighbours leave one number for, or one of its witnesses confirms."""
    micro_lines = _constant(window.micro_lines for window in windows)
    _doubt_last(windows, votes)
    known = [i for i, w in enumerate(windows) if w.iteration is not None]
    for before, after in pairwise([-1, *known, len(windows)]):
        gap = [i for i in range(before + 1, after) if not windows[i].repeated]
        low = windows[before].iteration if before >= 0 else None
        high = windows[after].iteration if after < len(windows) else None
        if low is None and high is not None:  # counted back, as a run may begin anywhere
            low = max(high - len(gap) - 1, 0)
        exact = high is not None and high - (low or 0) - 1 == len(gap) and before + high > 0
        exact = exact and (before >= 0 or high == len(gap) + 1)
        sound = not any(_is_doubtful(windows[i], micro_lines) for i in gap)
        trusted = high is None and sound and all(windows[i].by_timers for i in gap)
        for offset, position in enumerate(gap, 1):
            expected = (low or 0) + offset
            says = not windows[position].damaged and any(
                values[position] == expected for values in votes.values()
            )
            if exact or trusted or (says and (low is not None)):
                windows[position].iteration = expected
            elif before >= 0:
                break


def _doubt_last(windows: Sequence[Window], votes: _Votes) -> None:
    """Forget a last number that leaps, on the word of one witness alone."""
    known = [i for i, w in enumerate(windows) if w.iteration is not None]
    if len(known) < 2:
        return
    before, last = known[-2:]
    number, previous = windows[last].iteration, windows[before].iteration
    leaps = (number or 0) - (previous or 0) > last - before
    several = len(windows[last].steps) > 1 and len(set(windows[last].steps)) == 1
    witnesses = sum(values[last] == number for values in votes.values())
    if leaps and witnesses < 2 and len(votes) == 1 and not several and windows[last].by_timers:
        windows[last].iteration = None


def _count_lost(windows: Sequence[Window], log: Log) -> None:
    previous, others = 0, 0
    for position, window in enumerate(windows):
        if window.iteration is None:
            if window.reading is not None:
                _reject(log, window, "an iteration whose number is lost")
            others += not window.repeated
            continue
        window.lost_before = max(0, window.iteration - previous - 1 - others)
        alone = set(window.steps) == {window.iteration} and not window.damaged
        if position == 0 and alone:
            window.lost_before = 0  # a run that goes on from a checkpoint
        previous, others = window.iteration, 0


def _reject(log: Log, window: Window, reason: str) -> None:
    reading = window.reading
    if reading is not None:
        log.rejects.append(Reject.of(reading.line_number, reason, reading.text))
