import pytest

from configs.errors import ConfigError
from configs.schema import Engine
from configs.sweep import load_sweep, sweep_names


@pytest.mark.parametrize("name", sweep_names())
@pytest.mark.parametrize("model", ["tiny", "7B"])
def test_every_shipped_sweep_makes_points(name, model):
    sweep = load_sweep(name)
    assert sweep.name == name
    assert sweep.description
    assert len({point.log_name for point in sweep.points(model)}) == len(sweep.engines)


def test_basic_compares_three_engines_on_one_rank():
    points = load_sweep("basic").points("7B", {"iterations": "3"})
    assert [p.engine for p in points] == list(Engine)
    assert [(p.stride, p.num_ranks, p.iterations) for p in points] == [
        (0, 1, 3),
        (0, 1, 3),
        (2, 1, 3),
    ]
    assert [p.name for p in points] == ["7B vanilla", "7B async-gradients", "7B hybrid stride 2"]
    shared = {p.model_dump_json(exclude={"name", "engine", "stride"}) for p in points}
    assert len(shared) == 1


def test_a_sweep_of_ones_own_is_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nmodel = "tiny"\n[[engines]]\npart_grads_async = 1\n')
    assert load_sweep(str(path)).points("tiny")[0].engine is Engine.ASYNC_GRADIENTS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "a"', "field 'engines' is missing"),
        ('name = "a"\nengines = []', "'engines'"),
        ('name = "a/b"\n[[engines]]\n', "'name' = 'a/b'"),
        ('name = "a"\nmodle = "x"\n[[engines]]\n', "unknown field 'modle': did you mean 'model'"),
    ],
)
def test_a_wrong_sweep_says_what_is_wrong(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_sweep(str(path))


def test_a_wrong_point_of_a_sweep_names_the_sweep(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n[point]\nsteps = 1\n[[engines]]\n')
    with pytest.raises(ConfigError, match="sweep 'mine': unknown field 'steps'"):
        load_sweep(str(path)).points("tiny")


def test_an_unknown_sweep_names_the_nearest():
    with pytest.raises(ConfigError, match="unknown sweep 'basik': did you mean 'basic'"):
        load_sweep("basik")
