"""What a log holds, as records: nothing here is invented, what is missing is ``None``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from parse.log.memory import MemoryLine

if TYPE_CHECKING:
    from parse.log.metrics import Metrics

Setting = int | float | str

PHASES = ("forward", "backward", "update")
"""Phases of an iteration, in the order they run."""

_REJECT_CHARACTERS = 200


@dataclass
class Iteration:
    """One iteration of a run, as the log prints it."""

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
    grad_norm: float | None = None
    learning_rate: float | None = None
    tflops: float | None = None
    """TFLOP/s of one GPU, as Megatron counts them."""
    tokens: int | None = None
    """Tokens consumed so far."""
    skipped: int | None = None
    """Iterations skipped by the loss scaler."""
    host_memory_gib: float | None = None
    """Most host memory in use on the machine that the iteration's memory lines show."""
    device_memory_gib: float | None = None
    """Peak of the device's allocator that the iteration's memory lines show."""

    validation_loss: float | None = None
    """Of the evaluation after the iteration, from ``metrics.jsonl``."""
    validation_perplexity: float | None = None

    @property
    def best_loss(self) -> float | None:
        """The exact loss where it is known, else the printed one."""
        return self.loss if self.exact_loss is None else self.exact_loss

    def phase_ms(self, phase: str) -> float | None:
        """Duration of ``iteration`` or of a phase of it, in ms."""
        if phase == "iteration":
            return None if self.iteration_s is None else 1000.0 * self.iteration_s
        value: float | None = getattr(self, f"{phase}_ms")
        return value


@dataclass(frozen=True)
class Reject:
    """A line that looks like one of ours but cannot be read."""

    line_number: int
    reason: str
    text: str

    @classmethod
    def of(cls, line_number: int, reason: str, text: str) -> Reject:
        """A reject that keeps the beginning of the line, printable."""
        shown = "".join(c if c.isprintable() else "?" for c in text[:_REJECT_CHARACTERS])
        return cls(line_number, reason, shown.strip())


@dataclass
class Log:
    """Records and rejects of one log."""

    path: Path
    settings: dict[str, Setting] = field(default_factory=dict)
    """What the file's name, or else the log's list of arguments, says of the run."""
    iterations: list[Iteration] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    memory: list[MemoryLine] = field(default_factory=list)
    """DeepSpeed's memory lines, in the order of the log."""
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
    recognised: bool = False
    """Whether any line of a training log was found."""
    ends_mid_line: bool = False
    """Whether the file stops inside a line."""
    metrics: Metrics | None = None
    """Full-precision figures of ``metrics.jsonl``, when it lies beside the log and fits it."""

    @property
    def engine(self) -> str | None:
        """``vanilla``, ``async-gradients`` or ``hybrid``; None when the name does not say."""
        engine = self.settings.get("engine")
        return None if engine is None else str(engine)

    @property
    def engine_label(self) -> str:
        """The engine with its stride, for tables and messages."""
        return engine_label(self.settings)

    @property
    def vocab_sizes(self) -> list[int]:
        """Every vocabulary size the log names, padded first."""
        start = self.metrics.start if self.metrics else {}
        known = [self.vocab_size, start.get("padded_vocab_size"), start.get("vocab_size")]
        return [size for size in known if isinstance(size, int) and size > 1]


def engine_label(settings: Mapping[str, object]) -> str:
    """``hybrid (stride 2)``, ``vanilla``; ``unknown engine`` when the settings do not say."""
    engine, stride = settings.get("engine"), settings.get("stride")
    if engine is None:
        return "unknown engine"
    return f"{engine} (stride {stride})" if engine == "hybrid" and stride else str(engine)


def after_warmup(iterations: Sequence[Iteration], warmup: int) -> Sequence[Iteration]:
    """The iterations that count in statistics: all but the log's first ``warmup``."""
    return iterations[max(warmup, 0) :]


def values_ms(log: Log, phase: str, warmup: int) -> list[float]:
    """Durations of a phase after the warm-up, in ms, missing ones left out."""
    return [value for value in _phase_values(log, phase, warmup) if value is not None]


def _phase_values(log: Log, phase: str, warmup: int) -> Iterator[float | None]:
    for record in after_warmup(log.iterations, warmup):
        value = record.phase_ms(phase)
        yield value if value is not None and math.isfinite(value) else None
