"""Finds what ails a run, from its log alone: ``python -m parse diagnose LOG...``.

One pass over a log collects what it says (:class:`_Run`): settings, the losses and gradient norms
of its steps, timers, overflows, tracebacks. Then each illness is judged by a condition of its own,
in the list at the end of this file; illnesses that single lines show are rows of
``illnesses.toml``, which also has every remedy.

Exit code 0: nothing found; 1: illnesses; 2: a log that cannot be read, or has nothing known in it.
"""

from __future__ import annotations

import functools
import json
import math
import re
import signal
import sys
import tomllib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from configs.cli import Parser, add_json, complain
from configs.files import printable
from parse.log import (
    PATTERNS,
    TIMERS_MARK,
    Line,
    RunFacts,
    iteration_line,
    read_lines,
    timer_line,
)
from parse.records import Log, LogError
from parse.run import find_logs
from parse.verdict import DEFAULT_VOCABULARY, LossVerdict, judge_loss

GOES_ON_STEPS = 3
"""A run that does so many steps after an error was not ended by it."""
_EVIDENCE_CHARACTERS = 240
_TRACEBACK = "Traceback (most recent call last)"


# What a line prints of a training step, whatever framework it comes from

_NUMBER = r"[-+]?(?:\d[\d_]*\.?\d*(?:[eE][-+]?\d+)?|nan(?:\.0)?|inf(?:\.0)?|NaN|Infinity)"
_HUGGING_FACE = re.compile(rf"'(loss|grad_norm|learning_rate|epoch)': '?({_NUMBER})'?(?=[,}}\s]|$)")
_BAR = re.compile(
    r"(?:Epoch (\d+)[:/].*?)?(?<!\d)(\d+)/(\d+) (?:\[[\d:]+<|[\d-]+:[\d-]+:[\d-]+ \S )"
)
"""Drawn by tqdm or by rich."""
_LIGHTNING = re.compile(rf"[ ,\[](?:train[_/])?loss(?:_step)?[=:] ?({_NUMBER})(?=[,\]\s]|$)")
_PIPELINE = re.compile(rf"\bsteps: (\d+) loss: ({_NUMBER}) iter time")
_PLAIN = re.compile(
    r"\b(?:global_step|step|iter|iteration|batch)\b[\s:=#\[]{0,4}(\d{1,12})\b.{0,80}?"
    rf"\b(?:train[_ ]|lm |total_)?loss\b\s*[:=]?\s*({_NUMBER})",
    re.IGNORECASE,
)
_NORM = re.compile(rf"\bgrad[_ ]?norm\s*[:=]?\s*({_NUMBER})", re.IGNORECASE)
_NOT_TRAINING = re.compile(r"\b(?:val|eval|valid|validation|test)[\w ]*loss", re.IGNORECASE)
_MEGATRON = ("consumed samples:", "elapsed time per iteration", "lm loss:")


class Step(NamedTuple):
    """The figures that a line has of one step; None where it says nothing."""

    line: int
    framework: str
    position: str
    """The step's number, or its place in a progress bar; tells it from others."""
    loss: float | None = None
    digits: int = 0
    """Significant digits that the loss is printed with."""
    grad_norm: float | None = None
    learning_rate: float | None = None
    skipped: bool = False
    """True where the loss scaler left the update out."""


def read_step(line: Line) -> Step | None:
    """Read the figures of a training step; None where the line is of none or is damaged."""
    text = line.text
    if "loss" not in text and "consumed samples" not in text:
        return None
    if any(mark in text for mark in _MEGATRON):
        return _megatron_step(line)
    if "{'loss'" in text or "'loss': " in text:
        found = {name: _figure(value) for name, value in _HUGGING_FACE.findall(text)}
        if "loss" in found:
            digits = _digits(dict(_HUGGING_FACE.findall(text))["loss"])
            norm, rate = found.get("grad_norm"), found.get("learning_rate")
            return Step(line.number, "Hugging Face Trainer", "", found["loss"], digits, norm, rate)
    bar = _BAR.search(text)
    if bar and bar[2] != "0" and (loss := _LIGHTNING.search(text, bar.end())):
        framework = "Lightning" if bar[1] is not None else "a progress bar"
        return _step(line, framework, f"{bar[1]}:{bar[2]}", loss[1])
    if found_step := _PIPELINE.search(text):
        return _step(line, "DeepSpeed's pipeline", found_step[1], found_step[2])
    if not _NOT_TRAINING.search(text) and (found_step := _PLAIN.search(text)):
        return _step(line, "a training loop", found_step[1], found_step[2])
    return None


def _megatron_step(line: Line) -> Step | None:
    found = iteration_line(line)
    if found is None or found.problem:
        return None
    position = found.texts.get("iteration") or found.texts.get("samples", "")
    norm, rate = found.values.get("grad_norm"), found.values.get("learning_rate")
    digits, skipped = _digits(found.texts.get("loss", "")), bool(found.values.get("skipped"))
    return Step(line.number, "Megatron", position, found.loss, digits, norm, rate, skipped)


def _step(line: Line, framework: str, position: str, loss: str) -> Step:
    norm = _NORM.search(line.text)
    grad_norm = _figure(norm[1]) if norm else None
    return Step(line.number, framework, position, _figure(loss), _digits(loss), grad_norm)


def _figure(text: str) -> float:
    return float(text.removesuffix(".0") if text.startswith(("nan", "inf")) else text)


def _digits(text: str) -> int:
    mantissa = re.split("[eE]", text)[0]
    return len(re.sub(r"\D", "", mantissa).lstrip("0"))


# Illnesses and what settings are called


class Illness(NamedTuple):
    """Something that is wrong with a run."""

    name: str
    line: int
    """Line of the log that shows it first, from 1."""
    evidence: str
    """The log's own words or figures."""

    @property
    def remedy(self) -> str:
        """Return what to do about it."""
        return known()[self.name].remedy


@dataclass(frozen=True)
class Kind:
    """A row of ``illnesses.toml``."""

    remedy: str
    signs: list[str] = field(default_factory=list)
    """A line that matches one of these patterns shows the illness."""
    words: list[str] = field(default_factory=list)
    """Every such line has one of these."""
    fewest: int = 1
    """Lines that it takes."""
    ends_run: bool = False
    """True where a run does not go on after it; of a run that did, it is not told."""
    frames: str = ""
    """Functions of a traceback of the device's allocator that tell what was allocated."""
    any_frame: bool = False
    """True where any frame tells, not the innermost of those that are known."""

    @functools.cached_property
    def any_sign(self) -> re.Pattern[str]:
        """All signs in one pattern."""
        return re.compile("|".join(f"(?:{sign})" for sign in self.signs))


@functools.cache
def known() -> dict[str, Kind]:
    """Return every illness by its name."""
    text = Path(__file__).with_name("illnesses.toml").read_text(encoding="utf-8")
    return {name: Kind(**row) for name, row in tomllib.loads(text).items()}


@functools.cache
def _wordings() -> tuple[dict[str, list[re.Pattern[str]]], dict[str, re.Pattern[str]]]:
    """Patterns of settings and of software, by name."""
    table = tomllib.loads(Path(__file__).with_name("wordings.toml").read_text(encoding="utf-8"))
    settings = {name: list(map(re.compile, rows)) for name, rows in table["settings"].items()}
    return settings, {name: re.compile(row) for name, row in table["software"].items()}


def _quoted(text: str, sign: re.Match[str] | None = None) -> str:
    """A line of a log as evidence; of a long line the part around its sign."""
    end = max(sign.end(), _EVIDENCE_CHARACTERS) if sign else _EVIDENCE_CHARACTERS
    before, after = "..." * (end > _EVIDENCE_CHARACTERS), "..." * (end < len(text))
    part = " ".join(printable(text[end - _EVIDENCE_CHARACTERS : end]).split())
    return f"{before}{part}{after}"


_BLOCK = re.compile(r'^\s*"(\w+)": \{\s*$')
_DEVICE = re.compile(r'^\s*"device": "(\w+)"')
_OVERFLOW = re.compile(
    r"OVERFLOW! (?:Rank \d+ )?Skipping step\."
    r"(?: Attempted loss scale: ([\d.]+)(?:, reducing to ([\d.]+))?| Gradients are non-finite)?"
)
_AT_MINIMUM = "Current loss scale already at minimum"
_SKIPPED = re.compile(r"\bskipped=(\d+)")
_TQDM = re.compile(r"\| *(\d+)/\d+ \[[\d:]+<")

_FRAME = re.compile(r'File "([^"]+)", line \d+, in (\w+)|^\W*(\S+\.py):\d+ in (\w+)')
_DEVICE_MEMORY = re.compile(
    r"(?:CUDA|HIP|NPU|XPU) out of memory\. Tried to allocate|"
    r"(?:torch\.)?(?:cuda\.)?OutOfMemoryError: |"
    r"CUDA error: out of memory|Cuda failure (?:\d+ )?'out of memory'"
)
_NOT_INNER = {"initialize", "wrapped_fn", "wrapper", "decorate_context", "_call_impl"}
_PHASES = (
    ("saving", re.compile(r"(?i)saving (?:model )?checkpoint|save_checkpoint|Saving model")),
    ("loading", re.compile(r"(?i)loading checkpoint shards|from_pretrained|load_checkpoint|"
                           r"resuming from")),
)  # fmt: skip
_BUILT = re.compile(
    r"(?:-MF|--dependency-output) (\S+)\.o\.d .*-DTORCH_EXTENSION_NAME=(\w+?)(?:_v\d+)?(?=\s)"
)
"""A C++ or CUDA file of an op; torch numbers the builds of one op by a version."""
_ERROR = re.compile(
    r"^(?:\[?[\w-]*\d\]?:\s*)*((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Failure))(?::\s*(.*))?$"
)
_RETURN_CODE = re.compile(r"exits with return code = (-?\d+)|\bexitcode\s*: (-?\d+)")
_TRAINED = re.compile(
    r"\[after training (?:ends|is done)\]|'train_runtime': |`Trainer\.fit` stopped"
)


class _Fact(NamedTuple):
    """A setting that the log states."""

    value: str
    line: int
    text: str


class _Run:
    """Collects a log's figures, line by line; lines are not kept."""

    def __init__(self) -> None:
        self.facts: dict[str, _Fact] = {}
        """The last word of the log on each setting."""
        self.software: set[str] = set()
        self.num_lines = self.num_steps = self.num_progress = 0
        self.signs: dict[str, Illness] = {}
        """Illnesses that lines have shown, at the first of them."""
        self.shown_at: dict[str, list[int]] = {}
        """How many steps there were at each line that showed an illness."""
        self.losses: list[tuple[int, float]] = []
        """Line and loss of each step; of norms the same."""
        self.norms: list[tuple[int, float]] = []
        self.digits = 0
        self.zero_loss_without_norm = False
        self.steps_since_rate_rose: int | None = None
        self.shares: list[tuple[int, float, float]] = []
        """Line, the update's share of an iteration, and its ms."""
        self.overflows: list[tuple[int, str]] = []
        self.overflowed: deque[bool] = deque(maxlen=_LAST)
        """True for each of the last steps that overflowed."""
        self.at_minimum: tuple[int, str] | None = None
        self.exit: Illness | None = None
        self.log = Log(Path())
        self._of_log = RunFacts(self.log)
        self._position = self._block = self._bar = self._phase = self._host = ""
        self._highest_rate = -1.0
        self._overflow_open = self._in_traceback = False
        self._phases: dict[str, float] = {}
        self._frames: dict[str, deque[str]] = {}
        self._phase_at = self._trained_at = -1
        self._built: dict[tuple[str, str], int] = {}
        self._kinds = {name: kind for name, kind in known().items() if kind.signs}

    def number(self, name: str) -> float | None:
        """Return a setting as a number; None where the log does not state it as one."""
        try:
            return float(self.facts[name].value) if name in self.facts else None
        except ValueError:
            return None

    def went_on(self, name: str) -> bool:
        """Return whether some steps followed the last line that showed an illness."""
        return self.num_steps - self.shown_at.get(name, [self.num_steps])[-1] >= GOES_ON_STEPS

    def read(self, lines: Iterable[Line]) -> None:
        """Take all lines of a log."""
        for line in lines:
            self.num_lines, line = line.number, line._replace(text=line.source + line.text)
            self._take_overflow(line)
            step = read_step(line)
            if step is None:
                self._take_facts(line)
                self._take_memory(line)
                self._take_signs(line)
                self._take_failure(line)
                if TIMERS_MARK in line.text and not line.cut:
                    self._take_timers(line)
            # A progress bar is drawn again, and several ranks print the same step.
            elif not (step.position and step.position == self._position):
                self._position = step.position
                self._take_step(step)
        if self._overflow_open:
            self._end_step()
        self._of_log.finish()
        if self.log.world_size:
            self.facts.setdefault("world", _Fact(str(self.log.world_size), 0, ""))

    def _show(self, name: str, line: int, evidence: str) -> None:
        self.signs.setdefault(name, Illness(name, line, evidence))
        self.shown_at.setdefault(name, []).append(self.num_steps)

    def _take_step(self, step: Step) -> None:
        self.software.add(step.framework)
        self.num_steps += 1
        if step.learning_rate is not None:
            rises = step.learning_rate > self._highest_rate
            since = self.steps_since_rate_rose
            self.steps_since_rate_rose = 0 if rises or since is None else since + 1
            self._highest_rate = max(self._highest_rate, step.learning_rate)
        if step.loss is not None:
            self.losses.append((step.line, step.loss))
            self.digits = max(self.digits, step.digits)
        if step.grad_norm is not None:
            self.norms.append((step.line, step.grad_norm))
            self.zero_loss_without_norm |= step.loss == 0 and not math.isfinite(step.grad_norm)
        if step.skipped:  # Megatron says itself that a step was left out
            if not self._overflow_open:
                self.overflows.append((step.line, "number of skipped iterations is not 0"))
            self._overflow_open = True
            self._end_step()
        elif not self._bar:
            self._end_step()

    def _take_facts(self, line: Line) -> None:
        text = line.text
        settings, software = _wordings()
        self.software |= {name for name, pattern in software.items() if pattern.search(text)}
        self._of_log.feed(text)
        for name, patterns in settings.items():
            for found in filter(None, (pattern.search(text) for pattern in patterns)):
                self.facts[name] = _Fact(found[1], line.number, _quoted(text))
        # DeepSpeed prints its JSON over several lines; a device is of the block around it.
        if block := _BLOCK.match(text):
            self._block = block[1]
        elif self._block == "offload_optimizer" and (device := _DEVICE.match(text)):
            if device[1] != "none":
                self.facts["offload"] = _Fact(device[1], line.number, _quoted(text))
            self._block = ""

    def _take_overflow(self, line: Line) -> None:
        """The loss scaler's words, and signs that a step went by."""
        text = line.text
        progress = PATTERNS["progress"].search(text)
        if progress or PATTERNS["global_step"].search(text):
            self.software.add("DeepSpeed")
            self.num_progress += 1
        if found := _OVERFLOW.search(text):
            self.overflows.append((line.number, found[0]))
            if self._overflow_open:
                self._end_step()
            self._overflow_open = True
            if found[1] and found[1] == found[2]:
                self.at_minimum = self.at_minimum or (line.number, found[0])
        elif _AT_MINIMUM in text:
            self.at_minimum = (line.number, _AT_MINIMUM)
        elif progress:
            # DeepSpeed's own count, which its scaler's words may be missing beside.
            steps, skipped = int(progress[1]), int(_SKIPPED.findall(text)[0])
            if steps >= _FEWEST_OVERFLOWS and skipped >= _MOST * steps:
                more = skipped - len(self.overflows)
                self.overflows += [(line.number, f"skipped={skipped}")] * more
                self.overflowed.extend([True] * min(steps, _LAST))
        elif ("it/s" in text or "s/it" in text) and (bar := _TQDM.search(text)):
            # A bar may be drawn again for the same step.
            if self._bar and bar[1] != self._bar:
                self._end_step()
            self._bar = bar[1]

    def _end_step(self) -> None:
        self.overflowed.append(self._overflow_open)
        self._overflow_open = False

    def _take_timers(self, line: Line) -> None:
        """DeepSpeed's timers; older releases print the phases on lines of their own."""
        timers = timer_line(line)
        if timers.problem or not timers.values:
            return
        self.software.add("DeepSpeed")
        self._phases |= timers.values
        if "update_ms" in timers.values:
            parts = [self._phases.get(f"{name}_ms") for name in ("forward", "backward", "update")]
            update_ms, self._phases = self._phases["update_ms"], {}
            if None not in parts and (total := sum(filter(None, parts))):
                self.shares.append((line.number, update_ms / total, update_ms))

    def _take_memory(self, line: Line) -> None:
        """Tracebacks of the device's allocator, and what the host was doing when it ran out."""
        text = line.text
        if _TRACEBACK in text:
            self._frames[text[: text.index(_TRACEBACK)].strip()] = deque(maxlen=80)
        elif ".py" in text and " in " in text and (frame := _FRAME.search(text)):
            # By the rank's prefix, since tracebacks of several ranks mix.
            if len(self._frames) > 64:
                self._frames.clear()
            own = self._frames.setdefault(text[: frame.start()].strip(), deque(maxlen=80))
            own.append(frame[2] or frame[4])
        elif error := _DEVICE_MEMORY.search(text):
            frames = self._frames.pop(text[: error.start()].strip(), None)
            if frames is None:
                frames = next(iter(self._frames.values()), deque())
            self._show(_allocated(frames), line.number, _quoted(text, error))
        for phase, pattern in _PHASES:
            if pattern.search(text):
                self._phase, self._phase_at = phase, self.num_steps
        if host := PATTERNS["host_memory"].search(text):
            self._host = f", last seen: {host[0]}"

    def _take_signs(self, line: Line) -> None:
        """Signs of ``illnesses.toml``, and ops that are compiled a second time."""
        text = line.text
        if built := _BUILT.search(text):
            source, name = built.groups()
            first = self._built.setdefault((source, name), line.number)
            if first != line.number:
                said = f"{name}: {source} is compiled again, after line {first}"
                self._show("ops-recompile", line.number, _quoted(said))
        for name, kind in self._kinds.items():
            found = any(word in text for word in kind.words) and kind.any_sign.search(text)
            if found and name == "host-memory":
                doing = self._phase if self._phase_at == self.num_steps else ""
                doing = doing or ("training" if self.num_steps else "setting up")
                evidence = f"{_quoted(text, found)} (while {doing}{self._host})"
                self._show(name, line.number, evidence)
            elif found:
                self._show(name, line.number, _quoted(text, found))

    def _take_failure(self, line: Line) -> None:
        """Keep the first error that a traceback ends with since training last went on."""
        text, name = line.text, "unknown-failure"
        if _TRACEBACK in text:
            self._in_traceback = True
        elif self._in_traceback and (error := _ERROR.match(text.rstrip())):
            self._in_traceback = False
            if self.went_on(name):
                del self.signs[name]
            if name not in self.signs:
                message = f"{error[1]}: {error[2]}" if error[2] else error[1]
                self._show(name, line.number, _quoted(message))
        elif (found := _RETURN_CODE.search(text)) and (code := int(found[1] or found[2])):
            said = found[0]
            if code < 0:
                signals = {one.value: one.name for one in signal.Signals}
                said += f" ({signals.get(-code, 'a signal')})"
            if code == -signal.SIGABRT and self._trained_at == self.num_steps:
                name, said = "abort-at-exit", f"{said}, after training had ended"
            self.exit = self.exit or Illness(name, line.number, said)
        elif _TRAINED.search(text):
            self._trained_at = self.num_steps


def _allocated(frames: Iterable[str]) -> str:
    """Name what was allocated: saving and loading by any frame, the rest by the innermost one."""
    sorts = {name: kind for name, kind in known().items() if kind.frames}
    inwards = list(frames)
    for name, kind in sorts.items():
        if kind.any_frame and any(re.fullmatch(kind.frames, frame) for frame in inwards):
            return name
    for frame in reversed(inwards):
        for name, kind in sorts.items():
            innermost = not kind.any_frame and frame not in _NOT_INNER
            if innermost and re.fullmatch(kind.frames, frame.lower()):
                return name
    return "device-memory"


# The conditions

Found = Iterator[Illness]
_STANDSTILL = ((6, 3), (4, 8), (0, 20))
"""Significant digits of a printed loss, and how many equal ones are no coincidence."""
_FALL_TO_ZERO = 0.05
"""A loss that was above this and is 0 from one step to the next was not learned away."""
_FEWEST_LOSSES = 6
"""Below this, first and last third are too few to tell a direction from noise."""
_STEPS_AT_FULL_RATE = 7
_WAVERS = 0.02
"""Share of itself that a loss moves by from batch to batch."""
_FEWEST_NORMS = 20
_FAR = 20
"""A norm never within this factor of the clip value is not clipped by it."""
_LAST = 20
_FEWEST_OVERFLOWS = 5
_MOST, _SOME = 0.7, 0.2
"""Shares of the last steps: so many mean every step, so many that it was not a bad batch."""
_FEWEST_TIMED = 4
_DROPS = ((0, 15, 2), (0, 18, 9))
"""First and last release that drop gradients, DeepSpeed pull requests 6550, 7967 and 7981."""
_LEAVES_SINCE = (0, 18, 0)
_LEAVES = re.compile(r"Mixtral|Qwen2Moe|Qwen3Moe")
"""Classes of experts that DeepSpeed's own default makes leaves."""


def _loss(run: _Run) -> Found:
    """The first that holds: a loss that is NaN also stands still."""
    bad = next(((line, loss) for line, loss in run.losses if not math.isfinite(loss)), None)
    if bad is not None:
        before = [f"{loss:g}" for line, loss in run.losses if line < bad[0]]
        last = before[-1] if before else "none"
        text = f"the loss is {bad[1]} for the first time; the last finite one: {last}"
        yield Illness("loss-nan", bad[0], text)
    elif still := _standstill(run):
        yield still
    elif run.losses:
        first_line, verdict = run.losses[0][0], _verdict(run)
        if verdict.word == "diverged":
            yield Illness("loss-diverging", first_line, f"the loss {verdict.text}")
        elif verdict.word == "undecided" and (text := _flat(run)):
            yield Illness("loss-frozen", first_line, text)


def _verdict(run: _Run) -> LossVerdict:
    finite = [loss for _, loss in run.losses if math.isfinite(loss)]
    return judge_loss(enumerate(finite)) if len(finite) >= _FEWEST_LOSSES else LossVerdict("")


def _standstill(run: _Run) -> Illness | None:
    values = [loss for _, loss in run.losses]
    length = 0
    while length < len(values) and values[-1 - length] == values[-1]:
        length += 1
    enough = next(count for digits, count in _STANDSTILL if run.digits >= digits)
    if length < enough:
        return None
    # A loss that is printed as 0 may just be small; one that fell there at once is not.
    before = values[-1 - length] if length < len(values) else None
    if values[-1] == 0 and before is not None and before <= _FALL_TO_ZERO:
        return None
    named = judge_loss(enumerate([values[-1]] * length), run.log.vocab_sizes).text
    text = f"the loss is {named.partition(' from')[0]}: {values[-1]} in the last {length} steps"
    return Illness("loss-frozen", run.losses[-length][0], text)


def _flat(run: _Run) -> str:
    """Says of a loss that it only wavers, though it is worse than a guess; else empty.

    A model guesses evenly before it has learned anything, which costs ln(vocabulary); the first
    steps at the full learning rate bring it there at the latest.
    """
    losses, sizes = [loss for _, loss in run.losses], [*run.log.vocab_sizes, DEFAULT_VOCABULARY]
    guess, low, high = math.log(sizes[0]), min(losses), max(losses)
    if (run.steps_since_rate_rose or 0) < _STEPS_AT_FULL_RATE:
        return ""
    if low < guess or high - low > _WAVERS * low:
        return ""
    text = f"the loss stays between {low:.5g} and {high:.5g} for {len(losses)} steps"
    return f"{text}, worse than an even guess: ln({sizes[0]}) = {guess:.5g}"


def _norms(run: _Run) -> Found:
    """Norms that are not finite at the end, and a clip value that always or never bites."""
    last, clip = run.norms[-_LAST:], run.number("clip")
    bad = [norm for _, norm in last if not math.isfinite(norm)]
    if bad and len(bad) >= 3 and 2 * len(bad) >= len(last) and last[-1][1] is bad[-1]:
        good = [place for place, (_, norm) in enumerate(run.norms) if math.isfinite(norm)]
        first_bad = run.norms[good[-1] + 1 if good else 0][0]
        more = ", and the loss is printed as 0" if run.zero_loss_without_norm else ""
        yield Illness(
            "norm-nan", first_bad, f"the gradient norm is {bad[-1]} from here to the end{more}"
        )
        return
    norms = [norm for _, norm in run.norms if math.isfinite(norm)]
    if len(norms) < _FEWEST_NORMS or not clip:
        return
    line, count, middle = run.norms[-1][0], f"of {len(norms)} norms", median(norms)
    if min(norms) > clip and middle > 2 * clip:
        text = f"clip value {clip:g}, smallest {count} {min(norms):g}, median {middle:g}"
        yield Illness("clipping-always", line, text)
    elif max(norms) * _FAR < clip:
        yield Illness(
            "clipping-never", line, f"clip value {clip:g}, largest {count} {max(norms):g}"
        )


def _overflows(run: _Run) -> Found:
    """Overflows that the scale gets over are a part of fp16; those at the end are not."""
    count, steps = len(run.overflows), len(run.overflowed)
    share = sum(run.overflowed) / steps if steps else 0.0
    if run.at_minimum and share >= _SOME:
        line, text = run.at_minimum
        yield Illness("overflow-every-step", line, f"{text}; {count} overflows in all")
    elif count >= _FEWEST_OVERFLOWS and share >= _MOST:
        line, text = run.overflows[0]
        more = f"{sum(run.overflowed)} of the last {steps} steps overflowed"
        if "Gradients are non-finite" in text:
            yield Illness("norm-nan", line, f"{text}; {more}")
            return
        scaled = [said for _, said in run.overflows if said.startswith("OVERFLOW!")]
        latest = scaled[-1].rpartition(". ")[2] if scaled else ""
        more += f", at the end: {latest}" if latest else ""
        yield Illness("overflow-every-step", line, f"{text}; {more}")


def _step_share(run: _Run) -> Found:
    """The median tells; the first iteration sets up."""
    if len(run.shares) < _FEWEST_TIMED:
        return
    _, shares, updates = zip(*run.shares[1:], strict=True)
    if (share := median(shares)) > 0.5:
        text = f"step takes {share:.0%} of forward, backward and step"
        text += f" (medians of {len(shares)}: {median(updates):.0f} ms a step)"
        yield Illness("step-over-half", run.shares[0][0], text)


def _dropped_gradients(run: _Run) -> Found:
    facts, version = run.facts, _version(run)
    if version is None or not _DROPS[0] <= version <= _DROPS[1]:
        return
    is_offloaded = "offload" in facts and run.number("stage") in (1, 2)
    if is_offloaded and run.number("accumulation") != 1:
        steps = facts["accumulation"].value if "accumulation" in facts else "not stated"
        text = f"DeepSpeed {facts['version'].value}, stage {facts['stage'].value}, optimizer "
        text += f"on the {facts['offload'].value.replace('True', 'cpu')}, accumulation {steps}"
        yield Illness("dropped-gradients", facts["offload"].line, text)


def _experts(run: _Run) -> Found:
    facts, version = run.facts, _version(run)
    experts = facts.get("experts") or facts.get("experts_counted")
    if experts is None or "leaf" in facts or run.number("stage") != 3:
        return
    covered = version is not None and version >= _LEAVES_SINCE and _LEAVES.search(experts.text)
    # Of an unknown release it is told only when ranks did wait for each other in vain.
    if not covered and (version is not None or "collective-timeout" in run.signs):
        name = f"DeepSpeed {facts['version'].value}" if version else "DeepSpeed"
        text = f"{experts.text} under ZeRO-3 of {name}, no leaf modules in the log"
        yield Illness("experts-without-leaf", experts.line, text)


def _settings(run: _Run) -> Found:
    """Illnesses that a single setting, or two of them, lead to."""
    facts = run.facts
    offload = facts["offload"].value if "offload" in facts else ""
    gpus, world = run.number("gpus") or 0, run.number("world") or 1
    for name, fact, holds in (
        ("buckets-1e9", "reduce_bucket", (run.number("reduce_bucket") or 0) >= 1e9),
        ("one-process-many-gpus", "gpus", gpus > 1 and world == 1),
        ("one-thread-for-offload", "one_thread", offload in ("cpu", "True")),
    ):
        if fact in facts and holds:
            yield Illness(name, facts[fact].line, facts[fact].text)


def _signs(run: _Run) -> Found:
    """Those with enough lines; of those that end a run, where it did end."""
    for name, illness in run.signs.items():
        kind, count = known()[name], len(run.shown_at[name])
        if count < kind.fewest or (kind.ends_run and run.went_on(name)):
            continue
        counted = count > 1 and kind.signs and name != "host-memory"
        more = f" ({count} such lines)" if counted else ""
        yield illness._replace(evidence=f"{illness.evidence}{more}")


def _exit(run: _Run) -> Found:
    """An end by an exit code or a signal, where no error was printed."""
    if run.exit is not None and (
        "unknown-failure" not in run.signs or run.went_on("unknown-failure")
    ):
        yield run.exit


def _version(run: _Run) -> tuple[int, ...] | None:
    fact = run.facts.get("version")
    return tuple(map(int, fact.value.split("."))) if fact else None


CONDITIONS: tuple[Callable[[_Run], Found], ...] = (
    _overflows, _loss, _norms, _signs, _step_share, _dropped_gradients, _experts, _settings, _exit,
)  # fmt: skip


def _not_judged(run: _Run) -> Iterator[str]:
    """Say what could not be judged, and what the log lacks."""
    if not run.losses:
        text = "whether it learns: no loss that is known here"
        if run.num_progress:
            text += f" ({run.num_progress} lines of DeepSpeed's own progress)"
            text += "; print the loss of each step"
        yield text
    elif len(run.losses) < _FEWEST_LOSSES:
        yield f"whether the loss falls: {len(run.losses)} losses are too few"
    elif not any(_loss(run)) and (verdict := _verdict(run)).word == "undecided":
        yield f"whether the loss falls: {verdict.text}"
    if not run.norms:
        yield "gradient norms and clipping: no line with a norm"
    elif not run.number("clip"):
        yield "clipping: the log does not state the clip value"
    if len(run.shares) < _FEWEST_TIMED:
        yield "the share of the optimizer step: no timers (wall_clock_breakdown: true)"
    if "DeepSpeed" in run.software and "version" not in run.facts:
        yield "faults of certain releases: the log does not state DeepSpeed's version"


# One log from its first line to its illnesses, and the command


@dataclass
class Diagnosis:
    """All that was found in a log."""

    path: Path
    num_lines: int
    num_steps: int
    software: list[str]
    illnesses: list[Illness]
    """In the order of the log."""
    not_judged: list[str]
    """Questions that the log leaves open."""


def diagnose(path: Path) -> Diagnosis:
    """Read a log once, and keep no line of it.

    Raises:
        LogError: it cannot be read, or is no text.
    """
    run = _Run()
    run.read(read_lines(path))
    every = sorted((i for condition in CONDITIONS for i in condition(run)), key=lambda i: i.line)
    # Two conditions may find one illness; the line that shows it first counts.
    found = list({illness.name: illness for illness in reversed(every)}.values())[::-1]
    names = {illness.name for illness in found}
    ends = {name for name in names if known()[name].ends_run} - {"unknown-failure"}
    # An update that overflows has no norm.
    hidden = {"norm-nan"} if "overflow-every-step" in names else set()
    if ends or {"recompiles", "overflow-every-step"} & names:
        # The rest of the log's errors follow from the one that is known.
        hidden.add("unknown-failure")
    kept = [illness for illness in found if illness.name not in hidden]
    steps, software = run.num_steps, sorted(run.software)
    return Diagnosis(path, run.num_lines, steps, software, kept, list(_not_judged(run)))


def main(argv: Sequence[str]) -> int:
    """Diagnose logs; returns the exit code."""
    parser = Parser("python -m parse diagnose", _ABOUT)
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="a log, or a folder")
    add_json(parser)
    arguments = parser.read(argv)
    found, complaints = [], []
    for given in arguments.logs:
        try:
            # A folder is searched; whatever else is given is read as a log.
            paths = find_logs(given) if given.is_dir() else [given]
            found += [_known(diagnose(path)) for path in paths]
        except LogError as error:
            complaints.append(str(error))
    sys.stdout.write(_as_json(found) if arguments.json else "\n".join(map(_as_text, found)))
    for text in complaints:
        complain(f"parse diagnose: error: {text}")
    return 2 if complaints else int(any(one.illnesses for one in found))


_ABOUT = """``python -m parse diagnose LOG...``: what ails runs, and what to do about it.

Exit code 0: nothing found; 1: illnesses; 2: a log that cannot be read, or has nothing known in it.
"""


def _known(found: Diagnosis) -> Diagnosis:
    if not (found.software or found.num_steps or found.illnesses):
        reason = "is empty" if not found.num_lines else "nothing in it is known here"
        raise LogError(f"{found.path}: {reason}: not a training log?")
    return found


def _as_json(found: list[Diagnosis]) -> str:
    logs: list[dict[str, Any]] = []
    for one in found:
        rows = [{**illness._asdict(), "remedy": illness.remedy} for illness in one.illnesses]
        about = {"log": str(one.path), "lines": one.num_lines, "steps": one.num_steps}
        more = {"software": one.software, "illnesses": rows, "not_judged": one.not_judged}
        logs.append(about | more)
    every = [{"log": log["log"], **row} for log in logs for row in log["illnesses"]]
    return json.dumps({"illnesses": every, "logs": logs}, indent=2) + "\n"


def _as_text(one: Diagnosis) -> str:
    of = f" of {', '.join(one.software)}" if one.software else ""
    lines = [f"{printable(str(one.path))}: {one.num_lines} lines{of}, {one.num_steps} steps"]
    for illness in one.illnesses:
        lines.append(f"  {illness.name}, line {illness.line}: {illness.evidence}")
        lines.append(f"    {illness.remedy}")
    if not one.illnesses:
        lines.append("  no illness found")
    lines += [f"  not judged: {note}" for note in one.not_judged]
    return "\n".join(lines) + "\n"
