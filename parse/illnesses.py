"""What can ail a run: the rows of ``illnesses.toml``, and how a line is quoted as evidence."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from configs.files import printable
from parse.lines import Line

_EVIDENCE_CHARACTERS = 240


class Illness(NamedTuple):
    """Something that is wrong with a run."""

    name: str
    line: int
    """Line of the log that shows it first, from 1."""
    evidence: str
    """The log's own words or figures."""

    @property
    def kind(self) -> Kind:
        """Return its row of ``illnesses.toml``."""
        return known()[self.name]

    def remedy(self, states: Collection[str]) -> str:
        """Return what to do about it in a run of which so much is known, see :class:`Also`."""
        kind = self.kind
        return " ".join([kind.remedy, *(also.text for also in kind.also if also.applies(states))])


class Also(NamedTuple):
    """A sentence that is right for some runs alone, by settings and software that the log names."""

    text: str
    where: Sequence[str] = ()
    """One of these is named, if any are given."""
    unless: Sequence[str] = ()
    """None of these is."""

    def applies(self, states: Collection[str]) -> bool:
        """Return whether it is right for a run of which these are named."""
        named = not self.where or any(name in states for name in self.where)
        return named and not any(name in states for name in self.unless)


@dataclass(frozen=True)
class Kind:
    """A row of ``illnesses.toml``."""

    remedy: str
    also: list[Also] = field(default_factory=list)
    """More of the remedy, where it applies."""
    signs: list[str] = field(default_factory=list)
    """A line that matches one of these patterns shows the illness."""
    words: list[str] = field(default_factory=list)
    """Every such line has one of these."""
    within: str = ""
    """What the traceback that such a line ends must have passed through: a file or a function."""
    backed_by: str = ""
    """The illness that must be shown as well, where a line is not the error of a traceback."""
    fewest: int = 1
    """Lines that it takes."""
    exit_codes: list[int] = field(default_factory=list)
    """A process that ends with one of these, and printed no error, had it; signals are negative."""
    ends_run: bool = False
    """True where a run does not go on after it; of a run that did, it is not told."""
    follows: Literal["", "later", "always"] = ""
    """Whether it may come of another error, which then is told alone: of any in the log, or of one
    that came before."""
    frames: str = ""
    """Functions of a traceback of the device's allocator that tell what was allocated."""
    any_frame: bool = False
    """True where any frame tells, not the innermost of those that are known."""
    tier: int = 0
    """Illnesses are told by tier, then by line: 0, the run failed or is worth nothing; 1, its
    results are in doubt; 2, it is slower or trains worse than it could."""

    @functools.cached_property
    def any_sign(self) -> re.Pattern[str]:
        """All signs in one pattern."""
        return re.compile("|".join(f"(?:{sign})" for sign in self.signs))


@functools.cache
def known() -> dict[str, Kind]:
    """Return every illness by its name."""
    text = Path(__file__).with_name("illnesses.toml").read_text(encoding="utf-8")
    return {
        name: Kind(**{**row, "also": [Also(**also) for also in row.get("also", [])]})
        for name, row in tomllib.loads(text).items()
    }


def quoted(text: str, end: int = 0, source: str = "") -> str:
    """Quote a line as evidence; of a long one, the part that ends at ``end``, or its begin."""
    text, end = source + text, max(len(source) + end, _EVIDENCE_CHARACTERS)
    before, after = "..." * (end > _EVIDENCE_CHARACTERS), "..." * (end < len(text))
    part = printable(" ".join(text[end - _EVIDENCE_CHARACTERS : end].split()))
    return f"{before}{part}{after}"


def quoted_line(line: Line, sign: re.Match[str] | None = None) -> str:
    """Quote a line with the host or the rank that printed it."""
    return quoted(line.text, sign.end() if sign else 0, line.source)
