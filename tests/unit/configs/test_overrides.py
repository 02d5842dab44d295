import pytest

from configs.errors import ConfigError
from configs.study import default_study, make_point

STUDY = default_study()
HYBRID = {"model": "tiny", "engine": "stride", "stride": 4}


def laid(table, **over):
    before = dict(table)
    point = make_point(STUDY.overlaid(table, over))
    assert table == before, "it is left alone"
    return point


@pytest.mark.parametrize(
    ("overrides", "engine", "stride"),
    [
        ({"engine": "vanilla"}, "stock", 0),
        ({"engine": "Async_Gradients"}, "all-host", 0),
        ({"engine": "interleaved"}, "stride", 4),
        ({"engine": "stride", "stride": "7"}, "stride", 7),
        ({"stride": "5"}, "stride", 5),
    ],
)
def test_an_engine_given_replaces_the_tables(overrides, engine, stride):
    point = laid(HYBRID, **overrides)
    assert (point.engine, point.stride) == (engine, stride)


def test_a_models_field_changes_that_field_alone():
    layers = {"model.layers": "2"}
    point = laid({"model": "7B"}, **layers)
    assert (point.model.layers, point.model.hidden, point.dp) == (2, 4096, 4)
    assert laid({"model": "7B", "accumulation": 3}, **layers).accumulation == 3
    assert laid({"model": point.model.model_dump()}, **{"model.layers": "3"}).model.layers == 3
    with pytest.raises(ConfigError, match="field 'model' is missing"):
        laid({}, **layers)
