"""Bars that are far longer than the rest."""

import pytest

from configs.study import default_study
from plots.bars import axis_end
from plots.registry import figures

FIGURES = figures(default_study())


def times(ms):
    phases = {"forward_ms": ms / 4, "backward_ms": ms / 4, "update_ms": ms / 2}
    return [{"iteration_ms": ms, **phases} for _ in range(3)]


def cuts(ax):
    return [line for line in ax.lines if line.get_gid() == "cut"]


@pytest.mark.parametrize(
    ("lengths", "end"),
    [([7], 7), ([10, 4, 2], 10), ([360, 40, 38], 50), ([40, 360], 50), ([1, 0], 1), ([0, 0], 0)],
)
def test_an_axis_ends_beyond_the_bars_that_can_be_read_beside_each_other(lengths, end):
    assert axis_end(lengths) == end


def test_a_huge_bar_is_cut_and_keeps_its_number(draw, sweep):
    for engine, ms in (("vanilla", 360_000), ("async-gradients", 40_000), ("hybrid", 38_000)):
        sweep.add(engine, 2 if engine == "hybrid" else 0, model="7B", times=times(ms))
    (ax,) = draw("iteration-breakdown", sweep).axes
    assert ax.get_xlim()[1] < 70
    assert len(cuts(ax)) == 3, "a break is drawn as a gap between two edges"
    numbers = {text.get_text() for text in ax.texts}
    assert {"360", "40", "38"} <= numbers
    assert all(text.xy[0] <= ax.get_xlim()[1] for text in ax.texts if hasattr(text, "xy"))
    assert {"90", "180"} <= numbers, "its phases keep theirs too"
    assert max(patch.get_x() + patch.get_width() for patch in ax.patches) <= 50 + 1e-9


def test_a_huge_model_does_not_press_the_others_flat(draw, sweep):
    for model, ms in (("7B", 3000), ("13B", 5000), ("20B", 150_000)):
        for engine in ("vanilla", "async-gradients"):
            sweep.add(engine, model=model, times=times(ms))
    stack, *_ = draw("models", sweep).axes
    assert stack.get_ylim()[1] < 10
    assert len(cuts(stack)) == 6
    assert "150" in {text.get_text() for text in stack.texts}


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
