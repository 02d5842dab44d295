"""What a run is to its supervisor: commands, limits, and how it came to its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch.process.members import new_token
from launch.process.progress_watch import Stall


@dataclass(frozen=True)
class Companion:
    """A command that runs beside the ranks and ends with them."""

    name: str
    """What to call it when it fails."""
    command: Sequence[str]
    """Program and arguments."""
    ready: Path
    """File it makes when the ranks may start."""


@dataclass(frozen=True)
class Job:
    """What to start."""

    command: Sequence[str]
    """Program and arguments; no shell reads them."""
    cwd: Path
    """Folder it runs in."""
    environment: Mapping[str, str]
    """Its whole environment."""
    log: Path
    """File to append output and errors to; written by the command itself, so that it loses nothing
    when we die."""
    metrics: Path | None = None
    """Its ``metrics.jsonl``, a heartbeat beside the log; None when it writes none."""
    companions: Sequence[Companion] = ()
    """Started before it; their output goes to the log too."""
    token: str = field(default_factory=new_token)
    """Mark of its processes."""


@dataclass(frozen=True)
class Limits:
    """When to give a run up."""

    timeout_s: float | None = None
    """Seconds it may take; None for no limit."""
    hang_s: float | None = None
    """Seconds without progress; None adapts them to the run (``progress_watch``), 0: no limit."""


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Ending:
    """How a command came to its end."""

    exit_code: int = 1
    """The command's own; 128 + signal when a signal ended it."""
    seconds: float = 0.0
    """From start to end."""
    stop_signal: int | None = None
    """Signal that asked us to stop; None when nobody did."""
    timed_out: bool = False
    """Whether we ended it because its time was over."""
    stall: Stall | None = None
    """The silence for which we ended it."""
    companion: str = ""
    """What became of a companion that ended before the command, for which we ended all."""
    oom_kills: int | None = None
    """Processes the kernel's out-of-memory killer took meanwhile; None where it does not say."""
