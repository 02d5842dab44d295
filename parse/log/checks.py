"""Figures that the rest of their log contradicts are left out. Standard library alone.

Each check compares two things that a log says independently of each other. It is trusted only where
it holds for most of the log: a writer that means something else by a word fails it everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from parse.log.records import Iteration, Log, Reject
from parse.log.window import Window

_Pair = tuple[Window, Iteration]
_Check = Callable[[Window, Iteration], bool | None]

_TFLOPS_SLACK = 2e-3
_MICRO_SLACK_MS = 0.1
_MICRO_SLACK = 1e-3
_SUM_SLACK_MS = 2.0
_SUM_SLACK = 5e-3


def drop_contradictions(log: Log, windows: Sequence[Window], records: Sequence[Iteration]) -> None:
    """Set figures to None that other lines of the same iteration, or the other iterations, deny."""
    pairs = list(zip(windows, records, strict=True))
    _apply(log, pairs, ("tokens",), _tokens_check(pairs))
    work_agrees = _tflops_check(pairs)
    sure = [pair for pair in pairs if pair[0].time_confirmed]
    unsure = [pair for pair in pairs if not pair[0].time_confirmed]
    trusted = _is_trusted([work_agrees(*pair) for pair in pairs])
    if trusted:
        _drop(log, sure, ("tflops",), work_agrees)
        _drop(log, unsure, ("tflops", "iteration_s"), work_agrees)
    _apply(log, pairs, ("learning_rate",), _learning_rate_agrees)
    for name in ("forward", "backward", "backward_inner", "backward_allreduce", "update"):
        _apply(log, pairs, (f"{name}_ms",), _micro_check(f"{name}_ms"))
    parts = ("backward_ms", "backward_inner_ms", "backward_allreduce_ms")
    _apply(log, pairs, parts, _backward_adds_up)
    _apply(log, pairs, ("optimizer_step_ms",), _optimizer_within_update)
    _check_batch(log, windows)


def _apply(log: Log, pairs: Sequence[_Pair], names: Sequence[str], check: _Check) -> None:
    if _is_trusted([check(*pair) for pair in pairs]):
        _drop(log, pairs, names, check)


def _is_trusted(verdicts: Sequence[bool | None]) -> bool:
    holds = verdicts.count(True)
    return holds >= 2 and holds >= 3 * verdicts.count(False)


def _drop(log: Log, pairs: Sequence[_Pair], names: Sequence[str], check: _Check) -> None:
    wrong = [pair for pair in pairs if check(*pair) is False]
    for window, record in wrong:
        for name in names:
            setattr(record, name, None)
        number = window.reading.line_number if window.reading else 0
        what = f"iteration {record.iteration}: {', '.join(names)}"
        log.rejects.append(Reject.of(number, f"{what} contradicted by the rest of the log", ""))


def _tokens_check(pairs: Sequence[_Pair]) -> _Check:
    """All iterations have as many tokens."""
    sizes = [r.tokens / r.iteration for _, r in pairs if r.tokens]
    size = median(sizes) if sizes else 0.0
    return lambda _, r: None if r.tokens is None else r.tokens == size * r.iteration


def _tflops_check(pairs: Sequence[_Pair]) -> _Check:
    """The work of an iteration is a constant: TFLOP/s times its seconds over its samples."""
    known = sorted(
        (value for pair in pairs if (value := _work(*pair)) is not None), key=lambda value: value[1]
    )
    precise = known[: len(known) // 2 + 1] if len(known) > 2 else []
    typical = median(value for value, _ in precise) if precise else 0.0
    unsure = precise[-1][1] + _TFLOPS_SLACK if precise else 0.0

    def agrees(window: Window, record: Iteration) -> bool | None:
        found = _work(window, record)
        if found is None or not typical:
            return None
        value, rounding = found
        return abs(value - typical) <= rounding * value + unsure * typical

    return agrees


def _work(window: Window, record: Iteration) -> tuple[float, float] | None:
    """TFLOP of a sample, and how far the rounding of TFLOP/s puts it off, as a share of it."""
    batch = window.reading.integer("global_batch_size") if window.reading else None
    if not record.tflops or record.iteration_s is None or not batch:
        return None
    assert window.reading is not None
    decimals = len(window.reading.values["tflops"].partition(".")[2])
    return record.tflops * record.iteration_s / batch, 0.6 * 10.0**-decimals / record.tflops


def _learning_rate_agrees(window: Window, record: Iteration) -> bool | None:
    """DeepSpeed's progress line has it in full precision."""
    reading, exact = window.reading, _float(window.step_rate)
    if reading is None or exact is None or record.learning_rate is None:
        return None
    mantissa = reading.values["learning_rate"].lower().partition("e")[0]
    digits = len(mantissa.partition(".")[2])
    return float(f"{exact:.{digits}e}") == record.learning_rate or _close(
        exact, record.learning_rate, 0.51 * 10.0**-digits
    )


def _micro_check(name: str) -> _Check:
    """The timers of the micro-batches, summed, are the iteration's."""

    def agrees(window: Window, record: Iteration) -> bool | None:
        value, micro = getattr(record, name), window.micro.get(name)
        if value is None or micro is None:
            return None
        slack = _MICRO_SLACK_MS * window.micro_lines + _MICRO_SLACK * micro
        return bool(abs(value - micro) <= slack)

    return agrees


def _backward_adds_up(window: Window, record: Iteration) -> bool | None:
    """Backward is its computation and the reduction of gradients."""
    whole, inner = record.backward_ms, record.backward_inner_ms
    reduction = record.backward_allreduce_ms
    if whole is None or inner is None or reduction is None or "backward_ms" in window.micro:
        return None
    return abs(whole - inner - reduction) <= _SUM_SLACK_MS + _SUM_SLACK * whole


def _optimizer_within_update(_: Window, record: Iteration) -> bool | None:
    """The optimizer's step is a part of the update."""
    if record.update_ms is None or record.optimizer_step_ms is None:
        return None
    return record.optimizer_step_ms <= record.update_ms + 1.0


def _check_batch(log: Log, windows: Sequence[Window]) -> None:
    """The batch size that iteration lines print, where the arguments leave it out or deny it."""
    printed = {w.reading.integer("global_batch_size") for w in windows if w.reading} - {None}
    if len(printed) != 1:
        return
    batch = printed.pop()
    assert batch is not None
    if log.settings.setdefault("global_batch_size", batch) != batch:
        log.notes.append("two global batch sizes in one log: the name's or the arguments' is kept")


def _float(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _close(a: float, b: float, relative: float) -> bool:
    return abs(a - b) <= relative * max(abs(a), abs(b))
