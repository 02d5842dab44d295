import pytest

from configs.study import default_study
from plots.data import along, describe, observe, pooled, series, split as split_of
from plots.tables import read_tables


@pytest.fixture
def look(tmp_path):
    def look(sweep, x="", y=(), **options):
        return observe(read_tables(sweep.write(tmp_path / "tables", **options)), y, x)

    return look


def split(data, setting):
    return split_of(data, setting, default_study())


def timed(*iterations_ms):
    """Iterations, the first of which is the warm-up's."""
    return [{"iteration_ms": ms, "update_ms": ms / 2} for ms in (9999, *iterations_ms)]


def test_medians_and_quartiles_are_over_all_repeats_without_their_warm_up(sweep, look):
    for times in ((10, 20, 30), (40, 50)):
        sweep.add("stock", times=timed(*times))
    (value,) = along(look(sweep).values, "iteration_ms", "dp")
    assert (value.x, value.median, value.low, value.high) == (1, 30, 20, 40)
    assert (value.iterations, value.repeats) == (5, 2)


def test_a_run_without_iterations_is_its_summary_and_has_no_spread(sweep, look):
    sweep.add(
        "stride", 2, times=(), source="published", iteration_ms=80, update_rate=14e9, parameters=""
    )
    data = look(sweep)
    value = pooled(data.values, "update_rate")
    assert (value.median, value.low, value.high, value.iterations) == (14e9, 14e9, 14e9, 0)
    assert data.remarks() == []


def test_engines_come_in_their_order_and_strides_keep_their_place(sweep, look):
    sweep.add("stride", 4, dp=2).update()
    for engine, stride in (("stride", 2), ("other", 0), ("all-host", 0), ("stock", 0)):
        sweep.add(engine, stride)
    data = look(sweep, x="model")
    one, two = (series(panel, "iteration_ms") for panel in split(data, "model")[::-1])
    assert [s.look.key[1] for s in one] == ["stock", "all-host", "stride", "other"]
    assert (one[2].look.variant, two[0].look.variant) == (0, 1)
    assert one[2].look.alone.marker != two[0].look.alone.marker
    assert one[2].look.alone.colour == two[0].look.alone.colour


@pytest.mark.parametrize("constant", ["accumulation", "global_batch_size"])
def test_a_sweep_may_keep_the_accumulation_or_the_global_batch(sweep, look, constant):
    for dp in (1, 2, 4):
        kept = {"accumulation": 2} if constant == "accumulation" else {"accumulation": 8 // dp}
        sweep.add("stock", dp=dp, **kept)
    assert len(split(look(sweep), "dp")) == 1


def test_the_footnote_says_what_how_many_and_what_is_odd(sweep, look):
    sweep.add("stock", times=timed(1, 2, 3))
    sweep.add("stock", dp=2, times=timed(1, 2))
    sweep.add("stock", dp=2, times=timed(1, 2), verdict="frozen")
    data = look(sweep)
    assert describe(along(data.values, "iteration_ms", "dp")) == (
        "median of n=3-4 iterations after the warm-up from 1-2 runs; "
        "error bars: interquartile range"
    )
    assert data.remarks() == ["in 1 of 3 runs the loss is not that of training: frozen"]
