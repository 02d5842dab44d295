"""Figures of predictions, with published values as hollow markers."""

import pytest

from configs.study import default_study
from plots.registry import figures

FIGURES = figures(default_study())
ENGINES = {name: row.style for name, row in default_study().engines.items()}

PHASES = {"forward_ms": 100.0, "backward_ms": 200.0, "update_ms": 300.0}


def add(sweep, source, engine="stock", stride=0, iteration=650.0, phases=PHASES, **fields):
    """A run of one value a phase, as predictions and published values are."""
    times = [{**phases, "iteration_ms": iteration}]
    run = sweep.add(engine, stride, times=times, source=source, model="7B", **fields)
    values = {name: "" if value is None else value for name, value in times[0].items()}
    run.update(values, warmup_iterations=0, timed_iterations=1, device="", hardware=source)
    sweep.iterations[-1].update(values, warmup=0, loss="")
    return run


def strides(sweep):
    for source in ("simulated", "published"):
        add(sweep, source)
        for stride in (2, 3, 4):
            update = {"forward_ms": None, "backward_ms": None, "update_ms": 100.0 * stride}
            own = {} if source == "simulated" else {"iteration": None, "phases": update}
            add(sweep, source, "stride", stride, **own)
    return sweep


def lines_of(ax):
    return {line.get_markerfacecolor(): line for line in ax.lines if len(line.get_xdata()) == 3}


def test_published_points_are_hollow_and_not_joined(draw, sweep):
    ax = draw("stride", strides(sweep)).axes[0]
    found = lines_of(ax)
    assert found["white"].get_linestyle() == "None"
    assert found[ENGINES["stride"].colour].get_linestyle() == "--"


def test_a_published_level_is_marked_at_its_ends(draw, sweep):
    ax = draw("stride", strides(sweep)).axes[0]
    (level,) = (line for line in ax.lines if list(line.get_xdata()) == [0.03, 0.97])
    assert level.get_markerfacecolor() == "white"
    assert level.get_linestyle() == "None"
    # The same value, predicted and published: the first is a line across.
    across = [line for line in ax.lines if list(line.get_xdata()) == [0, 1]]
    assert [line.get_ydata()[0] for line in across] == [level.get_ydata()[0]]


def test_no_statistics_are_told_of_what_was_not_measured(draw, sweep):
    figure = draw("stride", strides(sweep))
    note = " ".join(figure.get_supxlabel().split())
    assert note.startswith("one value a point, no run of ours behind it · simulated · simulated")
    assert "warm-up" not in note
    # A report tells by this word which figures show measurements.
    assert "measured" not in note
    for ax in figure.axes:
        assert not [c for c in ax.collections if c.get_gid() == "errorbar"]
        assert all(len(container.lines[2]) == 0 for container in ax.containers)


@pytest.mark.parametrize("name", ["iteration-breakdown", "models"])
def test_an_update_alone_is_no_iteration(draw, sweep, name):
    figure = draw(name, strides(sweep))
    (ax, *_) = figure.axes
    hollow = [p for p in ax.patches if p.get_facecolor() == (1, 1, 1, 1) and p.get_hatch()]
    # Backward and update of the one published run that has all phases.
    assert len(hollow) == 2


def test_phases_without_a_whole_are_an_iteration_all_the_same(draw, sweep):
    add(sweep, "simulated")
    add(sweep, "published", "stride", 2, iteration=None)
    (ax,) = draw("iteration-breakdown", sweep).axes
    assert [text.get_text() for text in ax.get_yticklabels()] == [
        "stock, simulated", "stride 2, published",
    ]  # fmt: skip
    assert {text.get_text() for text in ax.texts} >= {"650", "600"}
