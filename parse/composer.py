"""Steps of MosaicML's Composer, which prints one over many lines.

``[epoch=1][batch=5/9]:``, and below it a figure a line, as ``Train loss/train/total: 8.42``.
Standard library alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from parse.figures import NOT_FINITE, figure
from parse.lines import Line

COMPOSER_STEP = "composer_batch"
"""Key of the batch in the object that stands for a step."""
_HEAD = re.compile(r"(?:\[epoch=\d{1,9}(?:/\d{1,9})?\])?\[batch=(\d{1,12})(?:/\d{1,12})?\]:\s*")
_FIGURE = re.compile(r"\s+Train (\S[^:]{0,200}?):\s*(\S.{0,200})")
_NAMES = (
    ("loss", re.compile(r"loss/train/total")),
    ("grad_norm", re.compile(r"l2_norm/grad/(?:pre_clip_)?global")),
    ("learning_rate", re.compile(r"lr-\w+/group0")),
)
_SPELT = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity", "None": "null"}
"""Of a figure, how JSON spells it."""
_NUMBER = re.compile(rf"-?\d{{1,30}}(?:\.\d{{0,30}})?(?:e[-+]?\d{{1,3}})?|{NOT_FINITE}|None")


def joined(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield the lines of a log, with each of Composer's steps as one object of JSON.

    The object is read as those of other trainers are (:mod:`parse.trainer`). Its line is that of
    the step's loss.
    """
    head, figures, step = Line(0, "", False), dict[str, str](), ""
    at = 0
    for line in lines:
        found = _FIGURE.fullmatch(line.text) if step and line.source == head.source else None
        if found:
            name = next((name for name, key in _NAMES if key.fullmatch(found[1])), None)
            value = found[2].strip()
            # A rate is rounded to four places, and 0 may be any small one.
            says = _NUMBER.fullmatch(value) and (name != "learning_rate" or figure(value))
            if name and says and not line.cut:
                figures[name] = _SPELT.get(value, value)
                at = line.number if name == "loss" else at
            elif found[1] == "time/batch" and value.isdecimal():
                step = str(int(value) + 1)  # of the run; the head counts within an epoch
            continue
        if "loss" in figures and line.source == head.source:
            yield _as_object(head, at, step, figures)
            figures = {}
        if begin := _HEAD.fullmatch(line.text):
            head, step = line, begin[1]
            continue
        if line.source == head.source:
            step = ""
        yield line
    if "loss" in figures:
        yield _as_object(head, at, step, figures)


def _as_object(head: Line, number: int, step: str, figures: dict[str, str]) -> Line:
    fields = {COMPOSER_STEP: step, **figures}
    text = ", ".join(f'"{name}": {value}' for name, value in fields.items())
    return Line(number, f"{{{text}}}", False, head.source)
