"""Results of whole runs as bars, and against each other as marks; published values beside."""

import csv

import pytest

from configs import published
from configs.errors import ConfigError
from configs.study import load_study, study_from
from plots.registry import figures
from plots.tables import PlotError, read_tables

IMDB, LADDER = load_study("imdb"), load_study("zero-ladder")


@pytest.fixture
def draw(tmp_path):
    """``draw(study, figure, rows)`` -> the figure of runs with these cells."""

    def draw(study, name, rows):
        same = {"case": "tiny", "device": "cpu", "hardware": "A CPU", "dp": 1, "source": "measured",
                "iteration_ms": "", "warmup_iterations": 0, "timed_iterations": 1}  # fmt: skip
        rows = [
            {"path": f"{n}.log", "label": f"{n}", "point": f"{n}", **same, **row}
            for n, row in enumerate(rows)
        ]
        with (tmp_path / "runs.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list({name: 0 for row in rows for name in row}))
            writer.writeheader()
            writer.writerows(rows)
        (tmp_path / "iterations.csv").write_text("path,label,case,engine,iteration,loss\n")
        return figures(study)[name].draw(read_tables(tmp_path, study))

    return draw


def lengths(ax):
    """Length of each bar by its name."""
    names = [" ".join(text.get_text().replace(",", " ").split()) for text in ax.get_yticklabels()]
    return dict(zip(names, (patch.get_width() for patch in ax.patches), strict=True))


def note(figure):
    return " ".join(figure.get_supxlabel().split())


def test_a_bar_is_the_median_of_an_engines_seeds_and_published_ones_stand_beside(draw):
    rows = [{"engine": "deepspeed-stage-2", "epoch_s": value} for value in (1.0, 2.0, 9.0)]
    figure = draw(IMDB, "strategies", [*rows, {"engine": "no-deepspeed", "epoch_s": 5.0}])
    (ax,) = figure.axes  # a quantity that no run has takes no panel, published or not
    assert lengths(ax) == {
        "no-deepspeed": 5.0, "deepspeed-stage-2": 2.0,
        "published: RTX 3090": 180.0, "published: two RTX 3090": 90.0,
    }  # fmt: skip
    (whiskers,) = (c for c in ax.containers if len(getattr(c, "lines", ())) == 3)
    assert [s[:, 0].tolist() for s in whiskers.lines[2][0].get_segments()] == [[1.5, 5.5]]
    faces = [patch.get_facecolor()[:3] == (1.0, 1.0, 1.0) for patch in ax.patches]
    assert faces == [False, False, True, True]
    assert "median of n=1-3 runs; error bars: interquartile range" in note(figure)
    assert "not measured here" in note(figure)
    assert "A CPU" in note(figure)


def test_runs_that_differ_in_a_setting_or_in_an_engines_own_field_have_bars_of_their_own(draw):
    study = load_study("optimus-cc")
    own = {"engine": "cb", "backward_mib": 1.0, "pp": 2, "inter_grad_comp_epilogue_only": True}
    rows = [own, own | {"pp": 4}, own | {"inter_grad_comp_epilogue_only": False}]
    rows += [{"engine": "uncompressed", "backward_mib": 3.0, "pp": 2}]
    (ax,) = draw(study, "schemes", rows).axes
    assert list(lengths(ax)) == [
        "uncompressed PP 2", "cb PP 2", "cb PP 4", "cb no epilogue only PP 2",
    ]  # fmt: skip


def test_what_was_published_belongs_to_the_shipped_study_alone():
    table = IMDB.as_table()
    engines = {name: row for name, row in table["engines"].items() if name != "deepspeed-stage-1"}
    assert "batch_s" in published.published_runs(study_from({**table, "engines": engines}, "it"))
    for change in ({"title": "Another"}, {"name": "of-mine"}):
        assert published.published_runs(study_from({**table, **change}, "it")) == {}


def test_a_damaged_row_is_named(tmp_path, monkeypatch):
    (tmp_path / "published.csv").write_text("label,quantity,value\nX,epoch_s,fast\n")
    monkeypatch.setattr(published, "study_folder", lambda _: tmp_path)
    with pytest.raises(ConfigError, match=r"published\.csv: .*fast.*: give label, quantity"):
        published.published_runs(IMDB)


def rung(engine, rate, memory, **more):
    return {"engine": engine, "samples_per_s": rate, "max_allocated_gib": memory, **more}


def marks(ax):
    """Places of the marks and what stands beside them, ours and the hollow ones."""
    texts = {text.xy: text.get_text() for text in ax.texts}
    found = {True: {}, False: {}}
    for line in ax.lines:
        at = (line.get_xdata()[0], line.get_ydata()[0])
        found[line.get_markerfacecolor() == "white"][at] = texts.get(at, "")
    return found[False], found[True]


def test_a_mark_is_the_medians_of_a_rung_and_published_pairs_are_hollow(draw):
    rows = [rung("stage-1", rate, gib) for rate, gib in ((1.0, 4.0), (2.0, 6.0), (9.0, 5.0))]
    figure = draw(LADDER, "ladder", [*rows, rung("no-zero", 7.0, ""), rung("stage-3", "", 0.5)])
    (ax,) = figure.axes
    own, others = marks(ax)
    assert own == {(5.0, 2.0): ""}
    assert others[0.23, 502.2] == "no ZeRO"
    assert len(others) == 6
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["stage-1", "published by others"]
    assert "not measured here" in note(figure)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")


def test_what_differs_from_the_first_point_is_named(draw):
    rows = [rung("stage-1", 9.0, 0.5, zero_stage=1, dtype="fp32")]
    rows += [rung("stage-2", 8.0, 0.4, zero_stage=2, dtype="bf16", dp=2, host_peak_gib=2.0)]
    figure = draw(LADDER, "ladder", rows)
    memory, host = figure.axes
    assert marks(memory)[0] == {(0.5, 9.0): "", (0.4, 8.0): "a"}
    assert "DP 1, fp32 where no letter says else · a: DP 2 bf16" in note(figure)
    assert marks(host)[1] == {}, "nothing was published of host memory"


@pytest.mark.parametrize(
    ("study", "figure", "row", "why"),
    [
        (IMDB, "strategies", {"engine": "no-deepspeed"}, "no run has epoch_s"),
        (LADDER, "ladder", rung("stage-2", 9.0, ""), "no run has samples_per_s and max_allocated"),
    ],
)
def test_nothing_to_draw_is_told(draw, study, figure, row, why):
    with pytest.raises(PlotError, match=why):
        draw(study, figure, [row])
