"""The figures that a line prints of a training step, whatever framework it comes from."""

from __future__ import annotations

import re
from typing import NamedTuple

from parse.log import Line, iteration_line

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
    """What a line says of one step; None where it says nothing."""

    line: int
    framework: str
    position: str
    """What tells the step from others: its number, or its place in a progress bar."""
    loss: float | None = None
    digits: int = 0
    """Significant digits that the loss is printed with."""
    grad_norm: float | None = None
    learning_rate: float | None = None
    skipped: bool = False
    """Whether the loss scaler left the update out."""


def read_step(line: Line) -> Step | None:
    """Read the figures of a training step; None where the line is of none or is damaged."""
    text = line.text
    if line.overlong or ("loss" not in text and "consumed samples" not in text):
        return None
    if any(mark in text for mark in _MEGATRON):
        return _megatron_step(line)
    if "{'loss'" in text or "'loss': " in text:
        found = {name: _number(value) for name, value in _HUGGING_FACE.findall(text)}
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
    grad_norm = _number(norm[1]) if norm else None
    return Step(line.number, framework, position, _number(loss), _digits(loss), grad_norm)


def _number(text: str) -> float:
    return float(text.removesuffix(".0") if text.startswith(("nan", "inf")) else text)


def _digits(text: str) -> int:
    mantissa = re.split("[eE]", text)[0]
    return len(re.sub(r"\D", "", mantissa).lstrip("0"))
