import pytest
import torch

from configs.errors import ConfigError
from configs.schema import Model
from configs.study import default_study
from launch.train_loop.data import MicroBatches, sample_indices

Point = default_study().point_type

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
