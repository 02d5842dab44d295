import pytest

from configs.errors import ConfigError
from configs.schema import Model, Point
from launch.trainer.ranks import ranks_from_environment

MODEL = Model(name="m", hidden=64, ffn=96, layers=2, heads=4, kv_heads=2)
TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_a_plain_process_is_the_only_rank() -> None:
    ranks = ranks_from_environment({})
    assert (ranks.rank, ranks.local_rank, ranks.num_ranks) == (0, 0, 1)
    assert ranks.is_first
    assert ranks.is_last
    environment: dict[str, str] = {}
    ranks.export(environment)
    assert set(environment) == set(TORCHRUN)


def test_a_launchers_environment_is_taken_as_it_is() -> None:
    ranks = ranks_from_environment(TORCHRUN)
    environment: dict[str, str] = {}
    ranks.export(environment)
    assert environment == TORCHRUN
    assert not ranks.is_first
    assert ranks.is_last


def test_the_command_lines_local_rank_wins() -> None:
    assert ranks_from_environment(TORCHRUN, local_rank=0).local_rank == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = 'two'"),
        ({"RANK": "2"}, "RANK = 2"),
        ({"RANK": "-1"}, "RANK = -1"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"RANK": None}, "RANK is not set"),
    ],
)
def test_a_broken_environment_is_named(changes: dict[str, str | None], named: str) -> None:
    merged = {**TORCHRUN, **changes}
    environment = {name: value for name, value in merged.items() if value is not None}
    with pytest.raises(ConfigError, match=named):
        ranks_from_environment(environment)


def test_the_number_of_ranks_must_be_the_points() -> None:
    ranks = ranks_from_environment(TORCHRUN)
    ranks.require(Point(model=MODEL, tp=2))
    ranks.require(Point(model=MODEL, dp=2, global_batch_size=2))
    with pytest.raises(ConfigError, match=r"WORLD_SIZE = 2.*tp 2 x pp 1 x dp 2 = 4.*torchrun"):
        ranks.require(Point(model=MODEL, tp=2, dp=2, global_batch_size=2))
