"""Scales of bars, and what is written behind them."""

from configs.study import default_study
from plots.registry import figures

FIGURES = figures(default_study())


def times(ms):
    phases = {"forward_ms": ms / 4, "backward_ms": ms / 4, "update_ms": ms / 2}
    return [{"iteration_ms": ms, **phases} for _ in range(3)]


def test_panels_that_differ_much_have_scales_of_their_own(draw, sweep):
    for model, ms in (("7B", 3000), ("20B", 150_000)):
        sweep.add("vanilla", model=model, times=times(ms))
    figure = draw("iteration-breakdown", sweep)
    small, large = (ax.get_xlim()[1] for ax in figure.axes)
    assert small < 4 < 100 < large
    assert "scales of their own" in " ".join(figure.get_supxlabel().split())
    assert all(ax.xaxis.get_tick_params()["labelbottom"] for ax in figure.axes)


def test_a_watermark_is_behind_the_data(draw, sweep):
    sweep.add("vanilla", model="7B", times=times(3000), source="simulated")
    (ax,) = draw("iteration-breakdown", sweep).axes
    (mark,) = (text for text in ax.texts if text.get_gid() == "watermark")
    assert mark.get_zorder() < min(patch.get_zorder() for patch in ax.patches)
    assert mark.get_alpha() < 0.2
