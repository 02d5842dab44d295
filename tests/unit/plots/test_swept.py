import pytest
from matplotlib.container import ErrorbarContainer

from configs.study import SweptFigure, default_study
from plots.lines import draw_swept
from plots.registry import figures
from plots.tables import PlotError, read_tables

FIGURES = figures(default_study())


def drawn(ax):
    """Points of every line with error bars, by colour; NaN where there is no marker."""
    found = {}
    for container in ax.containers:
        if isinstance(container, ErrorbarContainer) and container.lines[0] is not None:
            line = container.lines[0]
            found.setdefault(line.get_color(), []).extend(
                zip(line.get_xdata(), line.get_ydata(), strict=True)
            )
    return found


def colour(engine):
    return default_study().engines[engine].style.colour


@pytest.mark.parametrize(
    ("name", "setting", "values", "at"),
    [
        ("micro-batch", "micro_batch_size", [1, 4, 64], [1, 4, 64]),
        ("subgroup-size", "subgroup_numel", [10**7, 2 * 10**9], [10**7, 2 * 10**9]),
        ("data-parallel", "dp", [1, 2, 16], [1, 2, 16]),
        ("offload-ratio", "offload_ratio", [1.0, 0.9, 0.0], [0, 0.9, 1]),
        ("gpu-hogging", "hog_share", [0.0, 0.2, 0.8], [0, 0.2, 0.8]),
        ("accumulation", "accumulation", [1, 128], [1, 128]),
    ],
)
def test_a_sweep_has_a_row_a_model_and_a_line_an_engine(draw, sweep, name, setting, values, at):
    sweep.grid(model=["7B", "tiny"], **{setting: values})
    axes = draw(name, sweep).axes
    columns = len(axes) // 2
    assert [ax.get_title(loc="left").strip() for ax in axes[::columns]] == ["7B", "tiny"]
    for ax in axes:
        lines = drawn(ax)
        assert list(lines) == [colour(e) for e in ("stock", "all-host", "stride")]
        for points in lines.values():
            assert [x for x, _ in points] == at
        assert list(ax.get_xticks()) == at
        assert "(" in ax.get_ylabel()
    assert axes[-1].get_xlabel()
    log = name in ("micro-batch", "subgroup-size", "data-parallel", "accumulation")
    assert (axes[0].get_xscale() == "log") == log


def test_a_zero_that_is_no_value_does_not_count_as_one(tmp_path, sweep):
    """Links as they are have no place on an axis of rates."""
    sweep.grid(link_mbit=[0, 20])
    row = SweptFigure(kind="swept", title="links", x="link_mbit", y=["iteration_ms"])
    tables = read_tables(sweep.write(tmp_path / "tables"))
    with pytest.raises(PlotError, match=r"two values of link_mbit, only 20$"):
        draw_swept(tables, row, asked=False)


def test_models_of_one_name_and_several_sizes_have_panels_of_their_own(draw, sweep):
    for layers, ms in (("60", 12_500), ("59", 7290)):
        for dp in (1, 2):
            times = [{"iteration_ms": own} for own in (99, ms, ms)]
            own = {"model.layers": layers, "label": f"20B {layers} {dp}"}
            sweep.add("stock", model="20B", dp=dp, times=times, **own)
    axes = draw("data-parallel", sweep).axes[::2]
    titles = [ax.get_title(loc="left") for ax in axes]
    assert titles == ["20B, layers 60", "20B, layers 59"]
    heights = [drawn(ax)[colour("stock")] for ax in axes]
    assert heights == [[(1, 12.5), (2, 12.5)], [(1, 7.29), (2, 7.29)]]


def test_values_are_in_the_unit_of_the_axis(draw, sweep):
    for dp in (1, 2):
        sweep.add("stock", dp=dp, times=[{"iteration_ms": ms} for ms in (1, 2500, 2500, 7500)])
    ax, _ = draw("data-parallel", sweep).axes
    assert ax.get_ylabel() == "median iteration time (s)"
    assert drawn(ax) == {colour("stock"): [(1, 2.5), (2, 2.5)]}
    (bars,) = ax.containers[0].lines[2]
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[2.5, 5.0]] * 2


def test_a_run_that_failed_is_marked_where_it_would_have_been(draw, sweep):
    sweep.add("stock", dp=1)
    sweep.add("stock", dp=8, times=(), status="oom-device")
    figure = draw("data-parallel", sweep)
    marks = [line for line in figure.axes[0].lines if line.get_gid() == "failed"]
    assert [list(mark.get_xdata()) for mark in marks] == [[8]]
    assert "oom-device 1" in figure.get_supxlabel()
    assert list(figure.axes[0].get_xticks()) == [1, 8]
    points = drawn(figure.axes[0])[colour("stock")]
    assert [x for x, _ in points] == [1]


def test_a_quantity_that_nobody_has_takes_no_panel(draw, sweep):
    sweep.grid(micro_batch_size=[1, 2])
    for row in sweep.iterations:
        row["tflops"] = ""
    (ax,) = draw("micro-batch", sweep).axes
    assert ax.get_ylabel().startswith("median iteration")


def test_models_stack_phases_and_count_100_iterations_from_the_median(draw, sweep):
    for model in ("13B", "7B"):
        times = [
            {"iteration_ms": 3 * ms, "forward_ms": ms, "update_ms": ms} for ms in (9, 30, 30, 60)
        ]
        sweep.add("stock", model=model, times=times)
    figure = draw("models", sweep)
    stack, rate, total = figure.axes[3:]
    assert [round(patch.get_width(), 6) for patch in stack.patches] == [30, 30, 30]
    assert [patch.get_width() for patch in total.patches] == [9.0]
    assert len(rate.patches) == 1
    assert total.get_xlabel().replace("\n", " ") == "median 100 iterations (s)"
    assert "100 times one, not run" in " ".join(figure.get_supxlabel().split())


@pytest.mark.parametrize("name", ["models", "accumulation"])
def test_a_figure_of_nothing_is_refused_in_a_line(tmp_path, sweep, name):
    figure = FIGURES[name]
    sweep.add("stock", times=(), status="failed")
    tables = read_tables(sweep.write(tmp_path / "t"))
    with pytest.raises(PlotError, match="no run has"):
        figure.draw(tables)
