"""What a line prints of a training step, whatever framework it comes from."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from parse.lines import Line
from parse.log import PIPELINE_MARK, iteration_line

_NUMBER = (
    r"[-+]?(?:1\.#(?:INF|IND|QNAN|SNAN)\d*|(?i:nan|inf(?:inity)?)(?:\.0|\(\w*\))?(?!\w)"
    r"|(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
)
"""Python's, C's and JSON's; of what is not a number, also ``-nan(ind)``, ``nan.0`` and ``1.#INF``.
"""
_WRAPPER = r"(?:(?:\w+\.)?\w+\()?"
"""``tensor(...)``, ``np.float64(...)``."""
_PAIRS = re.compile(
    r"""["'](loss|grad_norm|learning_rate|lr|step|current_steps)["']: ?["']?"""
    rf"""{_WRAPPER}({_NUMBER})["']?(?=[,}})\s]|$)"""
)
_BAR = re.compile(
    r"(?:Epoch (\d+)[:/].*?)?(?<!\d)(\d+)/(\d+) (?:\[[\d:]+<|[\d-]+:[\d-]+:[\d-]+ \S )"
)
"""Drawn by tqdm or by rich."""
_LIGHTNING = re.compile(rf"[ ,\[](?:train[_/])?loss(?:_step)?[=:] ?({_NUMBER})(?=[,\]\s]|$)")
_PLAIN = re.compile(
    r"\b(?:global_step|step|iter|iteration|batch)\b[\s:=#\[]{0,4}(\d{1,12})\b.{0,80}?"
    rf"\b(?:train[_ ]|lm |total_)?loss\b\s*[:=]?\s*{_WRAPPER}({_NUMBER})",
    re.IGNORECASE,
)
_NORM = re.compile(
    rf"\b(?:grad(?:ient)?[_ ]?norm|gnorm)\s*[:=]?\s*{_WRAPPER}({_NUMBER})", re.IGNORECASE
)
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
    if PIPELINE_MARK in text or any(mark in text for mark in _MEGATRON):
        return _megatron_step(line)
    if ("'loss'" in text or '"loss"' in text) and (step := _step_of_pairs(line)):
        return step
    bar = _BAR.search(text)
    if bar and bar[2] != "0" and (loss := _LIGHTNING.search(text, bar.end())):
        framework = "Lightning" if bar[1] is not None else "a progress bar"
        return _step(line, framework, f"{bar[1]}:{bar[2]}", loss[1])
    if not _NOT_TRAINING.search(text) and (found := _PLAIN.search(text)):
        return _step(line, "a training loop", found[1], found[2])
    return None


def _megatron_step(line: Line) -> Step | None:
    found = iteration_line(line)
    if found is None or found.problem:
        return None
    position = found.texts.get("iteration") or found.texts.get("samples", "")
    norm, rate = found.values.get("grad_norm"), found.values.get("learning_rate")
    digits, skipped = _digits(found.texts.get("loss", "")), bool(found.values.get("skipped"))
    framework = "DeepSpeed's pipeline" if PIPELINE_MARK in line.text else "Megatron"
    return Step(line.number, framework, position, found.loss, digits, norm, rate, skipped)


def _step_of_pairs(line: Line) -> Step | None:
    """A dictionary of transformers, or a line of JSON."""
    found = dict(_PAIRS.findall(line.text))
    if "loss" not in found:
        return None
    rate = found.get("learning_rate") or found.get("lr")
    # The loss of a policy that is rewarded is near 0 by its making, and says nothing.
    says_nothing = "'reward'" in line.text or '"reward"' in line.text
    return Step(
        line.number,
        "LLaMA-Factory" if "current_steps" in found else "Hugging Face Trainer",
        found.get("current_steps") or found.get("step", ""),
        None if says_nothing else _figure(found["loss"]),
        _digits(found["loss"]),
        _figure(found["grad_norm"]) if "grad_norm" in found else None,
        _figure(rate) if rate else None,
    )


def _step(line: Line, framework: str, position: str, loss: str) -> Step:
    norm = _NORM.search(line.text)
    grad_norm = _figure(norm[1]) if norm else None
    return Step(line.number, framework, position, _figure(loss), _digits(loss), grad_norm)


def _figure(text: str) -> float:
    lower = text.lower()
    if "nan" in lower or "#ind" in lower:
        return math.nan
    if "inf" in lower:
        return -math.inf if lower.startswith("-") else math.inf
    return float(text)


def _digits(text: str) -> int:
    mantissa = re.split("[eE]", text)[0]
    return len(re.sub(r"\D", "", mantissa).lstrip("0"))
