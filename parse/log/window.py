"""What belongs to one iteration before its number is known. Standard library alone."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Reading:
    """What one iteration line says."""

    line_number: int
    text: str
    values: dict[str, str]
    """Text of each field that can be read."""
    labels: list[str]
    """Every label of the line, known or not."""
    unreadable: list[str] = field(default_factory=list)
    """Fields whose value is damaged."""
    odd_labels: int = 0
    """Labels that no known writer prints."""
    last_field: tuple[str, str, str] | None = None
    """Label, name and text of a last field that no bar ends: of some writers, or of a cut."""
    bare_parts: int = 0
    """Parts between two bars that hold no label at all."""
    twice: bool = False
    """Whether a label stands in it twice, as when two lines were run together."""

    def integer(self, name: str) -> int | None:
        """A field as a whole number; None when it is not there."""
        text = self.values.get(name)
        return int(text) if text is not None and text.isdecimal() else None

    def number(self, name: str) -> float | None:
        """A field as a number; None when it is not there."""
        text = self.values.get(name)
        return None if text is None else float(text)


@dataclass
class Window:
    """All that was printed since the iteration line before, up to its own."""

    index: int
    """How many windows were closed before it."""
    reading: Reading | None = None
    """Its iteration line; None where that cannot be read or the log has none."""
    timers: list[float] = field(default_factory=list)
    """Interval timers of the ranks, in s."""
    phases: dict[str, float] = field(default_factory=dict)
    """DeepSpeed's timers, in ms."""
    micro: dict[str, float] = field(default_factory=dict)
    """The same summed over micro-batches, in ms: a second witness."""
    micro_lines: int = 0
    repeats: int = 0
    """How often phases were printed again: iterations whose own line was lost."""
    steps: list[int] = field(default_factory=list)
    """Iteration as DeepSpeed's progress lines say it."""
    step_rate: str | None = None
    """Learning rate of DeepSpeed's progress line, in full precision."""
    new_run: bool = False
    """Whether a run began in it."""
    damaged: bool = False
    """Whether something in it is known to be lost that has no other trace."""
    by_timers: bool = False
    """Whether DeepSpeed's timers close it, in a log without iteration lines."""
    repeated: bool = False
    """Whether its line only repeats an iteration that was printed before."""
    time_confirmed: bool = False
    """Whether two witnesses agree on its time."""
    iteration: int | None = None
    """Position in the training run, from 1; None when it is unknown."""
    lost_before: int = 0
    """Iterations between the window before and this one."""
