"""The figures that a line prints of a training step, whatever framework it comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from parse.log.entries import iteration_line
from parse.log.lines import Line

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


@dataclass(frozen=True, slots=True)
class Step:
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
    """Read a line; None for one that is not of a training step.

    Lines that are damaged are left out, as in the tables.
    """
    text = line.text
    if line.overlong or ("loss" not in text and "consumed samples" not in text):
        return None
    if any(mark in text for mark in _MEGATRON):
        return _megatron(line)
    for reader in (_hugging_face, _progress_bar, _pipeline, _plain):
        if step := reader(line.number, text):
            return step
    return None


def _megatron(line: Line) -> Step | None:
    found = iteration_line(line.number, line.text, line.cut)
    if found is None or found.problem:
        return None
    position = found.values.get("iteration") or found.values.get("samples", "")
    return Step(
        line.number,
        "Megatron",
        position,
        found.loss,
        _digits(found.values.get("loss", "")),
        found.real("grad_norm"),
        found.real("learning_rate"),
        bool(found.integer("skipped")),
    )


def _hugging_face(number: int, text: str) -> Step | None:
    if "{'loss'" not in text and "'loss': " not in text:
        return None
    found = dict(_HUGGING_FACE.findall(text))
    if "loss" not in found:
        return None
    norm, rate = found.get("grad_norm"), found.get("learning_rate")
    return Step(
        number,
        "Hugging Face Trainer",
        "",
        float(found["loss"]),
        _digits(found["loss"]),
        None if norm is None else float(norm),
        None if rate is None else float(rate),
    )


def _progress_bar(number: int, text: str) -> Step | None:
    bar = _BAR.search(text)
    loss = _LIGHTNING.search(text, bar.end()) if bar else None
    if not bar or not loss or bar[2] == "0":
        return None
    framework = "Lightning" if bar[1] is not None else "a progress bar"
    return _step(number, framework, f"{bar[1]}:{bar[2]}", loss[1], text)


def _pipeline(number: int, text: str) -> Step | None:
    found = _PIPELINE.search(text)
    return _step(number, "DeepSpeed's pipeline", found[1], found[2], text) if found else None


def _plain(number: int, text: str) -> Step | None:
    found = None if _NOT_TRAINING.search(text) else _PLAIN.search(text)
    return _step(number, "a training loop", found[1], found[2], text) if found else None


def _step(number: int, framework: str, position: str, loss: str, text: str) -> Step:
    norm = _NORM.search(text)
    grad_norm = _number(norm[1]) if norm else None
    return Step(number, framework, position, _number(loss), _digits(loss), grad_norm)


def _number(text: str) -> float:
    return float(text.removesuffix(".0") if text.startswith(("nan", "inf")) else text)


def _digits(text: str) -> int:
    mantissa = re.split("[eE]", text)[0]
    return len(re.sub(r"\D", "", mantissa).lstrip("0"))
