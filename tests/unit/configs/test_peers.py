"""The study of peers: what its rows change, and what they say of themselves."""

import pytest

from configs.published import published_runs, read_published
from configs.study import load_study, make_point
from configs.sweep import load_sweep
from deep_optimizer_states.config import read_settings
from launch.backends import OWN_TRAINER
from launch.ds_json import deepspeed_config
from launch.feasibility import Host, shortages
from launch.sweep import build_parser, make_plan

PEERS = load_study("peers")
GIB = 2**30


def configs(form="full"):
    sweep = load_sweep("gpu", PEERS)
    points = sweep.small().points(None) if form == "tiny" else sweep.points("1.3B")
    return {
        (p.engine, p.value("just_in_time"), p.zero_stage): (p, deepspeed_config(p)) for p in points
    }


def flat(table, path=()):
    """Every setting of a config, by its keys from the outside in."""
    found = {}
    for key, value in table.items():
        inner = flat(value, (*path, key)) if isinstance(value, dict) else {(*path, key): value}
        found.update(inner)
    return found


@pytest.mark.parametrize("form", ["full", "tiny"])
def test_rows_change_nothing_but_their_own_keys(form):
    found = configs(form)
    plain_row = set(flat(PEERS.engines["stock"].ds_config))
    for point, config in found.values():
        # Nothing waits for the device between phases.
        assert not config["wall_clock_breakdown"]
        assert not config["memory_breakdown"]
        config, stock = flat(config), flat(found["stock", False, point.zero_stage][1])
        changed = {key for key in {*config, *stock} if config.get(key) != stock.get(key)}
        assert changed <= set(flat(point.row.ds_config)) | plain_row, point.name
        assert changed or point.engine == "stock"


def test_rows_of_the_plugin_are_checked_by_its_own_config():
    found = configs()
    enabled = {engine for (engine, *_), (_, c) in found.items() if read_settings(c).enabled}
    assert enabled == {
        *("all-host", "dynamic", "dynamic-cached", "stride", "ratio"),
        *("dynamic-timer", "dynamic-small-buckets", "auto"),
    }
    resident = read_settings(found["ratio", False, 3][1])
    assert (resident.policy, resident.ratio) == ("ratio", 0.0)


@pytest.mark.parametrize(
    ("engine", "free_gib", "place"),
    [("deepcompile", 24, "GPU memory"), ("deepcompile", 80, ""), ("zenflow", 4, "")],
)
def test_memory_of_a_row_is_known_or_it_is_let_through(engine, free_gib, place):
    point = make_point({"model": "1.3B", "dp": 1, "engine": engine, "device": "cuda"}, study=PEERS)
    lines = shortages(point, Host(400 * GIB, (free_gib * GIB,)), OWN_TRAINER)
    assert len(lines) == bool(place)
    assert all(place in line for line in lines)


def test_the_model_is_what_stock_has_memory_for_and_larger_rows_are_left_out():
    sweep = load_sweep("gpu", PEERS)
    machine = Host(60 * GIB, (24 * GIB,))
    given = build_parser(PEERS).read(["--device", "cuda", "--study", "peers"])
    plan = make_plan(sweep, given, machine)
    assert {point.model.name for point in plan.points} == {"1.3B"}
    unfit = {point.engine for point in plan.points if shortages(point, machine, OWN_TRAINER)}
    assert {"ratio", "deepcompile"} <= unfit
    assert "stock" not in unfit
    smaller = make_plan(sweep.model_copy(update={"auto_fits": "all"}), given, machine)
    assert {point.model.name for point in smaller.points} == {"tiny"}


@pytest.mark.parametrize("name", ["gpu", "accumulated"])
def test_the_plugin_as_it_is_by_default_stands_beside_stock_at_stages_3_and_2(name):
    points = load_sweep(name, PEERS).points("7B")
    pairs = [(str(p.engine), p.zero_stage) for p in points if p.engine in ("stock", "auto")]
    assert pairs == [("stock", 3), ("auto", 3), ("stock", 2), ("auto", 2)]
    for point in points:
        if point.engine == "auto":
            found = read_settings(deepspeed_config(point))
            assert (found.policy, found.just_in_time_forward) == ("auto", True)


def test_published_rates_stand_in_the_table_that_is_of_them():
    assert published_runs(PEERS)["tokens_per_s"] == {
        "LLMQ, 7B on one H100": 13800.0,
    }
    assert read_published(PEERS) == []
    assert load_sweep("accumulated", PEERS).results[0] == "tokens_per_s"
    assert {p.accumulation for p in load_sweep("accumulated", PEERS).points("7B")} == {64}
