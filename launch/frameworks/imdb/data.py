"""Batches of reviews for Lightning: three loaders that read three different splits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from launch.frameworks.imdb.files import Split, TokenizedReviews


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
    """The first ``max_length`` tokens, the last of which is then the end token."""
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
        """Training reviews, in another order in every epoch; a short last batch is left out.

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
        """Reviews that were held out of training."""
        return self._loader("validation")

    def test_dataloader(self) -> DataLoader[Any]:
        """Reviews that are looked at once, after training."""
        return self._loader("test")

    def _loader(self, split: str, **more: Any) -> DataLoader[Any]:  # noqa: ANN401 - DataLoader's
        return DataLoader(
            self._reviews[split],  # type: ignore[arg-type]  # a list is a data set
            batch_size=self._batch_size,
            collate_fn=self._collate,
            num_workers=self._workers,
            persistent_workers=self._workers > 0,
            **more,
        )
