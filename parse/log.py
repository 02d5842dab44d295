"""Reads training logs leniently. Standard library alone.

What a log prints stands in the tables of this file, a row a figure: its label or pattern, its
name, its unit and its type. A new figure is a new row. A line that has a table's marker but does
not fit is left out as a whole, and listed with its number; its figures are missing, not guessed.

Forms known: DeepSpeed 0.3 to 0.19 (timers, progress, memory, throughput, pipelines), the
old and the new Megatron-DeepSpeed, the paper's fork, Megatron-LM, megatron-core and the JSON of
trainers. The exact figures of the
``metrics.jsonl`` beside a log are taken over in :func:`attach_metrics`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from configs.files import json_lines, printable
from parse.composer import joined
from parse.figures import NO_NUMBER, any_spelling, figure
from parse.lines import STATE_NAME, Digest, Line, plain_name, read_lines
from parse.log_name import settings_from_name
from parse.memory import Pairs, Titles
from parse.records import (
    OF_NAME,
    PHASES,
    Iteration,
    Log,
    LogError,
    Metrics,
    Reject,
    Setting,
    as_number,
)
from parse.trainer import COARSEST_S, Entry, as_object, is_json_log, read_entry

CUT_OFF, RUN_TOGETHER = "cut off", "two lines run together"


class Row(NamedTuple):
    """A figure that logs print."""

    name: str
    pattern: str
    """Matches the value behind a label, from end to end; or is searched for, with one group."""
    unit: str = ""
    kind: Callable[[str], Setting] = float
    is_column: bool = False
    """Is it a column of ``iterations.csv``?"""


_DECIMAL = r"\d{1,12}(?:\.\d{0,20})?"
_NUMBER = rf"[-+]?{_DECIMAL}(?:[eE][-+]?\d{{1,3}})?"
_NORM = any_spelling(_NUMBER)
_LOSS = rf"(?:{_NORM}|{NO_NUMBER})"
_INTEGER = r"\d{1,18}"
_WITH_AVERAGE = rf"{_DECIMAL}(?: \(avg {_DECIMAL}\))?"
_WITH_MOE_DETAIL = rf"{_DECIMAL}(?: \([^()]*\))?"

ITERATION_FIELDS = {
    "grad norm": Row("grad_norm", _NORM, kind=figure, is_column=True),
    "learning rate": Row("learning_rate", _NUMBER, is_column=True),
    "TFLOPs": Row("tflops", _DECIMAL, "TFLOP/s", is_column=True),
    "throughput per GPU (TFLOP/s/GPU)": Row("tflops", _WITH_AVERAGE, "TFLOP/s"),
    "compute per GPU (TFLOP/s/GPU)": Row("tflops", _WITH_AVERAGE, "TFLOP/s"),
    "consumed tokens": Row("tokens", _INTEGER, "tokens", int, is_column=True),
    "number of skipped iterations": Row("skipped", _INTEGER, "iterations", int, is_column=True),
    "consumed samples": Row("samples", _INTEGER, "samples", int),
    "elapsed time per iteration (ms)": Row("elapsed_ms", _DECIMAL, "ms"),
    "elapsed time per iteration (s)": Row("interval_s", _DECIMAL, "s"),
    "global batch size": Row("global_batch_size", _INTEGER, "samples", int),
    **dict.fromkeys(("lm loss", "lm_loss"), Row("loss", _LOSS, "nats", figure)),
    "actual seqlen": Row("seq_length", _INTEGER, "tokens", int),
    "number of nan iterations": Row("nan", _INTEGER, "iterations", int),
    "samples per second": Row("samples_per_s", _DECIMAL, "samples/s"),
}
"""Megatron's line at the end of an iteration, by label."""
UNREAD = "{} whose {!r} cannot be read"
_UNREAD_OF_PIPELINE = UNREAD.format("a pipeline line", "loss")
UNREAD_LOSSES = [_UNREAD_OF_PIPELINE] + [
    UNREAD.format("an iteration line", label)
    for label, row in ITERATION_FIELDS.items()
    if row.name == "loss"
]
"""Why lines are left out whose loss alone nobody knows."""
ITERATION_COLUMNS = tuple(row.name for row in ITERATION_FIELDS.values() if row.is_column)
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
_PHASE_NAMES = tuple(dict.fromkeys(row.name for row in TIMER_FIELDS.values()))
_MICRO = "_microstep"
"""Behind a label of one micro-batch alone."""

_GIB = r"\d{1,9}(?:\.\d{1,6})?"
_RATE = r"[-+]?(?:\d{1,12}(?:\.\d{0,20})?(?:[eE][-+]?\d{1,3})?|inf)"
LINES = {
    "interval_timer": rf"<TIMER:interval-time,\s*({_DECIMAL}(?:[eE]-\d{{1,3}})?)\s*>",
    "progress": r"\bstep=(\d{1,12}), skipped=\d{1,12}, lr=\[",
    "global_step": r"/global_step=(\d{1,12}),",
    "throughput": r"epoch=\d{1,9}/micro_step=(?P<micro_step>\d{1,12})"
    r"/global_step=(?P<step>\d{1,12}), "
    rf"RunningAvgSamplesPerSec=(?P<running_samples_per_s>{_RATE}), "
    rf"CurrSamplesPerSec=(?P<current_samples_per_s>{_RATE}), "
    rf"MemAllocated=(?P<allocated_gib>{_GIB})GB, MaxMemAllocated=(?P<max_allocated_gib>{_GIB})GB"
    r"(?!\w)",
    "device_memory": rf"\bMA (?P<allocated_gib>{_GIB}) GB\s+Max_MA (?P<max_allocated_gib>{_GIB}) GB"
    rf"\s+CA (?P<cached_gib>{_GIB}) GB\s+Max_CA (?P<max_cached_gib>{_GIB}) GB(?!\w)",
    "host_memory": rf"CPU Virtual Memory:\s+used = (?P<host_used_gib>{_GIB}) GB, "
    rf"percent = (?P<host_percent>{_GIB})%",
}
"""Lines of a form of their own. DeepSpeed prints GiB and calls them GB."""
PATTERNS = {name: re.compile(pattern) for name, pattern in LINES.items()}

PIPELINE_MARK = "iter time (s):"
_PIPELINE = re.compile(
    rf"\bsteps?: *(?P<iteration>\d{{1,12}})(?: */ *\d{{1,12}})? loss: (?P<loss>{_LOSS}|\S{{0,40}}) "
    rf"(?:[\w ]{{2,40}}: {_LOSS} ){{0,8}}"
    rf"iter time \(s\): (?P<interval_s>{_DECIMAL}) samples/sec: (?:{_DECIMAL}|inf)(?!\.?\d)"
)
"""The line of DeepSpeed's pipeline engine; a loss of several parts comes with its parts."""
_OF_LOSS = re.compile(_LOSS)
_ITERATION_MARKS = ("consumed samples:", "elapsed_time ", "elapsed time per iteration", "lm loss:")
TIMERS_MARK = "time (ms)"
_MARKS = {
    TIMERS_MARK: "timers",
    PIPELINE_MARK: "iteration",
    "global_step=": "progress",
    ", skipped=": "progress",
    "Max_MA": "memory",
    "CPU Virtual": "memory",
}
"""Marks that tell the kind of a line; where two of them stand, two lines have run together."""
_HEAD = re.compile(r"\belapsed_time \d|\biteration +\d+ */|\bconsumed samples:")
_START = re.compile(
    r"iteration\s+(?P<iteration>\d{1,12})\s*/\s*\d{1,12}\s*"
    r"|elapsed_time\s+(?P<elapsed_s>\d{1,9}\.\d{6})\s*"
)
"""The first part of Megatron's iteration line, and of the paper's fork's."""
_LABELLED = re.compile(r"\s*([^:|]{2,60}?)\s*:\s*(.*?)\s*", re.DOTALL)
_AFTER_STEP = "Engine after step"
"""Title of memory that DeepSpeed prints behind the timers of its iteration."""
_FIRST_TITLE = "Engine before forward"
"""All that comes before it is the setup."""
_SHOWN = 5
_REJECT_CHARACTERS = 200


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
    is_coarse: bool = False
    """True where another line may print the same iteration with more digits."""

    @property
    def loss(self) -> float | None:
        """The loss, NaN where the line has none; None where it says nothing of it."""
        loss: float | None = self.values.get("loss")
        skipped = self.values.get("skipped")
        if loss is None and skipped is not None:
            # Megatron prints no loss that is NaN, nor that of a step which the loss scaler skipped.
            return None if skipped and not self.values.get("nan") else math.nan
        return loss

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
            self.problem = UNREAD.format(what, label)
        elif row.name in self.values:
            self.problem = RUN_TOGETHER
        else:
            self.texts[row.name] = text = value.partition(" ")[0]
            self.values[row.name] = row.kind(text)


def iteration_line(line: Line) -> Fields | None:
    """Read an iteration line; None where it holds no field of one."""
    if PIPELINE_MARK in line.text:
        return pipeline_line(line)
    found, head = Fields(line.number, line.text), _HEAD.search(line.text)
    first, *parts = line.text[head.start() if head else 0 :].split("|")
    if start := _START.fullmatch(first):
        found.texts |= {name: text for name, text in start.groupdict().items() if text}
        found.values |= {name: float(text) for name, text in found.texts.items()}
    else:
        parts.insert(0, first)
    last = PATTERNS["interval_timer"].sub("", parts.pop()) if parts else ""
    for part in [*parts, last] if last.strip() else parts:
        found.take(part, ITERATION_FIELDS, "an iteration line")
    if line.cut:
        found.problem = CUT_OFF
    return found if found.values.keys() - {"iteration", "elapsed_s"} else None


def pipeline_line(line: Line) -> Fields:
    """Read the line that DeepSpeed's pipeline engine prints every ``steps_per_print`` steps."""
    found = Fields(line.number, line.text, is_coarse=True)
    if match := _PIPELINE.search(line.text):
        found.texts |= match.groupdict()
        found.values |= {name: figure(text) for name, text in found.texts.items()}
    if not match or not _OF_LOSS.fullmatch(match["loss"]):
        found.problem = _UNREAD_OF_PIPELINE if match else "a pipeline line that cannot be read"
    if line.cut:
        found.problem = CUT_OFF
    return found


def timer_line(line: Line) -> Fields:
    """Read a line of DeepSpeed's timers; labels of other timers are left out."""
    found = Fields(line.number, line.text)
    for part in line.text.partition(TIMERS_MARK)[2].split("|")[1:]:
        found.take(part, TIMER_FIELDS, "a timer line")
    return found


def read_log(path: Path) -> Log:
    """Read one log, and the ``metrics.jsonl`` beside it when it is the same run's.

    A line that does not fit is never an error: it is left out, and listed in ``rejects``. The file
    is read line by line, so its size does not matter.

    Args:
        path: The log; its name may carry the run's settings.

    Returns:
        Records in the order of the log, one an iteration.

    Raises:
        LogError: there is no readable file at ``path``, or it is UTF-16.
    """
    log = Log(path=path, settings=settings_from_name(plain_name(path)))
    reader = _Reader(log)
    digest = Digest()
    for line in joined(read_lines(path)):
        reader.feed(line)
        digest.add(line)
    log.ends_mid_line, log.digest = reader.is_cut, str(digest)
    reader.facts.finish()
    if log.iterations and not reader.by_lines:
        log.notes.append("no iteration lines: records are DeepSpeed's timers, without loss")
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
        raise LogError(
            f"{path}: no complete iteration with a loss: cut off, the run failed, or its program "
            f"words them otherwise (of Hugging Face's Trainer give {STATE_NAME})"
        )
    raise LogError(f"{path}: is not a training log: none of its lines is known")


@dataclass
class _Open:
    """All that was printed since the last iteration ended; it is the next one's."""

    interval_timers: list[float] = field(default_factory=list)
    """One of each rank, in s."""
    phases: dict[str, float] = field(default_factory=dict)
    """DeepSpeed's timers, in ms; the last ones where a timer is printed again."""
    timed: int = 0
    """How often the update's timer is printed."""
    step: int = 0
    """The iteration that DeepSpeed's progress lines name; 0 where there are none."""
    memory: list[dict[str, Any]] = field(default_factory=list)
    new_run: bool = False


class _Reader:
    """Makes records of the lines of a log, one at a time.

    An iteration ends with its iteration line. DeepSpeed without Megatron prints none: there its
    last line of timers ends it.
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        self.facts = RunFacts(log)
        self.open = _Open()
        self.is_cut = False
        """True where the last line is cut off."""
        self.by_lines = False
        """True once an iteration line has been read."""
        self._labels: set[str] = set()
        self._left_out = 0
        """Iteration lines since the last record that were left out."""
        self._is_coarse = False
        """Of the line that ended the last record."""
        self._entry: Entry | None = None
        """The one before, of a trainer's JSON."""
        self._is_json = is_json_log(log.path)
        self._setup_end = 0
        self._titles, self._pairs = Titles(), Pairs()

    def reject(self, number: int, reason: str, text: str) -> None:
        shown = printable(text[:_REJECT_CHARACTERS]).strip()
        self.log.rejects.append(Reject(number, reason, shown))

    def feed(self, line: Line) -> None:  # noqa: C901 - a branch a kind of line
        text = line.text
        if entry := read_entry(line):
            self.log.recognised = True
            self.is_cut = False
            self._end_by_entry(entry)
            return
        self.is_cut = line.cut
        if "<TIMER:" in text:
            timers = PATTERNS["interval_timer"].findall(text)
            self.open.interval_timers += map(float, timers)
            if len(timers) < text.count("TIMER:interval-time"):
                self.reject(line.number, "an interval timer that cannot be read", text)
        kinds = [kind for mark, kind in _MARKS.items() for _ in range(text.count(mark))]
        if PIPELINE_MARK not in text and any(mark in text for mark in _ITERATION_MARKS):
            kinds.append("iteration")
        problem = RUN_TOGETHER if len(kinds) > 1 else ""
        self.log.recognised |= bool(kinds)
        if "memory" not in kinds:
            self._titles.feed(line)
        if "iteration" in kinds:
            # With a problem, too, it ends an iteration: what came before is not the next one's.
            damaged = Fields(line.number, text, problem)
            if found := damaged if problem else iteration_line(line):
                self._end_by_line(found)
        elif problem:
            self.reject(line.number, problem, text)
        elif self._is_json and not kinds and text.strip() and not as_object(line):
            self.reject(line.number, CUT_OFF if line.cut else "no JSON object", text)
        elif line.cut:  # the iteration that it belongs to is cut off as well
            return
        elif "timers" in kinds:
            self._add_timers(timer_line(line))
        elif "progress" in kinds:
            self._add_progress(line.number, text)
        elif "memory" in kinds:
            self._add_memory(line)
        else:
            self.open.new_run |= self.facts.feed(text)

    def _end_by_line(self, line: Fields) -> None:
        """End the open iteration by its line, or reject the line with what belongs to it."""
        if not self.by_lines:
            self._begin_with_lines()
        self._check_labels(line)
        number, iterations = self._number(line), self.log.iterations
        previous = iterations[-1].iteration if iterations else 0
        if not number:
            line.problem = line.problem or "an iteration whose number is lost"
        if number == previous and line.is_coarse != self._is_coarse and not line.problem:
            # Another line of the same iteration, with more digits or fewer.
            self._fill(iterations[-1], line)
            self.log.rounded_losses &= line.is_coarse
            return
        starts_anew = number <= previous
        if starts_anew and number > 1 and not self.open.new_run:
            line.problem = line.problem or "an iteration number that does not rise"
        if line.problem:
            self.reject(line.number, line.problem, line.text)
            self.open, self._left_out = _Open(new_run=self.open.new_run), self._left_out + 1
        else:
            self._append(line, number, number if starts_anew else number - previous)

    def _begin_with_lines(self) -> None:
        """Give what timers have ended so far to the iteration that the log's first line ends."""
        log = self.log
        known = [(name, getattr(r, name)) for r in log.iterations for name in _PHASE_NAMES]
        earlier = {name: value for name, value in known if value is not None}
        self.open.phases = earlier | self.open.phases
        self.open.timed += len(log.iterations)
        self.open.step = self.open.step or (log.iterations[-1].iteration if known else 0)
        self.open.memory = [*log.memory]
        log.iterations.clear()
        self.by_lines = True

    def _check_labels(self, line: Fields) -> None:
        """Find fault with a line whose loss may stand under a damaged label.

        The loss is then missing, and one of its labels is new. Such a loss is not known to be NaN.
        """
        has_new = bool(self._labels) and not self._labels.issuperset(line.unknown)
        if has_new and line.values.get("loss") is None:
            line.problem = line.problem or "an iteration line without a loss and with a new label"
        self._labels |= {*line.unknown}

    def _append(self, line: Fields, number: int, num_iterations: int) -> None:
        """Append the iteration that a line ends.

        Args:
            line: Its line.
            number: Its number.
            num_iterations: Iterations since the last line, this one included.
        """
        if self.open.timed < num_iterations - self._left_out and number != self.open.step:
            self.open.phases = {}  # a line is lost: these may be the iteration's before
        record = self._end(number)
        if len(self.log.iterations) == 1:
            names = ("global_batch_size", "seq_length")
            self.log.stated = {name: size for name in names if (size := line.values.get(name))}
        record.device_memory_gib = _largest(self.open.memory, "max_allocated_gib")
        record.host_memory_gib = _largest(self.open.memory, "host_used_gib")
        self._fill(record, line)
        self._is_coarse, self._left_out = line.is_coarse, 0
        self.log.rounded_losses = line.is_coarse

    def _fill(self, record: Iteration, line: Fields) -> None:
        """Take a line's figures, those with more digits where the record has them already."""
        seconds = _iteration_seconds(line, self.open.interval_timers)
        for name, value, rounding in (("iteration_s", seconds, 6e-4), ("loss", line.loss, 6e-5)):
            known = getattr(record, name)
            is_finer = known is not None and value is not None and not line.is_coarse
            if known is None or (is_finer and abs(value - known) <= rounding):
                setattr(record, name, value)
        found = {name: line.values[name] for name in ITERATION_COLUMNS if name in line.values}
        record.printed = record.printed | found
        self.open = _Open()

    def _end_by_entry(self, entry: Entry) -> None:
        log, records = self.log, self.log.iterations
        if entry.loss is None:  # of an evaluation, or of the run as a whole
            return
        if records and entry.step <= records[-1].iteration:
            log.notes.append(f"the log goes back to step {entry.step}; the later run counts")
            while records and records[-1].iteration >= entry.step:
                records.pop()
            self._entry = None
        before, elapsed = self._entry, entry.elapsed_s
        self._entry, self.by_lines, log.rounded_losses = entry, True, True
        record = Iteration(entry.step, loss=entry.loss, device_memory_gib=entry.device_memory_gib)
        steps = entry.step - (before.step if before else 0)
        began_s = (before.elapsed_s if before else 0.0) if not log.iterations or before else None
        if elapsed is not None and began_s is not None and elapsed - began_s >= COARSEST_S:
            record.iteration_s = (elapsed - began_s) / steps
        figures = {name: getattr(entry, name) for name in ("grad_norm", "learning_rate", "tokens")}
        record.printed = {name: figure for name, figure in figures.items() if figure is not None}
        records.append(record)

    def _number(self, line: Fields) -> int:
        """The iteration that a line names, or that its samples or DeepSpeed's step come to."""
        values, settings = line.values, self.log.settings
        batch: Any = values.get("global_batch_size") or settings.get("global_batch_size") or 0
        if batch and not line.problem:
            settings.setdefault("global_batch_size", batch)
        number, samples = int(values.get("iteration", 0)), values.get("samples", 0)
        if not number and batch and samples % batch == 0:
            number = samples // batch
        return number or self.open.step

    def _end(self, number: int) -> Iteration:
        """Append the record of the open iteration; one that starts anew drops what came before."""
        log, record = self.log, Iteration(number)
        if log.iterations and number <= log.iterations[-1].iteration:
            log.notes.append(f"the log starts anew at iteration {number}; the last run counts")
            log.iterations.clear()
        for name, value in self.open.phases.items():
            setattr(record, name, value)
        for row in self.open.memory:
            # Without an iteration line, only the titles tell an iteration's lines from others.
            titled = self.by_lines or (row["title"] or "").startswith("Engine ")
            if row["line"] >= self._setup_end and titled:
                row["iteration"] = number
        log.iterations.append(record)
        return record

    def _add_timers(self, line: Fields) -> None:
        if line.problem:
            self.reject(line.number, line.problem, line.text)
            return
        self.open.phases |= line.values
        self.open.timed += "update_ms" in line.values
        if not self.by_lines and line.values.keys() - {"optimizer_step_ms"}:
            previous = self.log.iterations[-1].iteration if self.log.iterations else 0
            self._end(self.open.step or previous + 1)
            self.open = _Open()

    def _add_progress(self, number: int, text: str) -> None:
        if "RunningAvgSamplesPerSec=" in text:
            if found := PATTERNS["throughput"].search(text):
                self.log.throughput.append({"line": number, **_figures(found)})
            else:
                self.reject(number, "a throughput line that cannot be read", text)
        found = PATTERNS["progress"].search(text) or PATTERNS["global_step"].search(text)
        if found:  # DeepSpeed prints step 0 before the first iteration
            self.open.step = int(found[1])
        elif ", skipped=" in text:
            self.reject(number, "a progress line that cannot be read", text)

    def _add_memory(self, line: Line) -> None:
        """DeepSpeed's ``memory_breakdown``: a title, a line of the device, a line of the host."""
        number, text, is_host = line.number, line.text, "CPU Virtual" in line.text
        title = None if is_host else self._titles.of_figures(line)
        device = self._pairs.of_host(line) if is_host else None
        found = PATTERNS["host_memory" if is_host else "device_memory"].search(text)
        if not found:
            self.reject(number, "a damaged memory line", text)
        elif device:
            device |= _figures(found)
        else:
            row = {"line": number, "title": title, "iteration": None, **_figures(found)}
            if not is_host:
                self._pairs.add_device(line, row)
            self.log.memory.append(row)
            if title == _FIRST_TITLE:
                self._setup_end = self._setup_end or number
            if title == _AFTER_STEP and self.log.iterations and not self.by_lines:
                row["iteration"] = self.log.iterations[-1].iteration
            else:
                self.open.memory.append(row)


def _figures(found: re.Match[str]) -> dict[str, float | int | None]:
    """The named groups of a line; DeepSpeed prints an infinite rate before it has timed one."""
    return {
        name: int(text) if name.endswith("step") else as_finite(text)
        for name, text in found.groupdict().items()
    }


def as_finite(text: str) -> float | None:
    """Return the number that a text says; None for one that is not finite."""
    return value if math.isfinite(value := float(text)) else None


def _largest(memory: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The largest figure of an iteration's memory lines; None where one of them lacks it."""
    found = [row.get(name) for row in memory]
    return None if None in found else max(filter(None, found), default=None)


def _iteration_seconds(line: Fields, timers: Sequence[float]) -> float | None:
    """Return the time of an iteration, in s, with the most digits that the log has.

    The paper's fork prints it in ms and in s on the iteration line, and a timer of every rank in
    full precision. A finer figure counts where it rounds to the coarser one: the printing rank's
    own timer does, the time of several iterations does not.
    """
    seconds, rounding_s = None, math.inf
    for name, unit_s in (("interval_s", 1.0), ("elapsed_ms", 1e-3), ("elapsed_s", 1.0)):
        text = line.texts.get(name, "0")
        found_s = float(text) * unit_s
        if found_s > 0 and (seconds is None or abs(found_s - seconds) <= rounding_s):
            seconds = found_s
            rounding_s = 0.51 * unit_s * 10.0 ** -len(text.partition(".")[2]) + 1e-12
    if seconds is None:
        return None
    nearest = min(timers, key=lambda timer: abs(timer - seconds), default=seconds)
    return nearest if abs(nearest - seconds) <= rounding_s else seconds


def _note_missing(log: Log) -> None:
    """Say which iterations between the first and the last are left out."""
    numbers = [record.iteration for record in log.iterations]
    step = min((b - a for a, b in pairwise(numbers)), default=1)
    gaps = [(a + step, b - step) for a, b in pairwise(numbers) if b - a > step]
    if gaps:
        shown = [f"{a}" if a == b else f"{a} to {b}" for a, b in gaps[:_SHOWN]]
        more = ", ..." if len(gaps) > _SHOWN else ""
        log.notes.append(f"iterations missing: {', '.join(shown)}{more}")


# The run as a whole: ranks, vocabulary, parameters, arguments

METRICS_FILE = "metrics.jsonl"
"""Beside a log: what our own trainer writes, in full precision."""
_FACTS = (
    Row("world_size", r"\busing world size:\s*(\d{1,18})(?=,|\s|$)", "ranks", int),
    Row("dist_world_size", r"\bdist_world_size=(\d{1,18})(?=\s|$)", "ranks", int),
    Row("dp", r"\busing world size: .*, data-parallel-size: (\d{1,18})(?=,|\s|$)", "ranks", int),
    Row("tensor", r", tensor-model-parallel[- ]size: (\d{1,18})(?=,|\s|$)", "ranks", int),
    Row("pipeline", r", pipeline-model-parallel[- ]size: (\d{1,18})(?=,|\s|$)", "ranks", int),
    Row("vocab_size", r"padded vocab .* dummy tokens \(new size: (\d{1,18})\)", "tokens", int),
    Row("device", r"Setting ds_accelerator to (\w{1,20})\b", "", str),
)
"""Facts that the start of a run prints of it as a whole."""
_FACT_PATTERNS = [(row, re.compile(row.pattern)) for row in _FACTS]
_RANK_PARAMETERS = re.compile(
    r"number of parameters on \(tensor, pipeline\) model parallel rank "
    r"\((\d{1,6}), (\d{1,6})\):\s*(\d{1,18})(?=\s|$|<|\[)"
)
# Megatron's list of arguments; DeepSpeed's own list looks the same behind a ``[file]`` prefix.
_ARGUMENT = re.compile(r"\s{2,3}(\w+) \.{3,} (\d{1,18})\s*$")
_ARGUMENTS = {
    "tensor_model_parallel_size": "tp",
    "data_parallel_size": "dp",
    "num_layers": "num_layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "seq_length": "seq_length",
    "global_batch_size": "global_batch_size",
    "micro_batch_size": "micro_batch_size",
}
_ZERO_CONFIG = (
    Row("subgroup_numel", r"\bzero_config \.{2,}.*\bsub_group_size=(\d{1,15})(?=\s)", "", int),
    Row("offload_ratio", r"\bzero_config \.{2,}.*[ (]ratio=(\d\.\d{1,12})(?=[,)\s])"),
)


def unequal_sizes(first: Log, second: Log) -> list[str]:
    """Say that two logs state other sizes of subgroups, a cause of losses that are not equal."""
    sizes = [log.settings.get("subgroup_numel") for log in (first, second)]
    if None in sizes or sizes[0] == sizes[1]:
        return []
    differ = f"sub_group_size differs ({sizes[0]} and {sizes[1]})"
    return [f"{differ}, which may change a loss's last digits at ZeRO stage 3: give both one size"]


class RunFacts:
    """Collects what a log says of its run as a whole."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self._found: dict[str, Any] = {}
        self._settings: dict[str, Setting] = {}
        self._parameters: dict[tuple[int, int], int] = {}

    def feed(self, text: str) -> bool:
        """Take one line; returns whether it is one that the start of a run prints."""
        if " ...." in text:
            if (argument := _ARGUMENT.match(text)) and argument[1] in _ARGUMENTS:
                self._settings[_ARGUMENTS[argument[1]]] = int(argument[2])
            for row in _ZERO_CONFIG:
                if found := re.search(row.pattern, text):
                    self._settings[row.name] = row.kind(found[1])
            return False
        facts = {row.name: row.kind(m[1]) for row, how in _FACT_PATTERNS if (m := how.search(text))}
        ranks = _RANK_PARAMETERS.findall(text)
        self._parameters |= {(int(tensor), int(pipe)): int(count) for tensor, pipe, count in ranks}
        self._found |= facts
        self.log.recognised |= bool(facts or ranks)
        self.log.vocab_size = self._found.get("vocab_size")
        self.log.device = self._found.get("device")
        return "world_size" in facts

    def finish(self) -> None:
        """Work out what needs the whole log."""
        log, found, parameters = self.log, self._found, self._parameters
        # The plugin has its own sizes of subgroups and its own ratio, beside those of DeepSpeed.
        arguments = self._settings.keys() - {row.name for row in _ZERO_CONFIG}
        log.stated |= {name: self._settings[name] for name in sorted(arguments)}
        for name, fact in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "dp")):
            if fact in found:
                log.stated.setdefault(name, found[fact])
        for name, said in settings_from_name(plain_name(log.path)).items():
            if said != (stated := log.stated.get(name, said)):
                log.notes.append(f"{OF_NAME}{name} {said}, its text {stated}: the text counts")
                log.settings[name] = stated
        log.settings = self._settings | log.settings
        tp, dp, pp = log.settings.get("tp"), log.settings.get("dp"), log.settings.get("pp", 1)
        sizes = [size for size in (tp, dp, pp) if isinstance(size, int)]
        from_name = math.prod(sizes) if len(sizes) == 3 else None
        log.world_size = found.get("world_size") or found.get("dist_world_size") or from_name
        if not parameters:
            return
        tensor, pipeline = (1 + max(places) for places in zip(*parameters, strict=True))
        ranks = found.get("tensor", tp or tensor) * found.get("pipeline", pipeline)
        if len(parameters) == ranks == tensor * pipeline:
            log.parameters = sum(parameters.values())
        else:
            log.notes.append("the number of parameters of some rank is missing")


# The trainer's metrics.jsonl


def read_metrics(path: Path) -> Metrics:
    """Read a ``metrics.jsonl``; lines that are not an event are left out."""
    metrics = Metrics(path)
    for event in json_lines(path):
        kind = event.get("event")
        if kind == "start":
            # A second start is a second run in the same file: the last one is the log's.
            metrics = Metrics(path, start=event)
        elif kind == "end":
            metrics.end = event
        elif kind == "evaluation":
            metrics.evaluations.append(event)
        elif kind == "checkpoint":
            metrics.checkpoints.append(event)
        elif kind == "iteration" and isinstance(event.get("iteration"), int):
            metrics.iterations[event["iteration"]] = event
    return metrics


def attach_metrics(log: Log) -> None:
    """Take over the exact figures of the ``metrics.jsonl`` in the log's folder, if it fits the log.

    Iterations whose lines the log lacks are those of the file. It fits only where its losses round
    to the digits that the log prints, so that a stray file never lends one run the exactness of
    another.
    """
    path = log.path.parent / METRICS_FILE
    if not path.is_file():
        return
    metrics = read_metrics(path)
    if not _fits(log, metrics):
        log.notes.append(f"{path.name} beside {log.path.name} does not fit it; left out")
        return
    log.metrics = metrics
    records = {record.iteration: record for record in log.iterations}
    for number, event in metrics.iterations.items():
        exact = metrics.loss(number)
        record = records.setdefault(number, Iteration(number, loss=exact))
        record.exact_loss, record.event = exact, event
        milliseconds = as_number(event.get("iteration_ms"))
        if record.iteration_s is None and milliseconds is not None:
            record.iteration_s = milliseconds / 1000
        for name in (f"{phase}_ms" for phase in PHASES):
            if getattr(record, name) is None:
                setattr(record, name, as_number(event.get(name)))
        for name in ("grad_norm", "learning_rate"):
            record.printed.setdefault(name, as_number(event.get(name)))
    log.iterations = [records[number] for number in sorted(records)]
    start = {key: value for key, value in metrics.start.items() if isinstance(value, int)}
    # The log counts what tensor-parallel ranks share once a rank, the start event once.
    log.parameters = start.get("parameters") or log.parameters
    log.vocab_size = log.vocab_size or start.get("padded_vocab_size")
    log.world_size = log.world_size or start.get("num_ranks")
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
