import pytest

from configs.errors import ConfigError
from configs.sweep import load_sweep, make_sweep, sweep_names

THREE = [{"engine": "stock"}, {"engine": "a"}, {"engine": "stride", "stride": [2, 3]}]


def make(**fields):
    return make_sweep({"name": "s", "model": "tiny", "engines": THREE} | fields)


@pytest.mark.parametrize("name", sweep_names())
def test_every_shipped_sweep_can_be_run_at_both_sizes(name):
    sweep = load_sweep(name)
    full = sweep.points("7B" if sweep.leaves_model_open else None)
    small = sweep.small().points(None)
    for points in (full, small):
        assert len({point.name for point in points}) == len(points)
    assert {point.model.name.partition("-")[0] for point in small} == {"tiny"}
    assert len(small) <= 15


def test_a_grid_is_a_product_cell_by_cell_and_engine_by_engine():
    sweep = make(grid={"accumulation": [1, 2], "micro_batch_size": [1, 4]})
    points = sweep.points(None)
    assert [p.stride for p in points[:4]] == [0, 0, 2, 3]
    assert [p.engine for p in points[:4]] == [
        "stock",
        "all-host",
        "stride",
        "stride",
    ]
    cells = [(p.accumulation, p.micro_batch_size) for p in points[::4]]
    assert cells == [(1, 1), (1, 4), (2, 1), (2, 4)]
    assert points[-1].global_batch_size == 8


def test_names_say_what_varies_within_a_model_and_nothing_else():
    names = [p.name for p in make(grid={"subgroup_numel": [10_000_000, 250_000]}).points(None)]
    assert names[0] == "tiny subgroup 10M stock"
    assert names[-1] == "tiny subgroup 250k stride 3"
    models = make(grid={"model": ["7B", "8.3B"]}).points(None)  # their subgroups differ
    assert models[-1].name == "8.3B stride 3"


def test_points_that_are_equal_are_run_once_and_have_names_of_their_own():
    points = make(grid={"offload_ratio": [1, 1.0]}, point={"name": "mine"}).points(None)
    assert [point.name for point in points] == ["mine", "mine #2", "mine #3", "mine #4"]


def test_what_is_excluded_is_left_out_and_only_that():
    sweep = make(
        grid={"offload_ratio": [1.0, 0.5, 0.0]},
        exclude=[{"engine": ["stride", "A"], "offload_ratio": 0.0}, {"stride": 3}],
    )
    left = {(p.engine, p.offload_ratio) for p in sweep.points(None)}
    assert ("stock", 0.0) in left
    assert ("stride", 0.5) in left
    assert left.isdisjoint({("stride", 0.0), ("all-host", 0.0)})
    assert all(p.stride != 3 for p in sweep.points(None))


def test_what_is_asked_for_wins_over_grid_point_and_engine():
    sweep = make(grid={"model": ["7B", "13B"], "iterations": [5, 6]}, point={"model.layers": 3})
    points = sweep.points("tiny", {"iterations": "3", "model.heads": "4"})
    assert {(p.model.name, p.iterations) for p in points} == {("tiny", 3)}
    assert {(p.model.layers, p.model.heads) for p in points} == {(3, 4)}
    assert len(points) == 4


def test_the_small_form_replaces_what_it_gives_and_keeps_the_rest():
    sweep = make(
        grid={"model": ["7B"], "subgroup_numel": [10_000_000]},
        point={"iterations": 9},
        tiny={"grid": {"subgroup_numel": [1000]}},
    )
    (point, *_) = sweep.small().points(None)
    assert (point.model.name, point.subgroup_numel, point.iterations) == ("tiny", 1000, 9)
    assert sweep.points(None)[0].model.name == "7B"
    assert sweep.small().description.endswith("(small form, on tiny)")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"grid": {"subgroup": [1]}}, "did you mean 'subgroup_numel'"),
        ({"grid": {"dp": []}}, "'grid.dp' = []: List should have at least 1 item"),
        ({"exclude": [{"mdoel": "7B"}]}, "did you mean 'model'"),
        ({"engines": [{"engin": "v"}]}, "did you mean 'engine'"),
        ({"repeats": 0}, "repeats"),
        ({"repeats": 10**9}, "less than or equal to 1000"),
        ({"name": "../up"}, "name"),
        ({"name": "single"}, "is for other runs; choose another"),
        ({"name": "simulated-h100x4"}, "is for other runs; choose another"),
        ({"name": "zero-ladder"}, "name = 'zero-ladder': its results folder is for other runs"),
        ({"tiny": {"grid": {"zz": 1}}}, "unknown field 'zz'"),
        ({"engines": []}, "engines"),
        ({"grid": {"model": ["7B", "tny"]}}, "unknown model 'tny': did you mean 'tiny'"),
        ({"model": "aut"}, "unknown model 'aut': did you mean 'auto'"),
        ({"point": {"model": "7"}}, "unknown model '7': did you mean '7B'"),
        ({"engines": [{"engine": "stock", "model": "7"}]}, "unknown model '7'"),
        ({"exclude": [{"model": "tny"}]}, "unknown model 'tny'"),
        ({"tiny": {"grid": {"model": ["tny"]}}}, "unknown model 'tny'"),
        ({"grid": {"engine": ["v"]}}, "'engine' is given by grid and by engines"),
    ],
)
def test_wrong_files_are_refused_by_field(table, words):
    with pytest.raises(ConfigError) as refused:
        make(**table)
    assert words in str(refused.value)


def test_a_rule_may_exclude_a_model_that_the_file_itself_describes():
    mine = {"name": "mine-2", "layers": 2, "hidden": 256, "ffn": 688, "heads": 8, "kv_heads": 4}
    mine |= {"seq_length": 128, "vocab_size": 8192}
    sweep = make(grid={"model": ["tiny", mine]}, exclude=[{"model": "mine-2"}])
    assert {point.model.name for point in sweep.points(None)} == {"tiny"}


def test_a_file_of_the_users_own_is_named_in_its_errors(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text('name = "s"\nengines = []\n')
    with pytest.raises(ConfigError, match=f"{path}: field 'engines'"):
        load_sweep(str(path))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"grid": {"dp": [0]}}, "'dp' = 0"),
        ({"point": {"device": "gpu"}}, "device"),
        ({"grid": {"model": ["7"]}, "engines": THREE}, "did you mean '7B'"),
        ({"exclude": [{"model": "tiny"}]}, "every point is excluded"),
    ],
)
def test_a_wrong_value_is_named_with_its_sweep(table, words):
    with pytest.raises(ConfigError, match=r"sweep 's'|unknown model") as refused:
        make(**table).points(None)
    assert words in str(refused.value)


def test_accumulation_stands_for_the_global_batch():
    points = make(point={"accumulation": 3, "dp": 2, "micro_batch_size": 4}).points(None)
    assert {p.global_batch_size for p in points} == {24}
    with pytest.raises(ConfigError, match="give accumulation or global_batch_size, not both"):
        make(point={"accumulation": 2, "global_batch_size": 4}).points(None)
    over = make(point={"accumulation": 3}).points(None, {"global_batch_size": "8"})
    assert {p.global_batch_size for p in over} == {8}
