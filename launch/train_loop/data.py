"""Samples of Megatron's ``.bin``/``.idx`` data, in an order fixed by the seed."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from configs.errors import ConfigError
from configs.schema import Point
from launch.train_loop.runfile import RunFile


@dataclass(frozen=True)
class MicroBatch:
    """What one forward of one rank reads."""

    tokens: Tensor  # (micro-batch, sequence) int64
    labels: Tensor  # (micro-batch, sequence) int64, the tokens that follow
    position_ids: Tensor  # (micro-batch, sequence) int64


def build_samples(run: RunFile) -> list[Any]:
    """Build the samples to train and to evaluate on; every rank must call it, rank 0 writes.

    The second share of ``split`` is built if the run evaluates. The order depends on the seed, the
    data and the number of samples, not on the ranks, nor does one share's depend on the other.

    Returns:
        megatron-core's data sets: training, then validation (None when nothing evaluates).

    Raises:
        ConfigError: the split leaves too few tokens, or the data is not Megatron's.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    point = run.point
    # What the data sets ask of a tokenizer. Nothing is masked or reset where a document ends, and
    # samples, which are cut from a stream of documents, are never padded.
    identifiers = OrderedDict(vocab_size=point.model.vocab_size, eod=point.model.vocab_size - 1)
    vocabulary = SimpleNamespace(
        pad=-1,
        unique_identifiers=identifiers,
        unique_description=json.dumps(identifiers),
        **identifiers,
    )
    config = GPTDatasetConfig(
        random_seed=point.seed,
        sequence_length=point.model.seq_length,
        blend=([str(run.data_prefix)], None),
        split=point.split,
        path_to_cache=str(run.run_dir / "index-cache"),
        tokenizer=vocabulary,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    parts = config.split_matrix[: 2 if point.eval_interval else 1]
    _require_tokens(run, parts)
    config.split_matrix = [*parts, None, None][:3]
    sizes = [count * point.global_batch_size for count in (point.iterations, point.eval_iterations)]
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [*sizes, 0], lambda: True, config)
    return list(builder.build()[:2])


def _require_tokens(run: RunFile, parts: Sequence[tuple[float, float] | None]) -> None:
    """Without tokens megatron-core would go round for ever, filling samples from nothing."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    # Kept while its lengths are read: they are a view of the file it closes when it goes.
    documents = IndexedDataset(str(run.data_prefix))
    lengths = documents.sequence_lengths
    for purpose, part in zip(("train on", "evaluate on"), parts, strict=False):
        first, last = (round(len(lengths) * bound) for bound in part or (0.0, 0.0))
        num_tokens = int(lengths[first:last].sum())
        if num_tokens < 2:
            raise ConfigError(
                f"split = {run.point.split!r}: leaves {num_tokens} tokens of {len(lengths)} "
                f"documents to {purpose}; give that share more, or take larger data"
            )


class MicroBatches:
    """Hands a data-parallel rank its share of every global batch.

    Sample ``i`` of the run belongs to global batch ``i // global_batch_size``, whatever the number
    of ranks: inside it, micro-batches go to the data-parallel ranks in turn. Tensor-parallel ranks
    of one data-parallel rank read the same samples.
    """

    def __init__(self, samples: Any, point: Point, dp_rank: int, device: torch.device) -> None:
        self._samples = samples
        self._point = point
        self._dp_rank = dp_rank
        self._device = device
        length = point.model.seq_length
        positions = torch.arange(length, device=device)
        self._position_ids = positions.expand(point.micro_batch_size, length)

    def of_iteration(self, iteration: int) -> Iterator[MicroBatch]:
        """Micro-batches of one iteration (from 1), in order.

        Raises:
            ConfigError: a token lies outside the model's vocabulary.
        """
        for indices in sample_indices(self._point, self._dp_rank, iteration):
            samples = [self._samples[index] for index in indices]
            tokens = torch.stack([sample["tokens"] for sample in samples])
            labels = torch.stack([sample["labels"] for sample in samples])
            self._require_known(tokens, labels)
            yield MicroBatch(tokens.to(self._device), labels.to(self._device), self._position_ids)

    def _require_known(self, tokens: Tensor, labels: Tensor) -> None:
        """Outside the vocabulary CUDA would only say that an assertion failed on the device."""
        largest = max(int(tokens.max()), int(labels.max()))
        if largest >= self._point.model.vocab_size:
            raise ConfigError(
                f"the data holds token {largest}, but model.vocab_size = "
                f"{self._point.model.vocab_size}: the data was made with another vocabulary"
            )


def sample_indices(point: Point, dp_rank: int, iteration: int) -> list[range]:
    """Samples of the run that a data-parallel rank reads in ``iteration``, by micro-batch."""
    size = point.micro_batch_size
    first = (iteration - 1) * point.global_batch_size + dp_rank * size
    starts = (first + k * size * point.dp for k in range(point.accumulation))
    return [range(start, start + size) for start in starts]
