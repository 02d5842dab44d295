"""Reads training logs leniently. Standard library alone.

What a log prints stands in the tables of this file, a row a figure: its label or pattern, its
name, its unit and its type. A new figure is a new row. A line that has a table's marker but does
not fit is left out as a whole, and listed with its number; its figures are missing, not guessed.

Forms known: DeepSpeed 0.3 to 0.19 (timers, progress, memory, throughput, profile), the old and the
new Megatron-DeepSpeed, the paper's fork, Megatron-LM and megatron-core. The exact figures of the
``metrics.jsonl`` beside a log are taken over in :func:`attach_metrics`.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, cast

from parse.facts import Row, RunFacts, settings_from_name
from parse.records import (
    PHASES,
    Iteration,
    Log,
    LogError,
    MemoryLine,
    Metrics,
    ProfileLine,
    Reject,
    ThroughputLine,
    as_number,
)

MAX_LINE_CHARACTERS = 1 << 20
"""A longer line is not a line of a log."""
CUT_OFF, RUN_TOGETHER = "cut off: the log ends here", "two lines run together"

_DECIMAL = r"\d{1,12}(?:\.\d{0,20})?"
_NUMBER = rf"[-+]?{_DECIMAL}(?:[eE][-+]?\d{{1,3}})?"
_LOSS = rf"(?:{_NUMBER}|[-+]?(?:nan|NaN|NAN|inf|Inf|INF|Infinity))"
_INTEGER = r"\d{1,18}"
_WITH_AVERAGE = rf"{_DECIMAL}(?: \(avg {_DECIMAL}\))?"
_WITH_MOE_DETAIL = rf"{_DECIMAL}(?: \([^()]*\))?"


ITERATION_FIELDS = {
    "consumed samples": Row("samples", _INTEGER, "samples", int),
    "consumed tokens": Row("tokens", _INTEGER, "tokens", int),
    "elapsed time per iteration (ms)": Row("elapsed_ms", _DECIMAL, "ms"),
    "elapsed time per iteration (s)": Row("interval_s", _DECIMAL, "s"),
    "learning rate": Row("learning_rate", _NUMBER),
    "global batch size": Row("global_batch_size", _INTEGER, "samples", int),
    "lm loss": Row("loss", _LOSS, "nats"),
    "grad norm": Row("grad_norm", _LOSS),
    "actual seqlen": Row("seq_length", _INTEGER, "tokens", int),
    "number of skipped iterations": Row("skipped", _INTEGER, "iterations", int),
    "number of nan iterations": Row("nan", _INTEGER, "iterations", int),
    "samples per second": Row("samples_per_s", _DECIMAL, "samples/s"),
    "TFLOPs": Row("tflops", _DECIMAL, "TFLOP/s"),
    "throughput per GPU (TFLOP/s/GPU)": Row("tflops", _WITH_AVERAGE, "TFLOP/s"),
    "compute per GPU (TFLOP/s/GPU)": Row("tflops", _WITH_AVERAGE, "TFLOP/s"),
}
"""Megatron's line at the end of an iteration, by label."""
TIMER_FIELDS = {
    **dict.fromkeys(("fwd", "forward"), Row("forward_ms", _WITH_MOE_DETAIL, "ms")),
    **dict.fromkeys(("bwd", "backward"), Row("backward_ms", _DECIMAL, "ms")),
    **dict.fromkeys(("bwd_inner", "backward_inner"), Row("backward_inner_ms", _DECIMAL, "ms")),
    **dict.fromkeys(
        ("bwd_allreduce", "backward_allreduce"), Row("backward_allreduce_ms", _DECIMAL, "ms")
    ),
    "step": Row("update_ms", _DECIMAL, "ms"),
    "optimizer_step": Row("optimizer_step_ms", _DECIMAL, "ms"),
}
"""DeepSpeed's ``[Rank 0] time (ms) | ...``, by label."""
_MICRO = "_microstep"
"""Behind a label of one micro-batch alone."""

_GIB = r"(\d{1,9}(?:\.\d{1,6})?)"
_RATE = r"([-+]?(?:\d{1,12}(?:\.\d{0,20})?(?:[eE][-+]?\d{1,3})?|inf))"
LINES = {
    "interval_timer": rf"<TIMER:interval-time,\s*({_DECIMAL}(?:[eE]-\d{{1,3}})?)\s*>",
    "progress": r"\bstep=(\d{1,12}), skipped=\d{1,12}, lr=\[",
    "throughput": r"epoch=\d{1,9}/micro_step=(\d{1,12})/global_step=(\d{1,12}), "
    rf"RunningAvgSamplesPerSec={_RATE}, CurrSamplesPerSec={_RATE}, "
    rf"MemAllocated={_GIB}GB, MaxMemAllocated={_GIB}GB(?!\w)",
    "device_memory": rf"\bMA {_GIB} GB\s+Max_MA {_GIB} GB\s+CA {_GIB} GB\s+Max_CA {_GIB} GB(?!\w)",
    "host_memory": rf"CPU Virtual Memory:\s+used = {_GIB} GB, percent = {_GIB}%",
    "global_step": r"/global_step=(\d{1,12}),",
    "profile_head": r"-{5,} DeepSpeed Flops Profiler -{5,}",
    "profile_step": r"Profile Summary at step (\d{1,12}):",
    "profile": r"^([A-Za-z][^:]{2,120}):\s+(\d{1,15}(?:\.\d{1,6})?)"
    r"(?: ([TGBMKmu]?)(MACs|FLOPS|s)?)?\s*$",
}
"""Lines of a form of their own. DeepSpeed prints GiB and calls them GB; the profiler's prefixes
are powers of 1000."""
PATTERNS = {name: re.compile(pattern) for name, pattern in LINES.items()}

_ITERATION_MARKS = ("consumed samples:", "elapsed_time ", "elapsed time per iteration", "lm loss:")
TIMERS_MARK = "time (ms)"
_MARKS = {
    TIMERS_MARK: "timers",
    "global_step=": "progress",
    ", skipped=": "progress",
    "Max_MA": "memory",
    "CPU Virtual": "memory",
}
"""What tells the kind of a line; where two of them stand, two lines have run together."""
_HEAD = re.compile(r"\belapsed_time \d|\biteration +\d+ */|\bconsumed samples:")
_START = re.compile(
    r"iteration\s+(?P<iteration>\d{1,12})\s*/\s*\d{1,12}\s*"
    r"|elapsed_time\s+(?P<elapsed_s>\d{1,9}\.\d{6})\s*"
)
"""The first part of Megatron's iteration line, and of the paper's fork's."""
_LABELLED = re.compile(r"\s*([^:|]{2,60}?)\s*:\s*(.*?)\s*", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")
_AFTER_STEP = "Engine after step"
"""Title of memory that DeepSpeed prints behind the timers of its iteration."""
_FIRST_TITLE = "Engine before forward"
"""What comes before it is the setup."""
_SAME_TIME_S = 2e-6
"""Two timers this close are the same time for any purpose."""
_DEVICE_MEMORY = ("allocated_gib", "max_allocated_gib", "cached_gib", "max_cached_gib")
_HOST_MEMORY = ("host_used_gib", "host_percent")
_SHOWN = 5


# The lines of a file


class Line(NamedTuple):
    """One line of a log."""

    number: int
    """Position in the file, from 1."""
    text: str
    """Without its end, and with a space for every colour code."""
    cut: bool
    """Whether the file ends inside the line."""
    overlong: bool
    """Whether the line is too long to be one; ``text`` is then only its beginning."""


def open_log(path: Path) -> io.TextIOWrapper:
    """Open a log; lines end at LF, CR LF or CR (a progress bar's)."""
    return path.open(encoding="utf-8", errors="replace")


def read_lines(file: io.TextIOWrapper) -> Iterator[Line]:
    """Yield the lines of a file, never holding more than one."""
    number = 0
    while text := file.readline(MAX_LINE_CHARACTERS):
        number += 1
        end, overlong = text, len(text) == MAX_LINE_CHARACTERS and not text.endswith("\n")
        while overlong and end and not end.endswith("\n"):
            end = file.readline(MAX_LINE_CHARACTERS)
        if "\x1b" in text:
            text = _COLOUR.sub(" ", text)
        yield Line(number, text.removesuffix("\n"), not end.endswith("\n"), overlong)


def encoding_problem(file: io.TextIOWrapper) -> str:
    """Return why the file is not text in ASCII or UTF-8; the file stays at its start."""
    probe = cast(io.BufferedReader, file.buffer).peek(400)[:400]
    zeros = max(probe[0::2].count(0), probe[1::2].count(0))
    if probe.startswith((b"\xff\xfe", b"\xfe\xff")) or (
        len(probe) > 8 and zeros * 5 > len(probe) * 2
    ):
        return "is UTF-16 text; convert it to UTF-8"
    return ""


# The figures of a line


@dataclass
class Fields:
    """A line of labels and values."""

    number: int
    text: str
    problem: str = ""
    """Why the line is left out; empty for one that fits."""
    values: dict[str, Any] = field(default_factory=dict)
    """By their names in the table, of its types."""
    texts: dict[str, str] = field(default_factory=dict)
    """The same as printed."""
    unknown: list[str] = field(default_factory=list)
    """Labels that are not in the table."""

    def take(self, part: str, table: Mapping[str, Row], what: str) -> None:
        """Take what stands between two bars."""
        found = _LABELLED.fullmatch(part)
        label, value = found.groups() if found else ("", "")
        if label.endswith(_MICRO):
            return
        row = table.get(label)
        if not found:
            self.problem = f"{what} with a field that cannot be read"
        elif row is None:
            self.unknown.append(label)
            self.problem = RUN_TOGETHER if ":" in value else self.problem
        elif not re.fullmatch(row.pattern, value):
            self.problem = f"{what} whose {label!r} cannot be read"
        elif row.name in self.values:
            self.problem = RUN_TOGETHER
        else:
            self.texts[row.name] = text = value.partition(" ")[0]
            self.values[row.name] = row.kind(text)


class IterationLine(Fields):
    """The line that Megatron prints at the end of an iteration."""

    bar_at_end: bool = True

    @property
    def loss(self) -> float | None:
        """The loss, NaN where the line has none; None where it says nothing of it."""
        loss: float | None = self.values.get("loss")
        skipped = self.values.get("skipped")
        if loss is None and skipped is not None:
            # Megatron prints no loss that is NaN, nor that of a step which the loss scaler skipped.
            return None if skipped and not self.values.get("nan") else math.nan
        return loss


def iteration_line(line: Line) -> IterationLine | None:
    """Read an iteration line; None where it holds no field of one."""
    found, head = IterationLine(line.number, line.text), _HEAD.search(line.text)
    first, *parts = line.text[head.start() if head else 0 :].split("|")
    if start := _START.fullmatch(first):
        found.texts |= {name: text for name, text in start.groupdict().items() if text}
        found.values |= {name: float(text) for name, text in found.texts.items()}
    else:
        parts.insert(0, first)
    last = PATTERNS["interval_timer"].sub("", parts.pop()) if parts else ""
    found.bar_at_end = not last.strip()
    for part in parts if found.bar_at_end else [*parts, last]:
        found.take(part, ITERATION_FIELDS, "an iteration line")
    if line.cut:
        found.problem = CUT_OFF
    return found if found.values.keys() - {"iteration", "elapsed_s"} else None


def timer_line(line: Line) -> Fields:
    """Read a line of DeepSpeed's timers; labels of other timers are left out."""
    found = Fields(line.number, line.text)
    for part in line.text.partition(TIMERS_MARK)[2].split("|")[1:]:
        found.take(part, TIMER_FIELDS, "a timer line")
    return found


# The lines of an iteration, put together


@dataclass
class Window:
    """All that was printed since the iteration line before, up to its own.

    DeepSpeed without Megatron prints no iteration lines: there its last line of timers closes the
    window.
    """

    line: IterationLine | None = None
    last_timers: Fields | None = None
    interval_timers: list[float] = field(default_factory=list)
    """One of each rank, in s."""
    phases: dict[str, float] = field(default_factory=dict)
    """DeepSpeed's timers, in ms."""
    lost_inside: int = 0
    """How often a timer was printed again: the window spans as many lost iteration lines."""
    steps: list[int] = field(default_factory=list)
    """Iterations that DeepSpeed's progress lines name."""
    memory: list[MemoryLine] = field(default_factory=list)
    new_run: bool = False
    iteration: int | None = None
    """Position in the training run, from 1; None where the window is left out."""

    def add_timers(self, line: Fields) -> None:
        """Take one line of timers; of a damaged one only its place counts."""
        if line.values.keys() - {"optimizer_step_ms"}:
            self.last_timers = line
        if line.problem:
            return
        if not self.phases.keys().isdisjoint(line.values):
            self.phases, self.lost_inside = {}, self.lost_inside + 1
        self.phases |= line.values


Entry = IterationLine | Fields | MemoryLine | int | float | str
"""What one line says: a step, an interval timer in s, or that a run begins."""


def _grouped(entries: Sequence[Entry], by_lines: bool) -> list[Window]:
    """Sort the entries of a log into windows; the last one is still open at the log's end."""
    windows = [Window()]
    for entry in entries:
        window = windows[-1]
        # Without iteration lines, some lines follow the timers that close their window.
        closed = windows[-2] if not by_lines and windows[1:] and window == Window() else window
        match entry:
            case IterationLine():
                window.line = entry
                windows.append(Window())
            case Fields():
                window.add_timers(entry)
                if window.last_timers is entry and not by_lines:
                    windows.append(Window())
            case MemoryLine():
                (closed if entry.title == _AFTER_STEP else window).memory.append(entry)
            case int():
                window.steps.append(entry)
            case float():
                closed.interval_timers.append(entry)
            case str():
                window.new_run = True
    return windows


def read_log(path: Path) -> Log:
    """Read one log, and the ``metrics.jsonl`` beside it when it is the same run's.

    A line that does not fit is never an error: it is left out, and listed in ``rejects``. The file
    is read line by line, so its size does not matter.

    Args:
        path: The log; its name may carry the run's settings.

    Returns:
        Records in the order of the log, one an iteration.

    Raises:
        LogError: there is no readable file at ``path``.
    """
    log = Log(path=path, settings=settings_from_name(path.name))
    try:
        with open_log(path) as file:
            if problem := encoding_problem(file):
                log.rejects.append(Reject.of(1, problem, ""))
            else:
                _Reader(log).read(read_lines(file))
    except FileNotFoundError:
        raise LogError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise LogError(f"{path}: is a folder; give a log") from None
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error}") from None
    attach_metrics(log)
    _note_missing(log)
    return log


def read_usable_log(path: Path) -> Log:
    """Read a log that must hold at least one iteration with a loss.

    Raises:
        LogError: the file is missing, empty, not a log, or cut before its first iteration.
    """
    log = read_log(path)
    if any(record.loss is not None for record in log.iterations):
        return log
    if path.stat().st_size == 0:
        raise LogError(f"{path}: is empty")
    if log.recognised:
        raise LogError(f"{path}: no complete iteration with a loss: cut off, or the run failed")
    if log.rejects and "UTF-16" in log.rejects[0].reason:
        raise LogError(f"{path}: {log.rejects[0].reason}")
    raise LogError(f"{path}: is not a training log: none of its lines is known")


class _Reader:
    """Reads lines to entries, and entries to records."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.facts = RunFacts(log)
        self.entries: list[Entry] = []
        self._device: MemoryLine | None = None
        self._profiled = 0
        self._profiled_step: int | None = None

    def reject(self, number: int, reason: str, text: str) -> None:
        self.log.rejects.append(Reject.of(number, reason, text))

    def read(self, lines: Iterable[Line]) -> None:
        before = ""
        for line in lines:
            self._feed(line, before)
            before, self.log.ends_mid_line = line.text, line.cut
        self._finish()

    def _feed(self, line: Line, before: str) -> None:
        text = line.text
        if "<TIMER:" in text:
            timers = PATTERNS["interval_timer"].findall(text)
            self.entries += map(float, timers)
            if len(timers) < text.count("TIMER:interval-time"):
                self.reject(line.number, "an interval timer that cannot be read", text)
        kinds = [kind for mark, kind in _MARKS.items() for _ in range(text.count(mark))]
        kinds += ["iteration"] if any(mark in text for mark in _ITERATION_MARKS) else []
        problem = RUN_TOGETHER if len(kinds) > 1 else "NUL bytes" if "\0" in text else ""
        if line.overlong:
            problem = f"a line of over {MAX_LINE_CHARACTERS} characters"
        if "iteration" in kinds:
            # With a problem, too, it ends an iteration: what came before is not the next one's.
            found = IterationLine(line.number, text, problem) if problem else iteration_line(line)
            self.entries += [found] if found else []
        elif problem:
            self.reject(line.number, problem, text)
        elif not line.cut:  # else the iteration that it belongs to is cut off as well
            self._add(kinds[0] if kinds else "", line, before)

    def _add(self, kind: str, line: Line, before: str) -> None:
        if kind == "timers":
            self.entries.append(timer_line(line))
        elif kind == "progress":
            self._add_progress(line.number, line.text)
        elif kind == "memory":
            self._add_memory(line.number, line.text, before)
        elif not self._add_profile(line.number, line.text) and self.facts.feed(line.text):
            self.entries.append("a run begins")

    def _add_progress(self, number: int, text: str) -> None:
        if "RunningAvgSamplesPerSec=" in text:
            if found := PATTERNS["throughput"].search(text):
                micro_step, step, running, current, allocated, peak = found.groups()
                self.log.throughput.append(
                    ThroughputLine(
                        number,
                        int(step),
                        int(micro_step),
                        _finite(running),
                        _finite(current),
                        float(allocated),
                        float(peak),
                    )
                )
            else:
                self.reject(number, "a throughput line that cannot be read", text)
        found = PATTERNS["progress"].search(text) or PATTERNS["global_step"].search(text)
        if found and int(found[1]):  # DeepSpeed prints step 0 before the first iteration
            self.entries.append(int(found[1]))
        elif not found and ", skipped=" in text:
            self.reject(number, "a progress line that cannot be read", text)

    def _add_memory(self, number: int, text: str, before: str) -> None:
        """DeepSpeed's ``memory_breakdown``: a title, a line of the device, a line of the host."""
        is_host, device = "CPU Virtual" in text, self._device
        self._device = None
        found = PATTERNS["host_memory" if is_host else "device_memory"].search(text)
        if not found:
            self.reject(number, "a damaged memory line", text)
            return
        names = _HOST_MEMORY if is_host else _DEVICE_MEMORY
        figures: dict[str, Any] = dict(zip(names, map(float, found.groups()), strict=True))
        # Lines of other ranks may stand between the line of the device and that of the host.
        if is_host and device and number - device.line <= 4:
            device.host_used_gib, device.host_percent = figures.values()
            return
        line = MemoryLine(number, **figures)
        if not is_host:
            line.title, self._device = _title(before, text), line
        self.log.memory.append(line)
        self.entries.append(line)

    def _add_profile(self, number: int, text: str) -> bool:
        """Take a line of the flops profiler's summary, which is shorter than 60 lines."""
        if PATTERNS["profile_head"].search(text):
            self._profiled, self._profiled_step = 60, None
            return True
        if not self._profiled:
            return False
        self._profiled = 0 if text.startswith("-----") else self._profiled - 1
        if step := PATTERNS["profile_step"].search(text):
            self._profiled_step = int(step[1])
        elif found := PATTERNS["profile"].search(text):
            factors = {"u": 1e-6, "m": 1e-3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
            units = {"FLOPS": "FLOP/s", "MACs": "MAC", "s": "s"}
            label, number_text, prefix, unit = found.groups()
            quantity = label.partition(" = ")[0].strip()
            value = float(number_text) * factors.get(prefix or "", 1.0)
            self.log.profile.append(
                ProfileLine(number, self._profiled_step, quantity, value, units.get(unit or "", ""))
            )
        return bool(step or found)

    def _finish(self) -> None:
        """Make the records, and say what is missing in them."""
        log, entries = self.log, self.entries
        log.recognised |= any(not isinstance(entry, str) for entry in entries)
        lines = [entry for entry in entries if isinstance(entry, IterationLine)]
        _reject_odd_lines(lines)
        *windows, rest = _grouped(entries, bool(lines))
        self.facts.finish(trained=bool(windows))
        if windows:
            self._make_records(windows, rest, bool(lines))
        for entry in entries:
            if isinstance(entry, Fields) and entry.problem:
                self.reject(entry.number, entry.problem, entry.text)
        log.rejects.sort(key=lambda reject: reject.line_number)

    def _make_records(self, windows: list[Window], rest: Window, by_lines: bool) -> None:
        log = self.log
        if by_lines:
            _number_by_lines(windows, log)
        else:
            log.notes.append("no iteration lines: records are DeepSpeed's timers, without loss")
            _number_by_steps(windows)
        windows = _last_run(windows, log)
        _drop_falling(windows)
        if by_lines and rest.phases and not windows[0].phases and any(w.phases for w in windows):
            # This log prints timers behind their iteration line, or lost its first ones.
            log.notes.append("phase times could be of two iterations; left out")
            for window in windows:
                window.phases = {}
        if len(windows) == 1 and not by_lines:
            windows[0].interval_timers = []  # may be cut before its first iteration line
        setup_end = next((m.line for m in log.memory if m.title == _FIRST_TITLE), 0)
        previous, left_out = 0, 0
        for window in windows:
            if window.iteration is None:
                left_out += 1
                continue
            lost = max(0, window.iteration - previous - 1 - left_out)
            if window is windows[0] and window.iteration in window.steps:
                lost = 0  # a run that goes on from a checkpoint
            is_whole = not (lost or window.lost_inside)
            for memory in window.memory if is_whole else ():
                # Without an iteration line, only the titles tell an iteration's lines from others.
                known = by_lines or (memory.title or "").startswith("Engine ")
                memory.iteration = window.iteration if memory.line >= setup_end and known else None
            # Timers may be of an iteration whose own line is lost.
            phases = window.phases if window.lost_inside >= lost else {}
            log.iterations.append(_record(window, phases, window.memory if is_whole else [], log))
            previous, left_out = window.iteration, 0
        timed = [len(w.interval_timers) for w in windows if w.iteration is not None]
        if sum(timed) and log.world_size and sum(timed) != log.world_size * len(timed):
            log.notes.append(
                f"{sum(timed)} interval timers for {log.world_size} ranks x {len(timed)} iterations"
            )


def _finite(text: str) -> float | None:
    """DeepSpeed prints an infinite rate before it has timed an update."""
    return float(text) if math.isfinite(float(text)) else None


def _title(before: str, text: str) -> str | None:
    """The title that the line before prints; None when that is not a title's line."""
    writer = "see_memory_usage] "
    if writer in before:
        title = before.rpartition(writer)[2].strip()
    else:
        title = before.removeprefix(text[: text.find("MA ")]).strip()
        marks = (*_MARKS, *_ITERATION_MARKS, " GB ", "<TIMER", "] [", "elapsed")
        if writer in text or any(mark in title for mark in marks):
            return None
    return title if title.isprintable() and 0 < len(title) <= 120 else None


def _reject_odd_lines(lines: Sequence[IterationLine]) -> None:
    """Reject lines unlike all others of the log: a label or an end of theirs may be damaged."""
    labels = Counter(label for line in lines for label in line.unknown)
    bars = Counter(line.bar_at_end for line in lines)
    for line in lines:
        if len(lines) > 1 and any(labels[label] == 1 for label in line.unknown):
            line.problem = line.problem or "an iteration line with a label that no other line has"
        elif bars[line.bar_at_end] < bars[not line.bar_at_end]:
            line.problem = line.problem or "an iteration line that ends as no other does"


def _number_by_lines(windows: Sequence[Window], log: Log) -> None:
    """Set ``iteration`` by what the line counts: iterations, or else samples or tokens."""
    sound = [(window, line) for window in windows if (line := window.line) and not line.problem]
    batches = (line.values.get("global_batch_size") for _, line in sound)
    printed = {batch for batch in batches if batch}
    if len(printed) == 1 and log.settings.setdefault("global_batch_size", *printed) not in printed:
        log.notes.append("two global batch sizes in one log: the name's or the arguments' is kept")
    for window, line in sound:
        batch: Any = line.values.get("global_batch_size") or log.settings.get("global_batch_size")
        sizes = {"iteration": 1, "samples": batch or 0}
        sizes["tokens"] = sizes["samples"] * line.values.get("seq_length", 0)
        counts = [(line.values.get(name, 0), size) for name, size in sizes.items() if size]
        said = [int(count // size) for count, size in counts if count and count % size == 0]
        window.iteration = next(iter([*said, *window.steps]), None)
        if window.iteration is None:
            line.problem = "an iteration whose number is lost"


def _number_by_steps(windows: Sequence[Window]) -> None:
    """Set ``iteration`` by DeepSpeed's progress lines, and count on from there; else from 1."""
    marked = [(place, min(w.steps)) for place, w in enumerate(windows) if w.steps]
    number = marked[0][1] - marked[0][0] - 1 if marked else 0
    for window in windows:
        number = max(window.steps, default=number + 1 + window.lost_inside)
        sound = window.last_timers is not None and not window.last_timers.problem
        window.iteration = number if sound and number > 0 else None


def _last_run(windows: list[Window], log: Log) -> list[Window]:
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


def _drop_falling(windows: Sequence[Window]) -> None:
    """Leave out iterations whose number does not rise, and one that leaps over the next."""
    numbered = [window for window in windows if window.iteration is not None]
    previous = 0
    for window, after in zip_longest(numbered, numbered[1:]):
        number, reason = window.iteration or 0, ""
        if number == previous:
            reason = "an iteration that was printed before"
        elif number < previous:
            reason = "an iteration number that goes back"
        elif number > previous + 1 and after and (after.iteration or 0) <= number:
            reason = "an iteration number that the next one contradicts"
        if reason:
            window.iteration = None
            line = window.line or window.last_timers
            if line and not line.problem:
                line.problem = reason
        else:
            previous = number


def _record(
    window: Window, phases: Mapping[str, Any], memory: Sequence[MemoryLine], log: Log
) -> Iteration:
    assert window.iteration is not None
    record, line = Iteration(window.iteration, **phases), window.line
    if line is None:
        # The slowest rank ends the iteration.
        timers = window.interval_timers
        record.iteration_s = max(timers) if timers and len(timers) == log.world_size else None
        return record
    record.iteration_s = _iteration_seconds(line, window.interval_timers)
    record.loss = line.loss
    for name in ("grad_norm", "learning_rate", "tflops"):
        setattr(record, name, line.values.get(name))
    record.tokens, record.skipped = line.values.get("tokens"), line.values.get("skipped")
    device, host = ([getattr(m, name) for m in memory] for name in _LARGEST)
    record.device_memory_gib = None if None in device else max(device, default=None)
    record.host_memory_gib = None if None in host else max(host, default=None)
    return record


_LARGEST = ("max_allocated_gib", "host_used_gib")


def _iteration_seconds(line: Fields, timers: Sequence[float]) -> float | None:
    """Return the time of an iteration, in s.

    The paper's fork prints it in s and in ms on the iteration line, and a timer of every rank in
    full precision. Of the two printed times the finer one counts; a timer that rounds to it is the
    printing rank's own and says more digits, unless the ranks differ by more than their noise.
    """
    printed = []  # times, and how far the rounding of each can be off
    for name, unit_s in (("elapsed_s", 1.0), ("interval_s", 1.0), ("elapsed_ms", 1e-3)):
        text = line.texts.get(name, "0")
        if float(text) > 0:
            decimals = len(text.partition(".")[2])
            printed.append((float(text) * unit_s, 0.51 * unit_s * 10.0**-decimals + 1e-12))
    if not printed:
        return None
    seconds, rounding_s = min(printed, key=lambda time: time[1])
    mean, mean_rounding_s = printed[-1]
    if abs(seconds - mean) > rounding_s + mean_rounding_s:
        seconds, rounding_s = mean, mean_rounding_s  # the line stands for several iterations
    close = [t for t in timers if abs(t - seconds) <= rounding_s]
    if not close or max(close) - min(close) > _SAME_TIME_S:
        return seconds
    return min(close, key=lambda t: abs(t - seconds))


def _note_missing(log: Log) -> None:
    """Say which iterations between the first and the last are left out, and which times."""
    numbers = [record.iteration for record in log.iterations]
    step = min((b - a for a, b in pairwise(numbers)), default=1)
    gaps = [(a + step, b - step) for a, b in pairwise(numbers) if b - a > step]
    _note(log, "iterations missing", [f"{a}" if a == b else f"{a} to {b}" for a, b in gaps])
    for phase in ("iteration", *PHASES):
        without = [f"{r.iteration}" for r in log.iterations if r.phase_ms(phase) is None]
        if len(without) < len(numbers):
            _note(log, f"{phase} time missing in iterations", without)


def _note(log: Log, what: str, iterations: Sequence[str]) -> None:
    if iterations:
        more = ", ..." if len(iterations) > _SHOWN else ""
        log.notes.append(f"{what}: {', '.join(iterations[:_SHOWN])}{more}")


# The trainer's metrics.jsonl


def read_metrics(path: Path) -> Metrics:
    """Read a ``metrics.jsonl``; lines that are not an event are counted and left out.

    Raises:
        OSError: the file cannot be read.
    """
    metrics = Metrics(path)
    for line in path.read_bytes().decode(errors="replace").splitlines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        kind = event.get("event") if isinstance(event, dict) else None
        if kind == "start":
            # A second start is a second run in the same file: the last one is the log's.
            metrics = Metrics(path, start=event, rejected_lines=metrics.rejected_lines)
        elif kind == "end":
            metrics.end = event
        elif kind == "evaluation":
            metrics.evaluations.append(event)
        elif kind == "iteration" and isinstance(event.get("iteration"), int):
            metrics.iterations[event["iteration"]] = event
        else:
            metrics.rejected_lines += bool(line.strip())
    return metrics


def attach_metrics(log: Log) -> None:
    """Take over the exact figures of the ``metrics.jsonl`` in the log's folder, if it fits the log.

    Iterations whose lines the log lacks are those of the file. It fits only where its losses round
    to the digits that the log prints, so that a stray file never lends one run the exactness of
    another.
    """
    path = log.path.parent / "metrics.jsonl"
    try:
        metrics = read_metrics(path)
    except OSError:
        return
    if not _fits(log, metrics):
        log.notes.append(f"{path.name} beside {log.path.name} does not fit it; left out")
        return
    if metrics.rejected_lines:
        log.notes.append(f"{path.name}: {metrics.rejected_lines} unreadable lines left out")
    log.metrics = metrics
    records = {record.iteration: record for record in log.iterations}
    for number, event in metrics.iterations.items():
        exact = metrics.loss(number)
        if number not in records:  # its line in the log is damaged or lost
            records[number] = Iteration(number, loss=exact)
        record, seconds = records[number], as_number(event.get("iteration_ms"))
        record.exact_loss = exact
        if record.iteration_s is None and seconds is not None:
            record.iteration_s = seconds / 1000
        for name in (*(f"{phase}_ms" for phase in PHASES), "grad_norm", "learning_rate"):
            if getattr(record, name) is None:
                setattr(record, name, as_number(event.get(name)))
    log.iterations = [records[number] for number in sorted(records)]
    parameters, padded, ranks = (
        value if isinstance(value := metrics.start.get(key), int) else None
        for key in ("parameters", "padded_vocab_size", "num_ranks")
    )
    # The log counts what tensor-parallel ranks share once a rank, the start event once.
    log.parameters = parameters or log.parameters
    log.vocab_size = log.vocab_size or padded
    log.world_size = log.world_size or ranks
    device = metrics.start.get("device")
    if isinstance(device, str) and device:
        # DeepSpeed's line says which accelerator it found; the start event, which one was used.
        log.device = "cpu" if device == "cpu" else "cuda"
        log.device_name = None if device in ("cpu", "cuda") else device


def _fits(log: Log, metrics: Metrics) -> bool:
    pairs = [(record.loss, metrics.loss(record.iteration)) for record in log.iterations]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return bool(known) and all(
        math.isclose(printed, exact, rel_tol=1e-5, abs_tol=1e-12)
        or not (math.isfinite(printed) or math.isfinite(exact))
        for printed, exact in known
    )
