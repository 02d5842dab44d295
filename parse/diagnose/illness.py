"""An illness, and the table of those that are known."""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from configs.files import printable

_EVIDENCE_CHARACTERS = 240


@dataclass(frozen=True)
class Illness:
    """Something that is wrong with a run."""

    name: str
    line: int
    """Line of the log that shows it first, from 1."""
    evidence: str
    """What the log says, in the log's own words or figures."""

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return known()[self.name].remedy


@dataclass(frozen=True)
class Kind:
    """A row of ``illnesses.toml``."""

    remedy: str
    signs: list[re.Pattern[str]] = field(default_factory=list)
    """A line that matches one of them shows the illness."""
    words: list[str] = field(default_factory=list)
    """Every such line has one of these."""
    fewest: int = 1
    """Lines that it takes."""
    ends_run: bool = False
    """Whether a run does not go on after it; of a run that did, it is not told."""


@functools.cache
def known() -> dict[str, Kind]:
    """Every illness by its name."""
    text = Path(__file__).with_name("illnesses.toml").read_text(encoding="utf-8")
    return {
        name: Kind(
            row["remedy"],
            [re.compile(sign) for sign in row.get("signs", ())],
            row.get("words", []),
            row.get("fewest", 1),
            row.get("ends_run", False),
        )
        for name, row in tomllib.loads(text).items()
    }


def quoted(text: str, sign: re.Match[str] | None = None) -> str:
    """A line of a log as evidence: printable, its spaces folded, not too long.

    Args:
        text: The line.
        sign: What in it shows the illness; of a long line, the part around it is quoted.
    """
    end = max(sign.end(), _EVIDENCE_CHARACTERS) if sign else _EVIDENCE_CHARACTERS
    before, after = "..." * (end > _EVIDENCE_CHARACTERS), "..." * (end < len(text))
    part = " ".join(printable(text[end - _EVIDENCE_CHARACTERS : end]).split())
    return f"{before}{part}{after}"
