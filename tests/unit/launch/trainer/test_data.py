import json
from pathlib import Path

import pytest
import torch

from configs.errors import ConfigError
from configs.schema import Model, Point
from launch.trainer.data import MicroBatches, read_vocabulary, sample_indices

MODEL = Model(
    name="m", hidden=64, ffn=96, layers=2, heads=4, kv_heads=2, seq_length=8, vocab_size=100
)


class CountingSamples:
    """Sample ``i`` is full of the token ``i``."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.full((8,), index), "labels": torch.full((8,), index + 1)}


@pytest.mark.parametrize(
    ("dp", "micro_batch_size", "global_batch_size"), [(1, 1, 1), (1, 2, 4), (2, 2, 8), (4, 1, 12)]
)
def test_every_sample_is_read_once_in_the_order_of_global_batches(
    dp: int, micro_batch_size: int, global_batch_size: int
) -> None:
    point = Point(
        model=MODEL,
        dp=dp,
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
    )
    for iteration in (1, 2, 3):
        of_ranks = [sample_indices(point, rank, iteration) for rank in range(dp)]
        read = sorted(i for ranges in of_ranks for indices in ranges for i in indices)
        first = (iteration - 1) * global_batch_size
        assert read == list(range(first, first + global_batch_size))
        assert all(len(ranges) == point.accumulation for ranges in of_ranks)


def test_a_rank_gets_its_own_samples_as_a_batch() -> None:
    point = Point(model=MODEL, dp=2, micro_batch_size=2, global_batch_size=8)
    batches = MicroBatches(CountingSamples(), point, dp_rank=1, device=torch.device("cpu"))
    first, second = batches.of_iteration(2)
    assert first.tokens[:, 0].tolist() == [10, 11]
    assert second.labels[:, -1].tolist() == [15, 16]
    assert first.position_ids.tolist() == [list(range(8))] * 2


def test_a_token_outside_the_vocabulary_is_named() -> None:
    point = Point(model=MODEL, global_batch_size=1)
    batches = MicroBatches(CountingSamples(), point, dp_rank=0, device=torch.device("cpu"))
    list(batches.of_iteration(99))
    with pytest.raises(ConfigError, match=r"token 100, but model\.vocab_size = 100"):
        list(batches.of_iteration(100))


def test_the_manifest_beside_the_data_says_what_ends_a_document(tmp_path: Path) -> None:
    point = Point(model=MODEL)
    vocabulary = read_vocabulary(tmp_path / "corpus", point)
    assert (vocabulary.vocab_size, vocabulary.eod) == (100, 99)
    (tmp_path / "manifest.json").write_text(json.dumps({"vocab_size": 90, "eod": 7}))
    vocabulary = read_vocabulary(tmp_path / "corpus", point)
    assert (vocabulary.vocab_size, vocabulary.eod) == (90, 7)


@pytest.mark.parametrize(
    ("manifest", "named"),
    [
        ('{"vocab_size": 101, "eod": 0}', "vocab_size = 101: the model has only 100"),
        ('{"vocab_size": 90}', "no valid 'vocab_size' and 'eod'"),
        ("[]", "no valid 'vocab_size' and 'eod'"),
        ("{", "no valid 'vocab_size' and 'eod'"),
    ],
)
def test_a_manifest_that_does_not_fit_is_named(tmp_path: Path, manifest: str, named: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(ConfigError) as raised:
        read_vocabulary(tmp_path / "corpus", Point(model=MODEL))
    assert named in str(raised.value)
