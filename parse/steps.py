"""What a line prints of a training step, whatever framework it comes from."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from parse.composer import COMPOSER_STEP
from parse.figures import NO_NUMBER, NUMBER, WRAPPER, figure
from parse.lines import Line
from parse.log import PIPELINE_MARK, iteration_line
from parse.trainer import read_entry

_PAIRS = re.compile(
    r"""["'](loss|grad_norm|learning_rate|lr|step|current_steps|composer_batch)["']: ?["']?"""
    rf"""{WRAPPER}({NUMBER}|{NO_NUMBER})["']?(?=[,}})\s]|$)"""
)
_STEPS_OF_PAIRS = {"current_steps": "LLaMA-Factory", COMPOSER_STEP: "Composer"}
"""Programs by the key under which they count their steps."""
_LABELLED = re.compile(
    rf"(?<![\w/])[\w/]{{0,60}}?(?<![^\W_])(?P<label>loss)"
    r"(?:[_/](?:step|mean|avg|train|total))*(?: train)?"
    rf"(?: {{0,8}}[:=] {{0,8}}| {{1,8}}(?=[-+]?(?:\d+\.\d|nan|inf))){WRAPPER}(?P<loss>{NUMBER})"
    r"(?=[^\w.]|$)",
    re.IGNORECASE,
)
"""A loss by its name; what comes behind it tells means of a step from those of an epoch."""
_COUNTED = re.compile(
    r"(?<![a-z])(?<!max_)(?<!total_)(?:global_step|num_updates|step|iter(?:ation)?|batch)s?"
    r"(?:\(train\))?[\s:=#\[]{0,12}(\d{1,12})\b(?!%)",
    re.IGNORECASE,
)
_OF_ALL = re.compile(
    r"(?<![\d/.:-])(\d{1,12}) ?/ ?\d{1,12}(?![\d/.])(?! \d\d:\d\d:\d\d[ ,.](?!•))|\[\d+, +(\d+)\]"
)
"""A place in a progress bar, and ``[epoch, batch]``; no date."""
_EPOCH = re.compile(r"(?<![a-z])epoch[\s:=#\[]{0,4}(\d{1,6})\b(?:/\d+)?", re.IGNORECASE)
_NORM = re.compile(
    rf"\b(?:grad(?:ient)?[_ ]?norm|gnorm)\s*[:=]?\s*{WRAPPER}({NUMBER})", re.IGNORECASE
)
_NOT_TRAINING = re.compile(
    r"(?<![^\W_])(?<![/.])(?:val|valid|validat\w+|eval\w*|test|testing|sanity)(?![^\W_])"
    r"(?!\.|/(?!\w*loss))",
    re.IGNORECASE,
)
"""Before a loss: it is of an evaluation. Folders and files may be called so as well."""
_OF_POLICY = re.compile(r"(?:^|[\W_])(?:actor|policy|pg|critic|value)[ _/]loss$", re.IGNORECASE)
"""A loss that is near 0 by its making, and says nothing unless it is not finite."""
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
    is_left_out: bool = False
    """True where the line has no loss, which says that it is NaN."""


def read_step(line: Line) -> Step | None:
    """Read the figures of a training step; None where the line is of none or is damaged."""
    text = line.text
    if "loss" not in text and "Loss" not in text and "consumed samples" not in text:
        return None
    if PIPELINE_MARK in text or any(mark in text for mark in _MEGATRON):
        return _megatron_step(line) or _of_a_fork(line)
    if ("'loss'" in text or '"loss"' in text) and (step := _step_of_pairs(line)):
        return step
    return _labelled_step(line)


def _megatron_step(line: Line) -> Step | None:
    found = iteration_line(line)
    if found is None or found.problem:
        return None
    position = found.texts.get("iteration") or found.texts.get("samples", "")
    norm, rate = found.values.get("grad_norm"), found.values.get("learning_rate")
    digits, skipped = _digits(found.texts.get("loss", "")), bool(found.values.get("skipped"))
    framework = "DeepSpeed's pipeline" if PIPELINE_MARK in line.text else "Megatron"
    is_left_out = found.loss is not None and "loss" not in found.texts
    return Step(
        line.number, framework, position, found.loss, digits, norm, rate, skipped, is_left_out
    )


def _of_a_fork(line: Line) -> Step | None:
    """A line of a fork that writes its fields without colons; a damaged one has some with."""
    has_labels = line.cut or any(f"{label}:" in line.text for label in ("lm loss", "learning rate"))
    return None if has_labels else _labelled_step(line)


def _step_of_pairs(line: Line) -> Step | None:
    """A dictionary of transformers, or a line of JSON."""
    pairs = dict(_PAIRS.findall(line.text))
    found = {key: value for key, value in pairs.items() if not re.fullmatch(NO_NUMBER, value)}
    if "loss" not in found:
        # Nothing in its place is NaN in an entry of training, which other figures tell.
        entry = read_entry(line)
        has_rate = "learning_rate" in found or "lr" in found
        if "loss" not in pairs or not (has_rate if entry is None else entry.loss is not None):
            return None
        found["loss"] = "nan"
    rate = found.get("learning_rate") or found.get("lr")
    loss = figure(found["loss"])
    # A policy that is rewarded has a loss near 0 by its making, which says nothing.
    says_nothing = math.isfinite(loss) and ("'reward'" in line.text or '"reward"' in line.text)
    counted = next((name for name in _STEPS_OF_PAIRS if name in found), "step")
    return Step(
        line.number,
        _STEPS_OF_PAIRS.get(counted, "Hugging Face Trainer"),
        found.get(counted, ""),
        None if says_nothing else loss,
        _digits(found["loss"]),
        figure(found["grad_norm"]) if "grad_norm" in found else None,
        figure(rate) if rate else None,
    )


def _labelled_step(line: Line) -> Step | None:
    """A loss under its name, and a count of steps, a place in a bar, or an epoch."""
    text = line.text
    losses = [
        found
        for found in _LABELLED.finditer(text)
        if not _NOT_TRAINING.search(text, 0, found.end("label"))
    ]
    epoch, rest = _EPOCH.search(text), _EPOCH.sub(" ", text, count=1)
    counted, place = _COUNTED.search(rest), _OF_ALL.search(rest)
    number = counted[1] if counted else (place[1] or place[2]) if place else ""
    is_bar = place is not None and counted is None
    if not losses or not (number or epoch) or (is_bar and number == "0"):
        return None
    told = [one for one in losses if not _OF_POLICY.search(text[: one.end("label")])]
    lost = [one for one in losses if not math.isfinite(figure(one["loss"]))]
    loss = next(iter((*lost, *told)), None)
    norm = _NORM.search(text)
    return Step(
        line.number,
        "a progress bar" if is_bar else "a training loop",
        f"{epoch[1] if epoch else ''}:{number}",
        figure(loss["loss"]) if loss else None,
        _digits(loss["loss"]) if loss else 0,
        figure(norm[1]) if norm else None,
    )


def _digits(text: str) -> int:
    mantissa = re.split("[eE]", text)[0]
    return len(re.sub(r"\D", "", mantissa).lstrip("0"))
