"""DeepSpeed's own lines of throughput, and the summary of its flops profiler.

Standard library alone. DeepSpeed prints GiB and calls them GB; the profiler's ``K``, ``M``, ``G``
are powers of 1000, and so is the ``B`` of its parameters.
"""

from __future__ import annotations

import math
import re

from parse.log.records import ProfileLine, ThroughputLine

MARK = "RunningAvgSamplesPerSec="
_REAL = r"([-+]?(?:\d{1,12}(?:\.\d{0,20})?(?:[eE][-+]?\d{1,3})?|inf))"
_GIB = r"(\d{1,9}(?:\.\d{1,6})?)GB"
_LINE = re.compile(
    r"epoch=\d{1,9}/micro_step=(\d{1,12})/global_step=(\d{1,12}), "
    rf"RunningAvgSamplesPerSec={_REAL}, CurrSamplesPerSec={_REAL}, "
    rf"MemAllocated={_GIB}, MaxMemAllocated={_GIB}(?!\w)"
)

_PROFILE_HEAD = re.compile(r"-{5,} DeepSpeed Flops Profiler -{5,}")
_PROFILE_STEP = re.compile(r"\s*Profile Summary at step (\d{1,12}):\s*")
_PROFILE_LINE = re.compile(
    r"(?P<label>[A-Za-z][^:]{2,120}):\s+(?P<number>\d{1,15}(?:\.\d{1,6})?)"
    r"(?: (?P<prefix>[TGBMKmu]?)(?P<unit>MACs|FLOPS|s)?)?\s*"
)
_PROFILE_LINES = 60
"""The summary is shorter, lines of other ranks between its own included."""
_FACTORS = {"": 1.0, "u": 1e-6, "m": 1e-3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_UNITS = {"FLOPS": "FLOP/s", "MACs": "MAC", "s": "s"}


def throughput_line(number: int, text: str) -> ThroughputLine | None:
    """Read a line of throughput; None where any part of it cannot be read.

    Args:
        number: Position of the line in the log, from 1.
        text: The line, one that holds :data:`MARK`.
    """
    found = _LINE.search(text)
    if found is None:
        return None
    micro_step, step, running, current, allocated, peak = found.groups()
    if float(allocated) > float(peak):
        return None
    return ThroughputLine(
        number,
        int(step),
        int(micro_step),
        _finite(running),
        _finite(current),
        float(allocated),
        float(peak),
    )


def _finite(text: str) -> float | None:
    """DeepSpeed prints an infinite rate before it has timed an update."""
    return float(text) if math.isfinite(float(text)) else None


class ProfileReader:
    """Reads the summary that DeepSpeed's flops profiler prints once, up to its next heading."""

    def __init__(self) -> None:
        self.lines: list[ProfileLine] = []
        self._lines_left = 0
        self._step: int | None = None

    def feed(self, number: int, text: str) -> bool:
        """Take one line; whether it belongs to the profiler."""
        if _PROFILE_HEAD.search(text):
            self._lines_left, self._step = _PROFILE_LINES, None
            return True
        if not self._lines_left:
            return False
        self._lines_left -= 1
        if text.startswith("-----"):
            self._lines_left = 0
        elif step := _PROFILE_STEP.fullmatch(text):
            self._step = int(step[1])
        elif found := _PROFILE_LINE.fullmatch(text):
            label, prefix = found["label"].partition(" = ")[0], found["prefix"] or ""
            value = float(found["number"]) * _FACTORS[prefix]
            unit = _UNITS.get(found["unit"] or "", "")
            self.lines.append(ProfileLine(number, self._step, label.strip(), value, unit))
        else:
            return False
        return True
