"""The callback that hands Lightning's iterations to the recorder of all trainers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deep_optimizer_states.state_reader import digest
from launch.frameworks.imdb.module import SecondsPerBatch, SentimentModule
from launch.trainer.loop import Digests, state_digests
from launch.trainer.recorder import Iteration, Recorder


class Recording(pl.Callback):
    """Records iterations and evaluations, and keeps the final state's digests.

    It must come after the callback that times.
    """

    def __init__(self, recorder: Recorder, timing: SecondsPerBatch) -> None:
        self._recorder, self._timing = recorder, timing
        self._losses: list[Tensor] = []
        self._rate, self._num_skipped = 0.0, 0
        self._grad_norm: float | None = None
        self.digests: Digests = (None, None)
        self.iterations = 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Note the rate of the update to come."""
        self._rate = float(trainer.optimizers[0].param_groups[0]["lr"])

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: object
    ) -> None:
        """Take the norm without DeepSpeed: the parameters still have their gradients now."""
        if not is_deepspeed(trainer.model):
            grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
            self._grad_norm = float(nn.utils.get_total_norm(grads))

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,  # noqa: ANN401 - Lightning's
        batch: object,
        batch_idx: int,
    ) -> None:
        """Record an iteration once its last micro-batch is over."""
        self._losses.append(outputs["loss"].detach().double())
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self.iterations += 1
        loss = _mean_over_ranks(torch.stack(self._losses).mean())
        self._losses = []
        if is_deepspeed(trainer.model):
            norm = trainer.model.get_global_grad_norm()  # type: ignore[union-attr, operator]
            self._grad_norm = None if norm is None else float(norm)
        # DeepSpeed leaves updates out where 16-bit gradients overflow.
        skipped_before = self._num_skipped
        self._num_skipped = int(getattr(trainer.model, "skipped_steps", 0))
        seconds = self._timing.iterations_s[-1]
        self._recorder.timer("interval-time", seconds)
        self._recorder.iteration(
            Iteration(
                number=self.iterations,
                seconds=seconds,
                loss=loss,
                learning_rate=self._rate,
                skipped=self._num_skipped > skipped_before,
                grad_norm=self._grad_norm,
                phases_ms=self._timing.phases_ms,
                device_bytes=allocated_peak_bytes(trainer.strategy.root_device),
            )
        )

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record an evaluation."""
        assert isinstance(pl_module, SentimentModule)
        results = pl_module.results
        loss, accuracy = results["validation_loss"], results["validation_accuracy"]
        self._recorder.evaluation(self.iterations, loss, accuracy)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Fingerprint the state before Lightning takes the strategy down."""
        model: Any = trainer.model
        # Without DeepSpeed every rank has the same weights, and its state is not read.
        is_engine = is_deepspeed(model)
        self.digests = state_digests(model) if is_engine else (digest(model.parameters()), None)


def is_deepspeed(model: object) -> bool:
    """Tell whether a model is an engine of DeepSpeed."""
    return hasattr(model, "get_global_grad_norm")


def allocated_peak_bytes(device: torch.device) -> int | None:
    """Return the most device memory allocated at once; None on a CPU, which counts none."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _mean_over_ranks(value: Tensor) -> float:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value)
        value = value / dist.get_world_size()
    return value.item()
