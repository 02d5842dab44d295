"""Figures that a log states twice must agree, or they are left out. Standard library alone.

Nothing tells which of two figures is the damaged one, so both go. A check counts only where it
holds for most of the log: a writer that means something else by a word fails it everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

from parse.log.numbering import Drop
from parse.log.windows import Window

Check = Callable[[Window], bool | None]
"""Whether two figures of a window agree; None where one of them is not there."""

_SAME_TIME_S = 2e-6
"""Two timers this close are the same time for any purpose."""
_TIMES = (("elapsed_s", 1.0), ("interval_s", 1.0), ("elapsed_ms", 1e-3))
_TFLOPS_SLACK = 2e-3
_MICRO_SLACK_MS = 0.1
_MICRO_SLACK = 1e-3
_SUM_SLACK_MS = 2.0
_SUM_SLACK = 5e-3


def drop_contradictions(windows: Sequence[Window], drop: Drop, drop_timers: Drop) -> None:
    """Drop windows whose iteration line contradicts itself, and timers that do.

    Args:
        windows: Numbered windows.
        drop: Leaves a window out.
        drop_timers: Leaves its timers out.
    """
    lines = [window for window in windows if window.iteration is not None and window.line]
    for check, what in (
        (_times_agree, "two times"),
        (_rate_agrees, "time and samples per second"),
        (_work_check(lines), "time and TFLOP/s"),
        (_learning_rate_agrees, "learning rate and DeepSpeed's progress line"),
    ):
        _apply(lines, drop, check, f"an iteration line whose {what} do not agree")
    for name in sorted({name for window in windows for name in window.micro}):
        what = f"timers whose {name} is not the sum of its micro-batches"
        _apply(windows, drop_timers, partial(_micro_batches_add_up, name), what)
    what = "timers whose parts of backward do not add up to it"
    _apply(windows, drop_timers, _backward_adds_up, what)
    what = "timers whose optimizer step is longer than the update"
    _apply(windows, drop_timers, _optimizer_within_update, what)


def _apply(windows: Sequence[Window], drop: Drop, check: Check, what: str) -> None:
    verdicts = [check(window) for window in windows]
    holds, fails = verdicts.count(True), verdicts.count(False)
    if check is _times_agree or (holds >= 2 and holds >= 3 * fails):
        for window, verdict in zip(windows, verdicts, strict=True):
            if verdict is False and window.iteration is not None:
                drop(window, what)


def iteration_seconds(window: Window) -> float | None:
    """The time of an iteration, in s.

    The paper's fork prints it in s and in ms on the iteration line, and a timer of every rank in
    full precision. Of the two printed times the finer one counts; a timer that rounds to it is the
    printing rank's own and says more digits, unless the ranks differ by more than their noise.
    """
    printed = _printed_times(window)
    if not printed:
        return None
    seconds, rounding_s = min(printed, key=lambda time: time[1])
    close = [t for t in window.interval_timers if abs(t - seconds) <= rounding_s]
    if not close or max(close) - min(close) > _SAME_TIME_S:
        return seconds
    return min(close, key=lambda t: abs(t - seconds))


def _printed_times(window: Window) -> list[tuple[float, float]]:
    """Printed times of an iteration, and how far the rounding of each can be off; in s."""
    found = []
    for name, unit_s in _TIMES:
        text = window.line.values.get(name, "0") if window.line else "0"
        if float(text) > 0:
            found.append((float(text) * unit_s, 0.51 * unit_s * 10.0 ** -_decimals(text) + 1e-12))
    interval = window.lost_before + 1
    if interval > 1 and len(found) > 1 and not _same(found[0], found[-1]):
        (seconds, rounding_s), mean = found[0], found[-1]
        if _same((seconds / interval, rounding_s), mean):
            return [mean]  # the line is of several iterations, and prints their mean too
    return found


def _same(a: tuple[float, float], b: tuple[float, float]) -> bool:
    """Whether two values agree, given how far each can be off."""
    return abs(a[0] - b[0]) <= a[1] + b[1]


def _decimals(text: str) -> int:
    return len(text.partition(".")[2])


def _times_agree(window: Window) -> bool | None:
    printed = _printed_times(window)
    return all(_same(printed[0], other) for other in printed[1:]) if len(printed) > 1 else None


def _rate_agrees(window: Window) -> bool | None:
    """The samples per second say the time once more."""
    assert window.line is not None
    text, batch = window.line.values.get("samples_per_s"), window.line.integer("global_batch_size")
    printed = _printed_times(window)
    if text is None or not batch or not printed or not float(text) > 0:
        return None
    rate, half = float(text), 0.51 * 10.0 ** -_decimals(text)
    by_rate = batch / rate, batch / max(rate - half, 1e-9) - batch / rate
    return _same(by_rate, min(printed, key=lambda time: time[1]))


def _work_check(windows: Sequence[Window]) -> Check:
    """The work of a sample is a constant: TFLOP/s times seconds over samples."""
    known = sorted(
        (work for window in windows if (work := _work(window))), key=lambda work: work[1]
    )
    precise = known[: len(known) // 2 + 1] if len(known) > 2 else []
    typical = median(value for value, _ in precise) if precise else 0.0
    unsure = precise[-1][1] + _TFLOPS_SLACK if precise else 0.0

    def agrees(window: Window) -> bool | None:
        work = _work(window)
        if not work or not typical:
            return None
        return abs(work[0] - typical) <= work[1] * work[0] + unsure * typical

    return agrees


def _work(window: Window) -> tuple[float, float] | None:
    """TFLOP of a sample, and how far the rounding of TFLOP/s puts it off, as a share of it."""
    assert window.line is not None
    text, batch = window.line.values.get("tflops"), window.line.integer("global_batch_size")
    seconds = iteration_seconds(window)
    if text is None or not float(text) or seconds is None or not batch:
        return None
    tflops = float(text)
    return tflops * seconds / batch, 0.6 * 10.0 ** -_decimals(text) / tflops


def _learning_rate_agrees(window: Window) -> bool | None:
    """DeepSpeed's progress line has it in full precision."""
    assert window.line is not None
    printed = window.line.values.get("learning_rate")
    rates = [line.learning_rate for line in window.progress if line.learning_rate]
    if printed is None or not rates:
        return None
    try:
        exact = float(rates[-1])
    except ValueError:
        return None
    digits = _decimals(printed.lower().partition("e")[0])
    rounding = 0.51 * 10.0**-digits * max(abs(exact), abs(float(printed)))
    return float(f"{exact:.{digits}e}") == float(printed) or abs(exact - float(printed)) <= rounding


def _micro_batches_add_up(name: str, window: Window) -> bool | None:
    """The timers of the micro-batches, summed, are the iteration's."""
    whole, parts = window.phases.get(name), window.micro.get(name)
    if whole is None or parts is None or not window.micro_complete:
        return None
    return abs(whole - parts) <= _MICRO_SLACK_MS * window.micro_lines + _MICRO_SLACK * parts


def _backward_adds_up(window: Window) -> bool | None:
    """Backward is its computation and the reduction of gradients."""
    parts = ("backward_ms", "backward_inner_ms", "backward_allreduce_ms")
    if not window.phases.keys() >= set(parts) or "backward_ms" in window.micro:
        return None
    whole, inner, reduction = (window.phases[name] for name in parts)
    return abs(whole - inner - reduction) <= _SUM_SLACK_MS + _SUM_SLACK * whole


def _optimizer_within_update(window: Window) -> bool | None:
    """The optimizer's step is a part of the update."""
    if not window.phases.keys() >= {"update_ms", "optimizer_step_ms"}:
        return None
    return window.phases["optimizer_step_ms"] <= window.phases["update_ms"] + 1.0
