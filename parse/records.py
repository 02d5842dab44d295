"""Records of what a log and its ``metrics.jsonl`` say. Standard library alone.

A value that nobody gives is ``None``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from configs.errors import ConfigError
from configs.files import printable

Setting = int | float | str

PHASES = ("forward", "backward", "update")
"""Phases of an iteration, in the order they run."""
OF_NAME = "its name says "
"""How a note begins that tells of a name which contradicts its log."""


class LogError(ConfigError):
    """A log or a sweep folder cannot be used; the message names it and says why."""

    def __str__(self) -> str:
        return printable(super().__str__())


@dataclass
class Iteration:
    """One iteration of a run."""

    iteration: int
    """Position in the training run, from 1."""
    iteration_s: float | None = None
    """Duration on the rank that prints the losses, in seconds."""
    forward_ms: float | None = None
    backward_ms: float | None = None
    backward_inner_ms: float | None = None
    backward_allreduce_ms: float | None = None
    update_ms: float | None = None
    """DeepSpeed's ``step`` timer: the whole update phase."""
    optimizer_step_ms: float | None = None
    """DeepSpeed's ``optimizer_step`` timer, a part of the update."""
    loss: float | None = None
    """Printed digits; NaN when the line leaves the loss out, None when it cannot be read."""
    exact_loss: float | None = None
    """Full precision, from ``metrics.jsonl``."""
    printed: dict[str, Any] = field(default_factory=dict)
    """The other figures of its line that are columns: ``grad_norm``, ``learning_rate``, ``tflops``
    (of one GPU, as Megatron counts them), ``tokens`` (consumed so far), ``skipped`` (iterations
    skipped by the loss scaler)."""
    host_memory_gib: float | None = None
    """Most host memory in use on the machine that the iteration's memory lines show."""
    device_memory_gib: float | None = None
    """Peak of the device's allocator that the iteration's memory lines show."""
    event: dict[str, Any] = field(default_factory=dict)
    """The iteration's line of ``metrics.jsonl``, which has the phases that no log prints."""

    @property
    def best_loss(self) -> float | None:
        """The exact loss where it is known, else the printed one."""
        return self.loss if self.exact_loss is None else self.exact_loss

    def phase_ms(self, phase: str) -> float | None:
        """Return the duration of ``iteration`` or of a phase of it, in ms."""
        if phase == "iteration":
            return None if self.iteration_s is None else 1000.0 * self.iteration_s
        value = getattr(self, f"{phase}_ms", None)
        return as_number(self.event.get(f"{phase}_ms")) if value is None else float(value)


@dataclass
class Metrics:
    """Events of one ``metrics.jsonl``."""

    path: Path
    start: dict[str, Any] = field(default_factory=dict)
    iterations: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Event by iteration."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Events of the validation split, in the order of the file."""
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    """Events of checkpoints, in the order of the file."""
    end: dict[str, Any] = field(default_factory=dict)

    def loss(self, iteration: int) -> float | None:
        """Return the exact loss; NaN or infinite when the trainer said so."""
        event = self.iterations.get(iteration, {})
        loss = as_number(event.get("loss"))
        return loss if loss is not None else as_number(event.get("loss_text"))

    def digest(self, name: str) -> str | None:
        """Return ``weights_sha256`` or ``optimizer_sha256`` of the end; None when not computed."""
        value = self.end.get(name)
        return value if isinstance(value, str) and value else None


class Reject(NamedTuple):
    """A line that is left out because it does not fit."""

    line: int
    """Position in the log, from 1."""
    reason: str
    text: str
    """Beginning of the line, printable."""


@dataclass
class Log:
    """Records and rejects of one log."""

    path: Path
    settings: dict[str, Setting] = field(default_factory=dict)
    """Settings from the file's name and the log's list of arguments; where they contradict each
    other, those of the list."""
    stated: dict[str, Setting] = field(default_factory=dict)
    """Settings that its lines say, whatever its name says; batch and length of its first one."""
    iterations: list[Iteration] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    """A row each time that DeepSpeed's ``see_memory_usage`` prints: ``line`` (of its first figures
    in the log, from 1), ``title``, ``iteration`` (None before the first forward and where it is
    unknown), figures of the device in GiB, memory of the whole machine in GiB and percent."""
    throughput: list[dict[str, Any]] = field(default_factory=list)
    """A row a line of DeepSpeed's throughput timer, with the names of its groups in ``parse.log``;
    ``step`` counts updates since the process was started."""
    world_size: int | None = None
    """Ranks of the run."""
    vocab_size: int | None = None
    """Rows of the embedding, padding included."""
    parameters: int | None = None
    """Trainable parameters, summed over the model-parallel ranks."""
    device: str | None = None
    """``cpu``, ``cuda``, or what the log calls the accelerator."""
    device_name: str | None = None
    """Name of the GPU that held the model."""
    digest: str = ""
    """Of all its lines; equal in two copies of a log, packed or not. Empty where none was read."""
    rounded_losses: bool = False
    """True where the losses are printed with few digits, zeros at their end left out."""
    recognised: bool = False
    """True once any line of a training log was found."""
    ends_mid_line: bool = False
    metrics: Metrics | None = None
    """Full-precision figures of ``metrics.jsonl``, when it lies beside the log and fits it."""

    @property
    def on_cpu(self) -> bool:
        """True where the model lived on the CPU, so that times say nothing about a GPU."""
        return (self.device or "").startswith("cpu")

    @property
    def notes_on_name(self) -> list[str]:
        """What its name says and its text contradicts."""
        return [note for note in self.notes if note.startswith(OF_NAME)]

    @property
    def vocab_sizes(self) -> list[int]:
        """Every vocabulary size the log names, padded first."""
        start = self.metrics.start if self.metrics else {}
        known = [self.vocab_size, start.get("padded_vocab_size"), start.get("vocab_size")]
        return [size for size in known if isinstance(size, int) and size > 1]


def after_warmup(iterations: Sequence[Iteration], warmup: int) -> Sequence[Iteration]:
    """Return the iterations that count in statistics: all but the log's first ``warmup``."""
    return iterations[max(warmup, 0) :]


def finite(values: Sequence[float | None]) -> list[float]:
    """Return the values that are known and finite."""
    return [value for value in values if value is not None and math.isfinite(value)]


def as_table(value: object) -> dict[str, Any]:
    """Return a part of a JSON file that should be an object; empty for anything else."""
    return value if isinstance(value, dict) else {}


def as_number(value: object) -> float | None:
    """Return a number of a JSON file, written as a number or as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
