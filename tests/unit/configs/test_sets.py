"""Engines that fix fields of every point, as the rungs of a ladder do."""

import pytest

from configs.errors import ConfigError
from configs.naming import Namer, flat
from configs.schema import Point
from configs.study import load_study, study_from
from configs.sweep import load_sweep

STUDY = load_study("zero-ladder")
FIXED = ("zero_stage", "offload_optimizer", "offload_param")


def made(**fields):
    return STUDY.make_point({"model": "tiny", **fields})


def changed(name, **sets):
    table = STUDY.as_table()
    table["engines"][name]["sets"] = sets
    return study_from(table, "changed")


@pytest.mark.parametrize("name", STUDY.engines)
def test_an_engine_fixes_its_fields(name):
    point, sets = made(engine=name), STUDY.engines[name].sets
    found = {field: getattr(point, field) for field in FIXED}
    assert found == {field: sets.get(field, Point.model_fields[field].default) for field in FIXED}


@pytest.mark.parametrize(
    ("engine", "field", "value"),
    [
        ("stage-2", "zero_stage", 1),
        ("no-zero", "offload_optimizer", "cpu"),
        # One row alone names the field: the others have its default.
        ("stage-3", "offload_param", "cpu"),
    ],
)
def test_a_value_against_the_engine_is_refused(engine, field, value):
    has = getattr(made(engine=engine), field)
    words = f"{field} = {value!r}: engine '{engine}' has {field} = {has!r}; leave it out or choose"
    for given in (value, str(value)):
        with pytest.raises(ConfigError) as caught:
            made(engine=engine, **{field: given})
        assert words in str(caught.value)


def test_a_sweep_refuses_a_field_that_its_engines_fix():
    with pytest.raises(ConfigError, match="zero_stage = 3: engine 'no-zero' has zero_stage = 0"):
        load_sweep("ladder", STUDY).small().points(None, {"zero_stage": "3"})


def test_names_leave_fixed_fields_to_the_engine():
    points = [flat(made(engine=name)) for name in STUDY.engines]
    namer = Namer(STUDY)
    assert STUDY.set_by_engines == FIXED
    assert namer.varying(points) == []
    assert [namer.name(point, []) for point in points] == [f"tiny {name}" for name in STUDY.engines]
    logs = {made(engine=name).log_name for name in STUDY.engines}
    assert len(logs) == len(STUDY.engines)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ({"zero_stge": 1}, "sets: unknown field of every point 'zero_stge': did you mean 'zero_"),
        ({"engine": "x"}, "sets: unknown field of every point 'engine'"),
    ],
)
def test_a_row_that_fixes_nonsense_is_refused(sets, words):
    with pytest.raises(ConfigError, match="engine 'stage-1', ") as caught:
        changed("stage-1", **sets)
    assert words in str(caught.value)
