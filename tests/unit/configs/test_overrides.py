import pytest

from configs.errors import ConfigError
from configs.overrides import apply_overrides
from configs.study import make_point

HYBRID = {"model": "tiny", "engine": "hybrid", "stride": 4}


@pytest.mark.parametrize(
    ("overrides", "engine", "stride"),
    [
        ({"engine": "vanilla"}, "vanilla", 0),
        ({"engine": "a"}, "async-gradients", 0),
        ({"engine": "interleaved"}, "hybrid", 4),
        ({"engine": "hybrid", "stride": "7"}, "hybrid", 7),
    ],
)
def test_an_engine_given_replaces_the_tables(overrides, engine, stride):
    point = make_point(apply_overrides(HYBRID, overrides))
    assert (point.engine, point.stride) == (engine, stride)


def test_a_stride_alone_keeps_the_engine():
    assert make_point(apply_overrides(HYBRID, {"stride": "5"})).stride == 5


def test_other_fields_replace_theirs_and_the_table_is_left_alone():
    table = {"model": "tiny", "iterations": 3}
    point = make_point(apply_overrides(table, {"iterations": "9", "lr": "1e-3"}))
    assert (point.iterations, point.lr) == (9, 1e-3)
    assert table == {"model": "tiny", "iterations": 3}


def test_a_models_field_changes_that_field_alone():
    point = make_point(apply_overrides({"model": "7B"}, {"model.layers": "2"}))
    assert (point.model.layers, point.model.hidden, point.dp) == (2, 4096, 4)
    summed = apply_overrides({"model": "7B", "accumulation": 3}, {"model.layers": "2"})
    assert make_point(summed).accumulation == 3
    table = {"model": point.model.model_dump()}
    assert make_point(apply_overrides(table, {"model.layers": "3"})).model.layers == 3


def test_a_models_field_needs_a_model():
    with pytest.raises(ConfigError, match=r"model\.layers: the point names no model"):
        apply_overrides({}, {"model.layers": "2"})
