"""The study's parts for Lightning: batches, module, strategies, and the time of a batch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler

from launch.frameworks.imdb.files import Split, TokenizedReviews
from launch.trainer.loop import PHASES
from launch.trainer.runtime import leave_shm_out

DECAY = 0.6
"""What the learning rate is multiplied by after every epoch."""
_WARMUP = 2
"""First iterations that the median of the seconds per batch leaves out."""


class Batch(NamedTuple):
    """Reviews of one micro-batch, padded to the longest of them."""

    tokens: Tensor
    """int64 (reviews, length), ``pad_id`` behind the end of each review."""
    mask: Tensor
    """bool (reviews, length), True where there is a token and not padding."""
    labels: Tensor
    """int64 (reviews)."""


def collate(reviews: Split, *, pad_id: int, end_id: int, max_length: int) -> Batch:
    """Truncate and pad some reviews.

    The mask is made from the lengths, not by comparing with ``pad_id``: so it stays right for a
    tokenizer whose padding also stands for something else.

    Args:
        reviews: tokens and label of each.
        pad_id: the tokenizer's id of padding.
        end_id: the token that a truncated review ends in, as a whole one does.
        max_length: tokens of a review, at most.
    """
    cut = [truncated(tokens.tolist(), end_id, max_length) for tokens, _ in reviews]
    longest = max(map(len, cut))
    padded = [tokens + [pad_id] * (longest - len(tokens)) for tokens in cut]
    lengths = torch.tensor([len(tokens) for tokens in cut])
    return Batch(
        tokens=torch.tensor(padded),
        mask=torch.arange(longest)[None, :] < lengths[:, None],
        labels=torch.tensor([label for _, label in reviews]),
    )


def truncated(tokens: Sequence[int], end_id: int, max_length: int) -> list[int]:
    """Return the first ``max_length`` tokens, the last of which is then the end token."""
    if len(tokens) <= max_length:
        return list(tokens)
    return [*tokens[: max_length - 1], end_id]


class ReviewsData(pl.LightningDataModule):
    """Loaders of the three splits; Lightning gives each rank its own share of them."""

    def __init__(
        self,
        reviews: TokenizedReviews,
        batch_size: int,
        max_length: int,
        *,
        workers: int = 0,
        seed: int = 0,
    ) -> None:
        """Say what to load.

        Args:
            reviews: all three splits.
            batch_size: reviews of a micro-batch, on each rank.
            max_length: tokens of a review, at most.
            workers: processes that collate ahead, on each rank; 0 for none.
            seed: of the order of the training reviews.
        """
        super().__init__()
        self._reviews, self._batch_size = reviews, batch_size
        self._workers, self._seed = workers, seed
        self._collate = partial(
            collate, pad_id=reviews.pad_id, end_id=reviews.end_id, max_length=max_length
        )

    def train_dataloader(self) -> DataLoader[Any]:
        """Load training reviews, in another order in every epoch, without a short last batch.

        The order is this module's own and not left to Lightning, which shuffles in one way for some
        strategies and in another for the rest: they could not be compared. Lightning tells such a
        sampler which epoch it is.
        """
        trainer = self.trainer
        sampler: DistributedSampler[Any] = DistributedSampler(
            self._reviews["train"],  # type: ignore[arg-type]  # a list is a data set
            num_replicas=trainer.world_size if trainer else 1,
            rank=trainer.global_rank if trainer else 0,
            shuffle=True,
            seed=self._seed,
        )
        return self._loader("train", sampler=sampler, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader("validation")

    def test_dataloader(self) -> DataLoader[Any]:
        return self._loader("test")

    def _loader(self, split: str, **more: Any) -> DataLoader[Any]:
        return DataLoader(
            self._reviews[split],  # type: ignore[arg-type]  # a list is a data set
            batch_size=self._batch_size,
            collate_fn=self._collate,
            num_workers=self._workers,
            persistent_workers=self._workers > 0,
            **more,
        )


class SentimentModule(pl.LightningModule):
    """Trains a classifier of reviews: Adam, whose rate falls to six tenths after every epoch."""

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
        # Loss, hits and reviews of this rank since the epoch of a split began.
        self._sums = {split: [0.0, 0.0, 0.0] for split in ("train", "validation", "test")}
        self.results: dict[str, float] = {}
        """``SPLIT_loss`` and ``SPLIT_accuracy`` of the last epoch of each split."""

    def _loss(self, split: str, batch: Batch) -> Tensor:
        scores = self.encoder(batch.tokens, batch.mask)
        loss = F.cross_entropy(scores.float(), batch.labels)
        num_reviews = len(batch.labels)
        sums = self._sums[split]
        sums[0] += float(loss.detach()) * num_reviews
        sums[1] += int((scores.argmax(1) == batch.labels).sum())
        sums[2] += num_reviews
        return loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self._loss("train", batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._loss("validation", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._loss("test", batch)

    def on_train_epoch_end(self) -> None:
        self._end("train")

    def on_validation_epoch_end(self) -> None:
        self._end("validation")

    def on_test_epoch_end(self) -> None:
        self._end("test")

    def _end(self, split: str) -> None:
        """Log means over the reviews of all ranks, not over batches."""
        sums = torch.tensor(self._sums[split], dtype=torch.float64, device=self.device)
        self._sums[split] = [0.0, 0.0, 0.0]
        if dist.is_initialized():
            dist.all_reduce(sums)
        loss, hits, count = sums.tolist()
        if not count:
            return
        for name, value in ((f"{split}_loss", loss / count), (f"{split}_accuracy", hits / count)):
            self.results[name] = value
            self.log(name, value, rank_zero_only=False, sync_dist=False)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        if self._on_host:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            optimizer = DeepSpeedCPUAdam(self.parameters(), lr=self._lr, adamw_mode=False)
        else:
            optimizer = Adam(self.parameters(), lr=self._lr)
        schedule: Any = StepLR(optimizer, 1, DECAY)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class CpuDeepSpeedStrategy(DeepSpeedStrategy):
    """Lightning's strategy for machines without a GPU.

    Lightning refuses DeepSpeed there and reads CUDA's device indices; DeepSpeed itself can do
    without. Where there is a GPU, the strategy of Lightning itself is to be used.
    """

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", self.local_rank)  # DeepSpeed asks for an index

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)  # without DeepSpeedStrategy's check for CUDA

    def setup_distributed(self) -> None:
        leave_shm_out()
        self.set_world_ranks()
        self._init_deepspeed_distributed()


def strategy_of(config: Mapping[str, Any] | None, *, on_gpu: bool, num_ranks: int) -> Strategy:
    """Return what Lightning's ``Trainer`` gets as its strategy.

    Args:
        config: DeepSpeed's; None or empty to train without DeepSpeed.
        on_gpu: whether the model lives on GPUs.
        num_ranks: processes of the run.
    """
    if config:
        kind = DeepSpeedStrategy if on_gpu else CpuDeepSpeedStrategy
        return kind(config=dict(config))
    if num_ranks == 1:
        return SingleDeviceStrategy("cuda:0" if on_gpu else "cpu")
    return DDPStrategy(process_group_backend="nccl" if on_gpu else "gloo")


class SecondsPerBatch(pl.Callback):
    """Times every iteration and its phases, and each epoch without its validation.

    An iteration begins when the one before it ends, so that waiting for the loader counts; what
    lies between two epochs does not.
    """

    def __init__(self) -> None:
        self.iterations_s: list[float] = []
        self.epochs_s: list[float] = []
        self.phases_ms: dict[str, float] = {}
        self._begin = self._mark = self._epoch_begin = 0.0
        self._on_gpu = False

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._on_gpu = trainer.strategy.root_device.type == "cuda"
        self._begin = self._epoch_begin = self._now()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        self._mark = self._now()
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.phases_ms = {f"{name}_ms": 0.0 for name in PHASES}

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        self._end_phase("forward_ms")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_phase("backward_ms")

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: object,
        batch_idx: int,
    ) -> None:
        self._end_phase("update_ms")
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            now = self._now()
            self.iterations_s.append(now - self._begin)
            self._begin = now
            pl_module.log("seconds_per_batch", self.iterations_s[-1], rank_zero_only=True)
        if batch_idx + 1 == trainer.num_training_batches:
            self.epochs_s.append(self._now() - self._epoch_begin)

    @property
    def seconds_per_batch(self) -> float:
        """Return the median of the iterations after the first."""
        return median(self.iterations_s[_WARMUP:] or self.iterations_s)

    def _end_phase(self, name: str) -> None:
        now = self._now()
        self.phases_ms[name] += 1000.0 * (now - self._mark)
        self._mark = now

    def _now(self) -> float:
        if self._on_gpu:  # what was launched counts to the phase that launched it
            torch.cuda.synchronize()
        return time.perf_counter()
