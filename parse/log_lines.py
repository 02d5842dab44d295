"""The one table of regular expressions for log lines, and the reader that applies it.

Standard library alone. A line counts where its marker, a plain substring, is in it; only then is it
decoded and searched. Patterns are searched, never anchored, so that ``hostname: `` prefixes and
DeepSpeed's old ``[date] [INFO] [file]`` prefix do no harm, and each number must be followed by what
its writer puts there, so that a line cut inside a number gives no number.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple

from parse.assemble import Assembler, Reading
from parse.errors import LogError
from parse.log_name import settings_from_name
from parse.metrics import attach_metrics
from parse.records import Log, Reject, Setting

_NUMBER = r"[-+]?\d{1,18}(?:\.\d{0,20})?(?:[eE][-+]?\d{1,3})?"
_LOSS = rf"(?:{_NUMBER}|[-+]?(?:nan|NaN|NAN|inf|Inf|INF|Infinity))"
_INTEGER = r"\d{1,18}"
_TIMER_END = r"(?=\s*(?:$|[|<\[]))"


class LineField(NamedTuple):
    """One fact of a log line."""

    name: str
    """Field of the record it goes to."""
    unit: str
    pattern: re.Pattern[str]
    """Its first group is the value."""


def _fields(*rows: tuple[str, str, str]) -> tuple[LineField, ...]:
    return tuple(LineField(name, unit, re.compile(pattern)) for name, unit, pattern in rows)


INTERVAL_TIMER = LineField(
    "interval_s", "s", re.compile(rf"<TIMER:interval-time,\s*({_NUMBER})\s*>")
)
"""One a rank and iteration, without the rank; several may stand in one line."""

ITERATION_LINE = _fields(
    ("iteration", "", rf"\biteration\s+({_INTEGER})\s*/\s*\d+\s*\|"),
    ("elapsed_s", "s", rf"\belapsed_time\s+({_NUMBER})\s*\|"),
    ("elapsed_ms", "ms", rf"elapsed time per iteration \(ms\):\s*({_NUMBER})\s*\|"),
    ("samples", "samples", rf"consumed samples:\s*({_INTEGER})\s*\|"),
    ("tokens", "tokens", rf"consumed tokens:\s*({_INTEGER})\s*\|"),
    ("learning_rate", "", rf"learning rate:\s*({_NUMBER})\s*\|"),
    ("global_batch_size", "samples", rf"global batch size:\s*({_INTEGER})\s*\|"),
    ("loss", "", rf"lm loss:\s*({_LOSS})\s*\|"),
    ("grad_norm", "", rf"grad norm:\s*({_LOSS})\s*\|"),
    ("seq_length", "tokens", rf"actual seqlen:\s*({_INTEGER})\s*\|"),
    ("skipped", "iterations", rf"number of skipped iterations:\s*({_INTEGER})\s*\|"),
    ("tflops", "TFLOP/s", rf"TFLOPs:\s*({_NUMBER})\s*\|"),
)
_INTEGER_FIELDS = {"iteration", "samples", "tokens", "global_batch_size", "seq_length", "skipped"}

PHASE_LINE = _fields(
    ("forward_ms", "ms", rf"\|\s*(?:fwd|forward):\s*({_NUMBER}){_TIMER_END}"),
    ("backward_ms", "ms", rf"\|\s*(?:bwd|backward):\s*({_NUMBER}){_TIMER_END}"),
    ("backward_inner_ms", "ms", rf"\|\s*(?:bwd|backward)_inner:\s*({_NUMBER}){_TIMER_END}"),
    ("backward_allreduce_ms", "ms", rf"\|\s*(?:bwd|backward)_allreduce:\s*({_NUMBER}){_TIMER_END}"),
    ("update_ms", "ms", rf"\|\s*step:\s*({_NUMBER}){_TIMER_END}"),
    ("optimizer_step_ms", "ms", rf"\|\s*optimizer_step:\s*({_NUMBER}){_TIMER_END}"),
)
"""``[Rank 0] time (ms) | ...``; the ``_microstep`` twins match none of these."""

MEMORY_LINE = _fields(
    ("device_memory_gib", "GiB", rf"\bMax_MA\s+({_NUMBER})\s*GB"),
    ("host_memory_gib", "GiB", rf"CPU Virtual Memory:\s*used\s*=\s*({_NUMBER})\s*GB"),
)
"""DeepSpeed prints GiB and calls them GB."""

_RANK_PARAMETERS = re.compile(
    r"number of parameters on \(tensor, pipeline\) model parallel rank "
    rf"\((\d{{1,6}}), (\d{{1,6}})\):\s*({_INTEGER})(?=\s|$|<|\[)"
)
RUN_LINE = _fields(
    ("world_size", "ranks", rf"\busing world size:\s*({_INTEGER})(?=,|\s|$)"),
    ("dist_world_size", "ranks", rf"\bdist_world_size=({_INTEGER})(?=\s|$)"),
    ("vocab_size", "tokens", rf"padded vocab \(size:.*\(new size:\s*({_INTEGER})\)"),
    ("device", "", r"Setting ds_accelerator to (\w+)"),
)
ARGUMENT_LINE = re.compile(r"^(?:[\w.-]+: )?\s{2}(\w+) \.{3,} (\S+)\s*$")
"""Megatron's list of arguments; DeepSpeed's own list looks the same behind a ``[file]`` prefix."""
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

_KNOWN_LABELS = re.compile(
    r"consumed (samples|tokens)|elapsed time per iteration \(ms\)|learning rate|global batch size|"
    r"loss scale|grad norm|num zeros|params norm|actual seqlen|curriculum seqlen|"
    r"number of (skipped|nan) iterations|samples per second|tokens per gpu per second.*|TFLOPs|"
    r"throughput per GPU.*"
)
_AFTER_LOSS = re.compile(r"\| *(loss scale|grad norm|actual seqlen|number of|samples per|TFLOPs)")


def read_log(path: Path) -> Log:
    """Read one log, and the ``metrics.jsonl`` beside it when it is the same run's.

    Damage is never an error: what cannot be read is absent, and listed in ``rejects``.

    Args:
        path: The log; its name may carry the run's settings.

    Returns:
        Records in the order of the log, one an iteration.

    Raises:
        LogError: there is no readable file at ``path``.
    """
    log = Log(path=path, settings=settings_from_name(path.name))
    reader = _Reader(log)
    data = _read_bytes(path)
    lines = data.splitlines()
    log.ends_mid_line = bool(data) and not data.endswith((b"\n", b"\r"))
    last = len(lines) if log.ends_mid_line else 0
    for number, raw in enumerate(lines, 1):
        reader.feed(number, raw, cut=number == last)
    reader.finish()
    attach_metrics(log)
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
    raise LogError(f"{path}: is not a training log: none of its lines is known")


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise LogError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise LogError(f"{path}: is a folder; give a log") from None
    except (OSError, ValueError) as error:
        raise LogError(f"{path}: cannot be read: {error}") from None


class _Reader:
    """Sorts lines by marker, and hands what they hold to the assembler."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.assembler = Assembler(log)
        self.rank_parameters: dict[tuple[str, str], int] = {}
        self.arguments: dict[str, Setting] = {}
        self.dist_world_size: int | None = None

    def feed(self, number: int, raw: bytes, cut: bool) -> None:
        """Take one line; ``cut`` says that the file ends in it."""
        timers = b"TIMER:interval-time" in raw
        phases = b"time (ms) |" in raw
        iteration = b"elapsed" in raw or b"consumed samples" in raw
        memory = b"Max_MA" in raw or b"CPU Virtual" in raw
        argument = b" ...." in raw
        run = b"world" in raw or b"ds_accelerator" in raw or b"padded vocab" in raw
        run = (run or b"number of parameters" in raw) and not argument
        if not (timers or phases or iteration or memory or argument or run):
            return
        text = raw.decode(errors="replace")
        if timers:
            text = self._timers(number, text)
        if phases and not cut:  # the iteration it belongs to is cut off as well
            self._phases(number, text)
        if memory:
            self.assembler.add_memory(_matches(MEMORY_LINE, text))
        if iteration:
            self._iteration(number, text, cut)
        if argument and not cut:
            self._argument(text)
        if run and not cut:
            self._run(text)

    def finish(self) -> None:
        """Work out what needs the whole log."""
        log, settings = self.log, self.log.settings
        for key, value in self.arguments.items():
            settings.setdefault(key, value)
        if log.world_size is None:
            tp, dp = settings.get("tp"), settings.get("dp")
            from_name = tp * dp if isinstance(tp, int) and isinstance(dp, int) else None
            log.world_size = self.dist_world_size or from_name
        if self.rank_parameters:
            log.parameters = sum(self.rank_parameters.values())
        self.assembler.finish()

    def _timers(self, number: int, text: str) -> str:
        """Collect every timer of the line; returns the line without them."""
        found = INTERVAL_TIMER.pattern.findall(text)
        if len(found) < text.count("TIMER:interval-time"):
            self.log.rejects.append(Reject.of(number, "an interval timer without its value", text))
        self.assembler.add_timers([float(value) for value in found])
        return INTERVAL_TIMER.pattern.sub("", text)

    def _phases(self, number: int, text: str) -> None:
        found = _matches(PHASE_LINE, text)
        self.assembler.add_phases({name: float(value) for name, value in found.items()})
        main_line = "microstep" not in text and ("fwd:" in text or "step:" in text)
        expected = 1 if "optimizer_step" in text else 5
        if main_line and len(found) < expected:
            self.log.rejects.append(Reject.of(number, "a timer line with missing values", text))

    def _iteration(self, number: int, text: str, cut: bool) -> None:
        found = _matches(ITERATION_LINE, text)
        if cut and "tflops" not in found:  # the line's last field
            if found:
                self.log.rejects.append(Reject.of(number, "cut off: the log ends here", text))
            return
        if len(found) < 3:
            if "consumed samples" in text or "elapsed time per iteration" in text:
                self.log.rejects.append(Reject.of(number, "a damaged iteration line", text))
            return
        loss = _float(found.get("loss"))
        if loss is None:
            if _loss_left_out(text):
                loss = math.nan
            else:
                self.log.rejects.append(Reject.of(number, "the loss cannot be read", text))
        integers = {k: int(v) for k, v in found.items() if k in _INTEGER_FIELDS}
        self.assembler.add_iteration(Reading(number, text, found, integers, loss))

    def _run(self, text: str) -> None:
        found = _matches(RUN_LINE, text)
        log = self.log
        log.recognised = log.recognised or bool(found)
        if "world_size" in found:
            log.world_size = int(found["world_size"]) or None
        if "dist_world_size" in found:
            self.dist_world_size = int(found["dist_world_size"]) or None
        if "vocab_size" in found:
            log.vocab_size = int(found["vocab_size"])
        log.device = found.get("device", log.device)
        for tensor, pipeline, value in _RANK_PARAMETERS.findall(text):
            self.rank_parameters[tensor, pipeline] = int(value)
            log.recognised = True

    def _argument(self, text: str) -> None:
        argument = ARGUMENT_LINE.match(text)
        if argument and argument[1] in _ARGUMENTS and re.fullmatch(_INTEGER, argument[2]):
            self.arguments[_ARGUMENTS[argument[1]]] = int(argument[2])


def _matches(fields: tuple[LineField, ...], text: str) -> dict[str, str]:
    """Text of every field that the line holds."""
    found = ((field.name, field.pattern.search(text)) for field in fields)
    return {name: match[1] for name, match in found if match}


def _float(text: str | None) -> float | None:
    return None if text is None else float(text)


def _loss_left_out(text: str) -> bool:
    """Whether the writer left the loss out, as Megatron does with a NaN, and nobody damaged it."""
    parts = [part.strip() for part in text.rstrip().rstrip("|").split("|")]
    labels = [part.rpartition(":")[0].strip() for part in parts[1:]]
    return bool(_AFTER_LOSS.search(text)) and all(
        _KNOWN_LABELS.fullmatch(label) for label in labels
    )
