"""What every watcher of a log shares: the lines, the steps, and what is known of the set-up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from parse.diagnose.illness import Illness
from parse.diagnose.steps import Step
from parse.log.lines import Line


@dataclass
class Fact:
    """A setting that the log states."""

    value: str
    line: int
    text: str
    """The line, to show as evidence."""


@dataclass
class Run:
    """What the watchers learn while they read; each line is told to this first."""

    facts: dict[str, Fact] = field(default_factory=dict)
    """The last word of the log on each setting; the names are those of ``facts.py``."""
    software: set[str] = field(default_factory=set)
    """Frameworks that the lines are of."""
    vocab_sizes: list[int] = field(default_factory=list)
    num_lines: int = 0
    num_steps: int = 0
    """Steps with figures so far."""
    num_progress: int = 0
    """DeepSpeed's own lines of progress and throughput, which have no loss."""
    steps_at: dict[str, int] = field(default_factory=dict)
    """How many steps there were when a name was last noted, to tell whether the run went on."""

    def number(self, name: str) -> float | None:
        """A setting as a number; None where the log does not state it as one."""
        try:
            return float(self.facts[name].value) if name in self.facts else None
        except ValueError:
            return None

    def note(self, name: str) -> None:
        """Remember how far training was."""
        self.steps_at[name] = self.num_steps

    def went_on(self, name: str) -> bool:
        """Whether some steps followed what was noted."""
        return self.num_steps - self.steps_at.get(name, self.num_steps) >= GOES_ON_STEPS


GOES_ON_STEPS = 3
"""A run that does so many steps after an error was not ended by it."""


class Watcher:
    """Looks for a family of illnesses; keeps figures, never lines."""

    words: tuple[str, ...] = ()
    """A line without any of them is not fed: logs are long, and most lines say nothing."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def feed(self, line: Line) -> None:
        """Take a line that has one of the words."""

    def step(self, step: Step) -> None:
        """Take a step; its line was fed before."""

    def illnesses(self) -> Iterator[Illness]:
        """What there is to say at the end of the log."""
        yield from ()

    def not_judged(self) -> Iterator[str]:
        """What could not be judged, and what the log lacks."""
        yield from ()
