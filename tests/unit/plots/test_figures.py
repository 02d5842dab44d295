import numpy as np
import pytest
from matplotlib.patches import Rectangle
from programs import plot as main

from configs.study import default_study
from plots.canvas import numbers
from plots.style import phase_styles

ENGINES = {name: row.style for name, row in default_study().engines.items()}
PHASES = {name or "other": row for name, row in phase_styles(default_study()).items()}


def times(iteration=100, **phases):
    """Six equal iterations; a phase of None is not known."""
    one = {"forward": 20, "backward": 30, "update": 40, "iteration": iteration, **phases}
    return [{f"{name}_ms": "" if ms is None else ms for name, ms in one.items()}] * 6


@pytest.fixture
def three(sweep):
    """Three engines, the last without a time of its update."""
    sweep.add("stock", times=times())
    sweep.add("all-host", times=times(80))
    sweep.add("stride", 2, times=times(50, update=None))
    return sweep


def bars(figure):
    """Length of each segment by phase, row after row."""
    by_colour = {style.colour.lower(): name for name, style in PHASES.items()}
    found = {}
    for ax in figure.axes:
        for patch in ax.patches:
            assert isinstance(patch, Rectangle)
            red, green, blue = (round(255 * part) for part in patch.get_facecolor()[:3])
            name = by_colour[f"#{red:02x}{green:02x}{blue:02x}"]
            assert (patch.get_hatch() or "") == PHASES[name].hatch
            found.setdefault(name, []).append(round(patch.get_width(), 6))
    return found


def test_segments_are_as_long_as_the_table_says_and_a_missing_phase_is_none(draw, three):
    three.add("auto", times=times(update=None))
    assert bars(draw("iteration-breakdown", three)) == {
        "forward": [20] * 4, "backward": [30] * 4, "update": [40, 40], "other": [10, 50],
    }  # fmt: skip


def test_the_table_behind_a_figure_has_its_bars_and_marks_and_no_line_of_iterations(draw, three):
    told = numbers(draw("iteration-breakdown", three))
    assert ("stock", "forward (ms)", "20") in [row[1:] for row in told]
    assert {name for _, name, _, _ in told} == {"stock", "all-host", "stride 2"}
    assert numbers(draw("loss", three)) == []
    three.add("stride", 3)
    rows = numbers(draw("stride", three))
    assert [at for _, at, what, _ in rows if "iteration" in what] == ["2", "3"]
    assert all("stride" in what for _, _, what, _ in rows)


def test_equal_losses_are_drawn_so_that_each_can_be_seen(draw, three):
    (ax,) = draw("loss", three).axes
    widths = [line.get_linewidth() for line in ax.lines]
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) == len({line.get_marker() for line in ax.lines}) == 3
    assert [line.get_color() for line in ax.lines] == [
        ENGINES[name].colour for name in ("stock", "all-host", "stride")
    ]
    for line in ax.lines:
        np.testing.assert_allclose(line.get_ydata(), [11 - i / 9 for i in range(1, 7)])


def test_a_nan_is_marked_and_an_unknown_loss_is_not(draw, sweep):
    sweep.add("stock", iterations=4)
    for row, loss in zip(sweep.iterations, ("9", "nan", "", "8"), strict=True):
        row["loss"] = loss
    (ax,) = draw("loss", sweep).axes
    curve, marks = ax.lines
    np.testing.assert_array_equal(curve.get_ydata(), [9, np.nan, 8])
    assert list(marks.get_xdata()) == [2]
    assert marks.get_gid() == "no number"
    assert "no number" in ax.get_xlabel()


def test_repeats_of_a_point_are_one_bar_and_other_points_stay_apart(draw, sweep):
    for point in ("a", "b"):
        for repeat, ms in ((1, 100), (2, 120), (3, 170 if point == "b" else 110)):
            sweep.add("stock", times=times(ms), point=point, label=f"{point} {repeat}")
    figure = draw("iteration-breakdown", sweep)
    assert bars(figure)["other"] == [20, 30]
    assert [name.get_text() for name in figure.axes[0].get_yticklabels()] == ["a 1", "b 1"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "no such table"), ("", "cannot be read"), ("a,b\n1,2\n", "column 'path' is missing"),
        ("path,label,case,engine,device,hardware,iteration_ms,warmup_iterations,timed_iterations\n",
         "has no rows"),
    ],
)  # fmt: skip
def test_no_tables_is_one_line_and_exit_code_2(tmp_path, capsys, content, why):
    if content is not None:
        (tmp_path / "runs.csv").write_text(content)
    assert main([str(tmp_path), "--out", str(tmp_path / "f")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert why in error
    assert not (tmp_path / "f").exists()
