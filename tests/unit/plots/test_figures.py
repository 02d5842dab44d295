import csv

import numpy as np
import pytest
from matplotlib.patches import Rectangle
from programs import plot as main

from configs.study import default_study
from plots.bars import draw_breakdown
from plots.style import phase_styles
from plots.tables import read_tables
from plots.timelines import draw_loss

ENGINES = {name: row.style for name, row in default_study().engines.items()}
PHASES = {name or "other": row for name, row in phase_styles(default_study()).items()}

RUN = {
    "path": "x.log", "label": "vanilla", "case": "", "engine": "vanilla", "device": "cpu",
    "hardware": "A CPU", "iteration_ms": "100", "forward_ms": "20", "backward_ms": "30",
    "update_ms": "40", "warmup_iterations": "1", "timed_iterations": "4",
}  # fmt: skip
OTHERS = (
    {
        "path": "y.log",
        "label": "async-gradients",
        "engine": "async-gradients",
        "iteration_ms": "80",
    },
    {
        "path": "z.log",
        "label": "hybrid (stride 2)",
        "engine": "hybrid",
        "iteration_ms": "50",
        "update_ms": "",
    },
)


def write(folder, runs, iterations=None):
    folder.mkdir(parents=True, exist_ok=True)
    if iterations is None:
        iterations = [
            {**{k: run[k] for k in ("path", "label", "case", "engine")},
             "iteration": str(i), "loss": str(9 - i / 2)}
            for run in runs for i in range(1, 6)
        ]  # fmt: skip
    for name, rows in (("runs", runs), ("iterations", iterations)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            if rows:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)
    return folder


@pytest.fixture
def tables(tmp_path):
    return write(tmp_path / "tables", [RUN, *({**RUN, **other} for other in OTHERS)])


def page(draw, tables):
    """The only page of a figure."""
    (figure,) = draw(tables, None)
    return figure


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


def test_segments_are_as_long_as_the_table_says(tables):
    drawn = bars(page(draw_breakdown, read_tables(tables)))
    assert drawn == {
        "forward": [20, 20, 20], "backward": [30, 30, 30], "update": [40, 40], "other": [10],
    }  # fmt: skip


def test_a_missing_phase_is_not_drawn_as_if_it_were_zero(tmp_path):
    folder = write(tmp_path, [{**RUN, "update_ms": ""}])
    assert bars(page(draw_breakdown, read_tables(folder))) == {
        "forward": [20], "backward": [30], "other": [50],
    }  # fmt: skip


def test_equal_losses_are_drawn_so_that_each_can_be_seen(tables):
    (ax,) = page(draw_loss, read_tables(tables)).axes
    widths = [line.get_linewidth() for line in ax.lines]
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) == len({line.get_marker() for line in ax.lines}) == 3
    assert [line.get_color() for line in ax.lines] == [
        ENGINES[name].colour for name in ("vanilla", "async-gradients", "hybrid")
    ]
    for line in ax.lines:
        np.testing.assert_array_equal(line.get_ydata(), [8.5, 8.0, 7.5, 7.0, 6.5])


def test_a_stride_looks_the_same_in_every_panel_and_figure(tmp_path):
    runs = [
        {**RUN, "path": f"{k}.log", "engine": "hybrid", "stride": k, "case": case, "label": f"{k}"}
        for case, strides in (("one", (2, 5)), ("two", (5,)))
        for k in strides
    ]
    runs[-1]["path"] = "other.log"
    two = page(draw_loss, read_tables(write(tmp_path, runs))).axes
    assert two[0].lines[1].get_marker() == two[1].lines[0].get_marker()
    assert two[0].lines[0].get_marker() != two[1].lines[0].get_marker()


def test_a_nan_is_marked_and_an_unknown_loss_is_not(tmp_path):
    same = {k: RUN[k] for k in ("path", "label", "case", "engine")}
    rows = [
        {**same, "iteration": str(i), "loss": x} for i, x in enumerate(("9", "nan", "", "8"), 1)
    ]
    (ax,) = page(draw_loss, read_tables(write(tmp_path, [RUN], rows))).axes
    curve, marks = ax.lines
    np.testing.assert_array_equal(curve.get_ydata(), [9, np.nan, 8])
    assert list(marks.get_xdata()) == [2]
    assert marks.get_gid() == "no number"
    assert "no number" in ax.get_xlabel()


def test_a_figure_without_data_is_not_drawn_and_said(tmp_path, capsys):
    untimed = {**RUN, **dict.fromkeys(("iteration_ms", "forward_ms", "timed_iterations"), "")}
    folder = write(tmp_path / "t", [{**untimed, "update_ms": ""}])
    assert main([str(folder), "--out", str(tmp_path / "f")]) == 0
    assert "iteration-breakdown: not drawn: no run has" in capsys.readouterr().out
    assert {path.stem for path in (tmp_path / "f").iterdir()} == {"loss"}


def test_repeats_of_a_point_are_one_bar_and_other_points_stay_apart(tmp_path):
    repeats = [
        {**RUN, "path": f"{point}{i}", "label": f"{point} {i}", "point": point, "iteration_ms": ms}
        for point in ("a", "b")
        for i, ms in ((1, "100"), (2, "120"), (3, "170" if point == "b" else "110"))
    ]
    figure = page(draw_breakdown, read_tables(write(tmp_path, repeats)))
    assert bars(figure)["other"] == [20, 30]
    assert [name.get_text() for name in figure.axes[0].get_yticklabels()] == ["a 1", "b 1"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "no such table"), ("", "cannot be read"), ("a,b\n1,2\n", "column 'path' is missing"),
        (",".join(RUN) + "\n", "has no rows"),
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
