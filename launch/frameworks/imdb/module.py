"""The Lightning module: loss and accuracy of three splits, Adam with a rate that falls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import StepLR

from launch.frameworks.imdb.data import Batch

DECAY = 0.6
"""What the learning rate is multiplied by after every epoch."""


@dataclass
class Tally:
    """Loss and hits of the reviews seen since the last :meth:`take`, on this rank."""

    loss: float = 0.0
    hits: int = 0
    count: int = 0

    def add(self, loss: Tensor, scores: Tensor, labels: Tensor) -> None:
        """Count a batch whose mean loss is ``loss``."""
        self.loss += float(loss.detach()) * len(labels)
        self.hits += int((scores.argmax(1) == labels).sum())
        self.count += len(labels)

    def take(self, device: torch.device) -> tuple[float, float] | None:
        """Mean loss and accuracy over the reviews of all ranks; None where there were none."""
        sums = torch.tensor([self.loss, self.hits, self.count], dtype=torch.float64, device=device)
        if dist.is_initialized():
            dist.all_reduce(sums)
        self.loss, self.hits, self.count = 0.0, 0, 0
        loss, hits, count = sums.tolist()
        return (loss / count, hits / count) if count else None


class SentimentModule(pl.LightningModule):
    """Trains a classifier of reviews."""

    def __init__(self, encoder: nn.Module, lr: float = 2e-4, *, on_host: bool = False) -> None:
        """Say what to train.

        Args:
            encoder: called with tokens and mask, gives two scores a review.
            lr: learning rate of the first epoch.
            on_host: take DeepSpeed's Adam for CPUs, as DeepSpeed asks for where the optimizer's
                state is offloaded.
        """
        super().__init__()
        self.encoder = encoder
        self._lr, self._on_host = lr, on_host
        self.tallies = {split: Tally() for split in ("train", "validation", "test")}
        self.results: dict[str, float] = {}
        """``SPLIT_loss`` and ``SPLIT_accuracy`` of the last epoch of each split."""

    def _loss(self, split: str, batch: Batch) -> Tensor:
        scores = self.encoder(batch.tokens, batch.mask)
        loss = F.cross_entropy(scores.float(), batch.labels)
        self.tallies[split].add(loss, scores, batch.labels)
        return loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Mean loss of a micro-batch."""
        return self._loss("train", batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Count a batch of the held-out reviews."""
        self._loss("validation", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Count a batch of the test reviews."""
        self._loss("test", batch)

    def on_train_epoch_end(self) -> None:
        """Tell the loggers what the epoch came to."""
        self._tell("train")

    def on_validation_epoch_end(self) -> None:
        """Tell the loggers what the epoch came to."""
        self._tell("validation")

    def on_test_epoch_end(self) -> None:
        """Tell the loggers what the epoch came to."""
        self._tell("test")

    def _tell(self, split: str) -> None:
        found = self.tallies[split].take(self.device)
        if found is None:
            return
        for name, value in zip((f"{split}_loss", f"{split}_accuracy"), found, strict=True):
            self.results[name] = value
            self.log(name, value, rank_zero_only=False, sync_dist=False)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Adam without weight decay, and its rate times 0.6 after every epoch."""
        optimizer = self._adam()
        schedule: Any = StepLR(optimizer, 1, DECAY)
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def _adam(self) -> Optimizer:
        if not self._on_host:
            return Adam(self.parameters(), lr=self._lr)
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        made: Optimizer = DeepSpeedCPUAdam(self.parameters(), lr=self._lr, adamw_mode=False)
        return made
