"""The study's parts for Lightning: encoder, batches, module and strategies.

The encoder is a transformer with a classifier on the mean of what it makes of the tokens. Attention
is written out with ``nn.Linear`` alone: ``nn.TransformerEncoderLayer`` reads the weights of its
parts without calling them, which ZeRO-3, which gathers a module's weights when it is called, cannot
see.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler

from launch.frameworks.imdb.reviews import Split, TokenizedReviews
from launch.train_loop.runtime import leave_shm_out

NUM_CLASSES = 2
DECAY = 0.6
"""What the learning rate is multiplied by after every epoch."""


@dataclass(frozen=True)
class Shape:
    """Sizes of an encoder."""

    hidden: int = 256
    """Numbers of a token's state, a multiple of ``heads``."""
    ffn: int = 1024
    """Inner size of the feed-forward."""
    layers: int = 6
    heads: int = 8
    max_length: int = 1024
    """Tokens of a review, at most."""
    dropout: float = 0.2
    """Share of values that training leaves out."""


def sines(hidden: int, max_length: int) -> Tensor:
    """Return sines and cosines of every position, (max_length, hidden).

    They are added to the tokens, so that equal words at two places differ.
    """
    position = torch.arange(max_length)[:, None]
    rate = torch.exp(torch.arange(0, hidden, 2) * (-math.log(10_000.0) / hidden))
    table = torch.zeros(max_length, hidden)
    table[:, 0::2] = torch.sin(position * rate)
    table[:, 1::2] = torch.cos(position * rate)[:, : hidden // 2]
    return table


class Block(nn.Module):
    """Self-attention and feed-forward, each with a residual and a norm behind it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, ffn, dropout = shape.hidden, shape.ffn, shape.dropout
        self._heads = shape.heads
        self._dropout = dropout
        self.queries_keys_values = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.attention_norm = nn.LayerNorm(hidden)
        self.feed_forward = nn.Sequential(
            nn.Linear(hidden, ffn), nn.ReLU(), nn.Dropout(dropout), nn.Linear(ffn, hidden)
        )
        self.feed_forward_norm = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return new states (reviews, length, hidden); nobody attends where ``mask`` is False."""
        attended = self.out(self._attend(states, mask))
        states = self.attention_norm(states + self.dropout(attended))
        fed = states + self.dropout(self.feed_forward(states))
        normed: Tensor = self.feed_forward_norm(fed)
        return normed

    def _attend(self, states: Tensor, mask: Tensor) -> Tensor:
        reviews, length, hidden = states.shape
        shape = reviews, length, 3, self._heads, hidden // self._heads
        q, k, v = self.queries_keys_values(states).view(shape).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask[:, None, None, :],
            dropout_p=self._dropout if self.training else 0.0,
        )
        return mixed.transpose(1, 2).reshape(reviews, length, hidden)


class SentimentEncoder(nn.Module):
    """Tokens to two scores."""

    def __init__(self, vocab_size: int, pad_id: int, shape: Shape | None = None) -> None:
        """Make it with random weights; the embedding of ``pad_id``, the padding, stays zero."""
        super().__init__()
        shape = shape or Shape()
        hidden, dropout = shape.hidden, shape.dropout
        self._scale = math.sqrt(hidden)
        self.embedding = nn.Embedding(vocab_size, hidden, padding_idx=pad_id)
        nn.init.normal_(self.embedding.weight, std=hidden**-0.5)
        with torch.no_grad():
            self.embedding.weight[pad_id].zero_()
        self.positions: Tensor
        self.register_buffer("positions", sines(hidden, shape.max_length), persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.classifier = nn.Sequential(
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, NUM_CLASSES),
        )

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return scores (reviews, 2) of tokens (reviews, length), padded where not ``mask``."""
        states = self.embedding(tokens) * self._scale
        positions = self.positions[: states.shape[1]].to(states.dtype)
        states = self.dropout(states + positions)
        for block in self.blocks:
            states = block(states, mask)
        scores: Tensor = self.classifier(masked_mean(states, mask))
        return scores


def masked_mean(states: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the tokens of each review, (reviews, hidden).

    Padding, where ``mask`` is False, counts neither above nor below the line.
    """
    weights = mask[:, :, None].to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1)


class Batch(NamedTuple):
    """Reviews of one micro-batch, padded to the longest of them."""

    tokens: Tensor
    """int64 (reviews, length), ``pad_id`` behind the end of each review."""
    mask: Tensor
    """bool (reviews, length), True where there is a token and not padding."""
    labels: Tensor
    """int64 (reviews)."""


def collate(reviews: Split, *, pad_id: int, end_id: int, max_length: int) -> Batch:
    """Truncate reviews, which then end in ``end_id`` as whole ones do, and pad them.

    The mask is made from the lengths, not by comparing with ``pad_id``: so it stays right for a
    tokenizer whose padding also stands for something else.
    """
    cut = [torch.tensor(tokens[:max_length].tolist()) for tokens, _ in reviews]
    for tokens, (whole, _) in zip(cut, reviews, strict=True):
        if len(tokens) < len(whole):
            tokens[-1] = end_id
    return Batch(
        tokens=pad_sequence(cut, batch_first=True, padding_value=pad_id),
        mask=pad_sequence([torch.ones_like(tokens, dtype=torch.bool) for tokens in cut], True),
        labels=torch.tensor([label for _, label in reviews]),
    )


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
        """Say what to load: batches of ``batch_size`` on each rank, collated by ``workers``."""
        super().__init__()
        self._splits, self._batch_size = reviews.splits, batch_size
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
            self._splits["train"],  # type: ignore[arg-type]  # a list is a data set
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
            self._splits[split],  # type: ignore[arg-type]  # a list is a data set
            batch_size=self._batch_size,
            collate_fn=self._collate,
            num_workers=self._workers,
            persistent_workers=self._workers > 0,
            **more,
        )


class SentimentModule(pl.LightningModule):
    """Trains a classifier of reviews: Adam, whose rate falls to six tenths after every epoch."""

    def __init__(self, encoder: nn.Module, lr: float = 2e-4, *, on_host: bool = False) -> None:
        """Say what to train: an encoder that gives two scores a review for tokens and mask.

        ``on_host`` takes DeepSpeed's Adam for CPUs, as DeepSpeed asks for where the optimizer's
        state is offloaded.
        """
        super().__init__()
        self.encoder = encoder
        self._lr, self._on_host = lr, on_host

    def _loss(self, split: str, batch: Batch) -> Tensor:
        """Return the loss; log means over the reviews of an epoch, on all ranks."""
        scores = self.encoder(batch.tokens, batch.mask)
        loss = F.cross_entropy(scores.float(), batch.labels)
        accuracy = (scores.argmax(1) == batch.labels).float().mean()
        self.log_dict(
            {f"{split}_loss": loss, f"{split}_accuracy": accuracy},
            on_step=False,
            on_epoch=True,
            sync_dist=True,
            batch_size=len(batch.labels),
        )
        return loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self._loss("train", batch)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._loss("validation", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._loss("test", batch)

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
    """Return the strategy of Lightning's ``Trainer``; without a config it is not DeepSpeed's."""
    if config:
        kind = DeepSpeedStrategy if on_gpu else CpuDeepSpeedStrategy
        return kind(config=dict(config))
    if num_ranks == 1:
        return SingleDeviceStrategy("cuda:0" if on_gpu else "cpu")
    return DDPStrategy(process_group_backend="nccl" if on_gpu else "gloo")
