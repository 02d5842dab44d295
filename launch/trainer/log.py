"""Lines of the log, in the shapes of the paper's logs, so that its own parser reads them."""

from __future__ import annotations

import io
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from configs.schema import Point

_STDOUT = 1
_LARGEST_LOSS = 20.0
"""Of a perplexity that is told."""


def write_line(text: str) -> None:
    """Write one whole line to stdout in one system call, so that ranks do not glue theirs."""
    sys.stdout.flush()
    rest = f"{text}\n".encode()
    while rest:
        rest = rest[os.write(_STDOUT, rest) :]


def write_only_whole_lines() -> None:
    """Make Python hand over lines at once; torchrun's ``python -u`` splits off every newline."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def timer_line(name: str, seconds: float) -> str:
    """``<TIMER:interval-time,0.125>``; every rank writes its own."""
    return f"<TIMER:{name},{seconds!r}>"


def world_line(point: Point) -> str:
    """Sizes of the parallel groups."""
    return (
        f"using world size: {point.num_ranks}, data-parallel-size: {point.dp}, "
        f"sequence-parallel size: 1, tensor-model-parallel size: {point.tp}, "
        f"pipeline-model-parallel size: {point.pp} "
    )


def vocabulary_line(point: Point) -> str:
    """Size of the vocabulary before and after padding."""
    size, padded = point.model.vocab_size, point.model.padded_vocab_size(point.tp)
    return f" > padded vocab (size: {size}) with {padded - size} dummy tokens (new size: {padded})"


def parameters_line(tp_rank: int, num_parameters: int, stage: int = 0) -> str:
    """Parameters of one tensor-parallel rank of a pipeline stage."""
    return (
        " > number of parameters on (tensor, pipeline) model parallel rank "
        f"({tp_rank}, {stage}): {num_parameters}"
    )


@dataclass(frozen=True)
class IterationResult:
    """What came out of one iteration, the same on every rank but for the times."""

    iteration: int
    """From 1."""
    seconds: float
    """From the end of the iteration before to the end of this one."""
    loss: float
    """Mean over the global batch."""
    learning_rate: float
    """Rate of this iteration's update."""
    skipped: bool
    """The update was left out because the gradient norm was not finite."""
    loss_scale: float = 1.0
    """What an fp16 model's loss was multiplied by."""


def iteration_line(point: Point, result: IterationResult) -> str:
    """The line of one iteration.

    ``lm loss`` is always there, ``nan`` included. TFLOPs are per rank, see :func:`flops`.
    """
    samples = result.iteration * point.global_batch_size
    length = point.model.seq_length
    tflops = flops_per_iteration(point) / (result.seconds * point.num_ranks * 1e12)
    fields = (
        f"elapsed_time {result.seconds:.6f}",
        f"consumed samples: {samples:12d}",
        f"consumed tokens: {samples * length:12d}",
        f"elapsed time per iteration (ms): {result.seconds * 1000.0:.1f}",
        f"learning rate: {result.learning_rate:.3E}",
        f"global batch size: {point.global_batch_size:5d}",
        f"lm loss: {_loss_text(result.loss)}",
        f"loss scale: {result.loss_scale:.1f}",
        f"actual seqlen: {length:5d}",
        f"number of skipped iterations: {int(result.skipped):3d}",
        f"number of nan iterations: {int(math.isnan(result.loss)):3d}",
        f"samples per second: {point.global_batch_size / result.seconds:.3f}",
        f"TFLOPs: {tflops:.2f}",
    )
    return f" {' | '.join(fields)} |"


def evaluation_line(iteration: int, loss: float) -> str:
    """The line of an evaluation after an iteration, with its perplexity."""
    return (
        f" validation loss at iteration {iteration} | lm loss value: {_loss_text(loss)} | "
        f"lm loss PPL: {_loss_text(perplexity(loss))} |"
    )


def checkpoint_line(iteration: int, path: Path) -> str:
    """The line of a checkpoint after an iteration."""
    return f"  successfully saved checkpoint at iteration {iteration:7d} to {path}"


def perplexity(loss: float) -> float:
    """Exponential of the loss; above a loss of 20 that of 20, as in Megatron."""
    return math.exp(min(loss, _LARGEST_LOSS)) if math.isfinite(loss) else loss


def flops_per_iteration(point: Point) -> float:
    """Floating-point operations of one iteration, over all ranks.

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


def _loss_text(loss: float) -> str:
    return f"{loss:.6E}" if math.isfinite(loss) else str(loss)
