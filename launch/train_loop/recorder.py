"""Writes down what a run does: log lines and ``metrics.jsonl``.

Every trainer gives its iterations to one :class:`Recorder`. Log lines have the shapes of the
paper's logs, so that its own parser reads them. ``metrics.jsonl`` has one JSON object a line.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

import psutil

from configs.errors import ConfigError
from configs.schema import Point
from launch.train_loop.runfile import Ranks, RunFile

LARGEST_LOSS = 20.0
"""Megatron prints the perplexity of this loss for every larger one."""


@dataclass(frozen=True)
class Iteration:
    """What came out of one iteration."""

    number: int
    """From 1."""
    seconds: float
    loss: float
    """Mean over the global batch."""
    learning_rate: float
    """Rate of this iteration's update."""
    skipped: bool = False
    """The update was left out because the gradient norm was not finite."""
    grad_norm: float | None = None
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    """``forward_ms`` and so on."""
    device_bytes: int | None = None
    """Peak of the device's memory; None without CUDA."""
    loss_scale: float = 1.0
    """What an fp16 model's loss was multiplied by."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the event in ``metrics.jsonl``."""


class Recorder:
    """The one writer of a run's log lines and ``metrics.jsonl``.

    Every rank has one. Rank 0 writes the metrics, the last rank the line of an iteration, as
    Megatron does.
    """

    def __init__(self, run: RunFile, ranks: Ranks, *, counts_tokens: bool = True) -> None:
        """Open nothing yet; ``counts_tokens`` if all samples have the model's sequence length."""
        self._run, self._point, self._ranks = run, run.point, ranks
        self._counts_tokens = counts_tokens
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        _write_only_whole_lines()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._file is not None:
            self._file.close()

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Append an object to ``metrics.jsonl`` on rank 0; it is on disk when the call returns.

        Numbers that are not finite must have been replaced by None.

        Raises:
            ConfigError: the file of another run is there.
        """
        if not self._ranks.is_first:
            return
        path = self._run.metrics_path
        if self._file is None:
            try:
                self._file = path.open("x", encoding="utf-8")
            except FileExistsError:
                raise ConfigError(f"{path}: already there; take a new folder") from None
        self._file.write(json.dumps({"event": name, **fields}, allow_nan=False) + "\n")
        self._file.flush()

    def start(self, fields: Mapping[str, Any]) -> None:
        """Write the ``start`` event.

        Raises:
            ConfigError: the metrics of another run are there.
        """
        point = self._point
        known = {"engine": str(point.engine), "num_ranks": point.num_ranks, "seed": point.seed}
        self.event("start", {**known, **fields})

    def sizes(self) -> None:
        """Write the lines of parallel groups and vocabulary."""
        if not self._ranks.is_first:
            return
        point = self._point
        write_line(
            f"using world size: {point.num_ranks}, data-parallel-size: {point.dp}, "
            f"sequence-parallel size: 1, tensor-model-parallel size: {point.tp}, "
            f"pipeline-model-parallel size: {point.pp} "
        )
        if self._counts_tokens:
            size, padded = point.model.vocab_size, point.model.padded_vocab_size(point.tp)
            write_line(
                f" > padded vocab (size: {size}) with {padded - size} dummy tokens "
                f"(new size: {padded})"
            )

    def parameters(self, count: int, tp_rank: int = 0, stage: int = 0) -> None:
        """Write the line of the parameters of one tensor-parallel rank of a pipeline stage."""
        write_line(
            " > number of parameters on (tensor, pipeline) model parallel rank "
            f"({tp_rank}, {stage}): {count}"
        )

    def timer(self, name: str, seconds: float) -> None:
        """Write ``<TIMER:interval-time,0.125>``."""
        write_line(f"<TIMER:{name},{seconds!r}>")

    def iteration(self, iteration: Iteration) -> None:
        """Write an iteration down."""
        if self._ranks.is_last:
            write_line(iteration_line(self._point, iteration, counts_tokens=self._counts_tokens))
        if not self._ranks.is_first:
            return
        fields: dict[str, Any] = {
            "iteration": iteration.number,
            "iteration_ms": iteration.seconds * 1000.0,
            **iteration.phases_ms,
            "loss": finite_or_none(iteration.loss),
            "grad_norm": finite_or_none(iteration.grad_norm),
            "learning_rate": iteration.learning_rate,
            "host_memory_bytes": psutil.Process().memory_info().rss,
            "device_memory_bytes": iteration.device_bytes,
            "skipped": iteration.skipped,
            **iteration.more,
        }
        if self._counts_tokens:
            fields["tokens"] = iteration.number * self._tokens_per_batch
        if fields["loss"] is None:
            fields["loss_text"] = str(iteration.loss)
        self.event("iteration", fields)

    def evaluation(
        self,
        iteration: int,
        loss: float,
        accuracy: float | None = None,
        seconds: float | None = None,
    ) -> None:
        """Write an evaluation down: of a classifier with its accuracy, else with a perplexity."""
        fields = {"iteration": iteration, "loss": finite_or_none(loss)}
        if accuracy is None:
            end = f"lm loss PPL: {_loss_text(perplexity(loss))}"
            fields["perplexity"] = finite_or_none(perplexity(loss))
            fields["tokens"] = self._point.eval_iterations * self._tokens_per_batch
            samples = self._point.eval_iterations * self._point.global_batch_size
            fields["samples_per_s"] = samples / seconds if seconds else None
        else:
            end = f"accuracy: {accuracy:.4f}"
            fields["accuracy"] = accuracy
        if self._ranks.is_last:
            value = _loss_text(loss)
            write_line(
                f" validation loss at iteration {iteration} | lm loss value: {value} | {end} |"
            )
        self.event("evaluation", fields)

    def checkpoint_stall(self, iteration: int, seconds: float) -> None:
        """Write down how long training stood still for a checkpoint after an iteration."""
        self.event("checkpoint", {"iteration": iteration, "stall_ms": seconds * 1000.0})

    def checkpoint(self, iteration: int, path: Path) -> None:
        """Write the line of a checkpoint that is whole; any thread may call it."""
        if self._ranks.is_first:
            write_line(f"  successfully saved checkpoint at iteration {iteration:7d} to {path}")

    @property
    def _tokens_per_batch(self) -> int:
        return self._point.global_batch_size * self._point.model.seq_length


def write_line(text: str) -> None:
    """Write one whole line to stdout in one system call, so that ranks do not glue theirs."""
    sys.stdout.flush()
    rest = f"{text}\n".encode()
    while rest:
        rest = rest[os.write(1, rest) :]


def _write_only_whole_lines() -> None:
    """Make Python hand over lines at once; torchrun's ``python -u`` splits off every newline."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def iteration_line(point: Point, iteration: Iteration, *, counts_tokens: bool = True) -> str:
    """Return the line of one iteration; TFLOPs are per rank, see :func:`flops_per_iteration`."""
    length, seconds = point.model.seq_length, iteration.seconds
    samples = iteration.number * point.global_batch_size
    tflops = flops_per_iteration(point) / (seconds * point.num_ranks * 1e12)
    fields = {
        f"elapsed_time {seconds:.6f}": True,
        f"consumed samples: {samples:12d}": True,
        f"consumed tokens: {samples * length:12d}": counts_tokens,
        f"elapsed time per iteration (ms): {seconds * 1000.0:.1f}": True,
        f"learning rate: {iteration.learning_rate:.3E}": True,
        f"global batch size: {point.global_batch_size:5d}": True,
        f"lm loss: {_loss_text(iteration.loss)}": True,
        f"loss scale: {iteration.loss_scale:.1f}": counts_tokens,
        f"actual seqlen: {length:5d}": counts_tokens,
        f"number of skipped iterations: {int(iteration.skipped):3d}": True,
        f"number of nan iterations: {int(math.isnan(iteration.loss)):3d}": True,
        f"samples per second: {point.global_batch_size / seconds:.3f}": True,
        f"TFLOPs: {tflops:.2f}": counts_tokens,
    }
    return f" {' | '.join(text for text, is_shown in fields.items() if is_shown)} |"


def perplexity(loss: float) -> float:
    """Return the exponential of the loss; above a loss of 20 that of 20, as in Megatron."""
    return math.exp(min(loss, LARGEST_LOSS)) if math.isfinite(loss) else loss


def flops_per_iteration(point: Point) -> float:
    """Return the floating-point operations of one iteration, over all ranks.

    ``(6N + 12 l h s)`` a token: N counts every parameter of the model, twice for forward and four
    times for backward; the second term is attention's two products of activations, not halved for
    the causal mask. A third more when activations are recomputed. The paper's logs use Megatron's
    formula for a GPT-2 block instead (feed-forward of 4h, no grouped queries), so its TFLOPs do not
    compare with these.
    """
    model = point.model
    attention = 12 * model.layers * model.hidden * model.seq_length
    per_token = 6 * model.num_parameters(point.tp) + attention
    recompute = 4 / 3 if point.activation_checkpointing else 1.0
    return per_token * recompute * point.global_batch_size * model.seq_length


def finite_or_none(value: float | None) -> float | None:
    """Return the number itself, or None where JSON has no word for it."""
    return value if value is not None and math.isfinite(value) else None


def _loss_text(loss: float) -> str:
    return f"{loss:.6E}" if math.isfinite(loss) else str(loss)
