"""Callbacks that measure a training and write it down as every trainer of the harness does."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable
from statistics import fmean, median
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from configs.schema import Point
from launch.frameworks.imdb.module import SentimentModule
from launch.trainer.log import timer_line, write_line
from launch.trainer.metrics import MetricsFile

_PHASES = ("forward", "backward", "update")
_GIB = 2.0**30
_WARMUP = 2
"""First iterations that the median of the seconds per batch leaves out."""


class SecondsPerBatch(pl.Callback):
    """Times every iteration and its phases, and each epoch without its validation.

    An iteration begins when the one before it ends, so that waiting for the loader counts; what
    lies between two epochs does not.
    """

    def __init__(self) -> None:
        self.iterations_s: list[float] = []
        self.epochs_s: list[float] = []
        self.phases_ms: dict[str, float] = dict.fromkeys(_PHASES, 0.0)
        self._begin = self._mark = self._epoch_begin = 0.0
        self._on_gpu = False

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin an epoch."""
        self._on_gpu = trainer.strategy.root_device.type == "cuda"
        self._begin = self._epoch_begin = self._now()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Begin a micro-batch's forward."""
        self._mark = self._now()
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.phases_ms = dict.fromkeys(_PHASES, 0.0)

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """End forward."""
        self._end_phase("forward")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End backward."""
        self._end_phase("backward")

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,  # noqa: ANN401 - Lightning's
        batch: object,
        batch_idx: int,
    ) -> None:
        """End the update, and the iteration where this is its last micro-batch."""
        self._end_phase("update")
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            now = self._now()
            self.iterations_s.append(now - self._begin)
            self._begin = now
            pl_module.log("seconds_per_batch", self.iterations_s[-1], rank_zero_only=True)
        if batch_idx + 1 == trainer.num_training_batches:
            self.epochs_s.append(self._now() - self._epoch_begin)

    @property
    def seconds_per_batch(self) -> float:
        """Median of the iterations after the first."""
        return median(self.iterations_s[_WARMUP:] or self.iterations_s)

    def _end_phase(self, name: str) -> None:
        now = self._now()
        self.phases_ms[name] += 1000.0 * (now - self._mark)
        self._mark = now

    def _now(self) -> float:
        if self._on_gpu:  # what was launched counts to the phase that launched it
            torch.cuda.synchronize()
        return time.perf_counter()


class GradientNorm(pl.Callback):
    """Norm of all gradients before each update, whoever keeps them."""

    value: float | None = None

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: object
    ) -> None:
        """Without DeepSpeed the parameters still have their gradients now."""
        if not is_deepspeed(trainer.model):
            grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
            self.value = float(nn.utils.get_total_norm(grads))

    def of(self, trainer: pl.Trainer) -> float | None:
        """Norm of the last update's gradients; None where DeepSpeed computed none."""
        if not is_deepspeed(trainer.model):
            return self.value
        norm = trainer.model.get_global_grad_norm()  # type: ignore[union-attr, operator]
        return None if norm is None else float(norm)


def is_deepspeed(model: object) -> bool:
    """Whether a model is an engine of DeepSpeed."""
    return hasattr(model, "get_global_grad_norm")


class Recorder(pl.Callback):
    """Writes log lines and ``metrics.jsonl`` on rank 0, and keeps the final state's digests.

    It must come after the callbacks that it reads.
    """

    def __init__(
        self,
        point: Point,
        metrics: MetricsFile,
        timing: SecondsPerBatch,
        norm: GradientNorm,
        digests: Callable[[Any], tuple[str | None, str | None]],
    ) -> None:
        self._point, self._metrics = point, metrics
        self._timing, self._norm, self._digests = timing, norm, digests
        self._losses: list[Tensor] = []
        self._rate = 0.0
        self.digests: tuple[str | None, str | None] = (None, None)
        self.iterations = 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Note the rate of the update to come."""
        self._rate = float(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,  # noqa: ANN401 - Lightning's
        batch: object,
        batch_idx: int,
    ) -> None:
        """Write an iteration down once its last micro-batch is over."""
        self._losses.append(outputs["loss"].detach().double())
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self.iterations += 1
        loss, norm = _mean_over_ranks(torch.stack(self._losses).mean()), self._norm.of(trainer)
        self._losses = []
        if trainer.is_global_zero:
            seconds = self._timing.iterations_s[-1]
            write_line(timer_line("interval-time", seconds))
            write_line(self._line(loss, seconds))
            device_bytes = peak_bytes(trainer.strategy.root_device)
            self._metrics.write("iteration", self._fields(loss, seconds, norm, device_bytes))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write an evaluation down."""
        if trainer.sanity_checking or not self.iterations or not trainer.is_global_zero:
            return
        assert isinstance(pl_module, SentimentModule)
        loss = pl_module.results["validation_loss"]
        accuracy = pl_module.results["validation_accuracy"]
        write_line(
            f" validation loss at iteration {self.iterations} | lm loss value: {loss:.6E} | "
            f"accuracy: {accuracy:.4f} |"
        )
        fields = {"iteration": self.iterations, "loss": _finite(loss), "accuracy": accuracy}
        self._metrics.write("evaluation", fields)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Fingerprint the state before Lightning takes the strategy down."""
        self.digests = self._digests(trainer.model)

    def _line(self, loss: float, seconds: float) -> str:
        samples = self.iterations * self._point.global_batch_size
        fields = (
            f"elapsed_time {seconds:.6f}",
            f"consumed samples: {samples:12d}",
            f"elapsed time per iteration (ms): {seconds * 1000.0:.1f}",
            f"learning rate: {self._rate:.3E}",
            f"global batch size: {self._point.global_batch_size:5d}",
            f"lm loss: {loss:.6E}" if math.isfinite(loss) else f"lm loss: {loss}",
            f"number of nan iterations: {int(math.isnan(loss)):3d}",
            f"samples per second: {self._point.global_batch_size / seconds:.3f}",
        )
        return f" {' | '.join(fields)} |"

    def _fields(
        self, loss: float, seconds: float, norm: float | None, device_bytes: int | None
    ) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "iteration": self.iterations,
            "iteration_ms": 1000.0 * seconds,
            **{f"{name}_ms": ms for name, ms in self._timing.phases_ms.items()},
            "loss": _finite(loss),
            "grad_norm": _finite(norm),
            "learning_rate": self._rate,
            "host_memory_bytes": psutil.Process().memory_info().rss,
            "device_memory_bytes": device_bytes,
            "skipped": False,
        }
        return fields if fields["loss"] is not None else {**fields, "loss_text": str(loss)}


def peak_bytes(device: torch.device) -> int | None:
    """Most memory of a device that was allocated at once; None on a CPU, which counts none."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def summary(
    timing: SecondsPerBatch, results: dict[str, float], device: torch.device
) -> dict[str, Any]:
    """What a run came to, for its last line; every rank must call it.

    Memory is that of the rank that took most: the peak of CUDA's allocator and of its resident set.
    """
    allocated = peak_bytes(device)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    everyone: list[tuple[int | None, int]] = [(allocated, resident)]
    if dist.is_initialized():
        everyone = everyone * dist.get_world_size()
        dist.all_gather_object(everyone, (allocated, resident))
    devices = [bytes_ / _GIB for bytes_, _ in everyone if bytes_ is not None]
    return {
        "epoch_s": fmean(timing.epochs_s) if timing.epochs_s else None,
        "batch_s": timing.seconds_per_batch,
        "device_peak_gib": max(devices, default=None),
        "device_peaks_gib": devices,
        "rank_peak_gib": max(bytes_ for _, bytes_ in everyone) / _GIB,
        **{name: _finite(value) for name, value in results.items()},
        "test_error": 1.0 - results["test_accuracy"],
    }


def _mean_over_ranks(value: Tensor) -> float:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value)
        value = value / dist.get_world_size()
    return value.item()


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
