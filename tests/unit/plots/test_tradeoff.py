"""A rate against memory: marks of points, published ones beside and told apart."""

import dataclasses
import itertools

import pytest

from configs.study import load_study
from plots import results
from plots.canvas import BESIDE, settle
from plots.registry import figures
from plots.tables import PlotError, read_tables

STUDY = load_study("zero-ladder")
FIGURE = figures(STUDY)["ladder"]
COLUMNS = (
    *("path", "label", "case", "engine", "device", "hardware", "iteration_ms", "dp", "dtype"),
    *("warmup_iterations", "timed_iterations", "source", "point", "zero_stage"),
    *("samples_per_s", "max_allocated_gib", "host_peak_gib", "gpu_peak_gib"),
)


@pytest.fixture
def tables(tmp_path):
    """``tables(rows)`` -> tables of runs with these cells."""

    def make(*rows):
        lines = [",".join(COLUMNS)]
        for number, row in enumerate(rows):
            same = {"path": f"{number}.log", "point": f"{number}", "dp": 1, "dtype": "fp32"}
            same |= {"case": "tiny", "source": "measured", "device": "cpu", "hardware": "A CPU"}
            cells = {**same, **row}
            lines.append(",".join(str(cells.get(name, "")) for name in COLUMNS))
        (tmp_path / "runs.csv").write_text("\n".join(lines) + "\n")
        (tmp_path / "iterations.csv").write_text("path,label,case,engine,iteration,loss\n")
        return read_tables(tmp_path, STUDY)

    return make


def run(engine, rate, memory, **more):
    return {"engine": engine, "samples_per_s": rate, "max_allocated_gib": memory, **more}


def marks(made, column="max_allocated_gib"):
    shown, _ = results.mark_panels(made, FIGURE.row)
    return dict(shown)[column]


def own(found):
    return [(mark.name, mark.cost, mark.rate) for mark in found if mark.look]


def test_a_mark_is_a_point_by_its_engines_tag(tables):
    made = tables(run("no-zero", 9.0, 0.5), run("stage-3-offload", 3.0, 0.25))
    assert own(marks(made)) == [("0", 0.5, 9.0), ("3o", 0.25, 3.0)]


def test_repeats_are_one_mark_at_their_medians(tables):
    values = ((1.0, 4.0), (2.0, 6.0), (9.0, 5.0))
    made = tables(*(run("stage-1", rate, memory, point="p") for rate, memory in values))
    [mark] = [mark for mark in marks(made) if mark.look]
    assert (mark.cost, mark.rate, mark.num_runs) == (5.0, 2.0, 3)


def test_what_differs_from_the_first_point_is_named_and_what_an_engine_fixes_is_not(tables):
    made = tables(
        run("stage-1", 9.0, 0.5, zero_stage=1),
        run("stage-2", 8.0, 0.5, zero_stage=2, dtype="bf16", dp=2),
    )
    assert [name for name, *_ in own(marks(made))] == ["1", "2 DP 2 bf16"]
    assert results.mark_panels(made, FIGURE.row)[1] == ["DP 1", "fp32"]


def test_published_rungs_are_pairs_of_both_quantities(tables):
    found = [mark for mark in marks(tables(run("stage-1", 9.0, 0.5))) if not mark.look]
    assert [(m.name, m.cost, m.rate) for m in found] == [
        ("published: no ZeRO", 0.23, 502.2),
        ("published: ZeRO-1", 0.16, 357.7),
        ("published: ZeRO-1, fp16", 0.10, 447.7),
        ("published: ZeRO-2", 1.96, 242.1),
        ("published: ZeRO-3", 2.01, 140.7),
        ("published: ZeRO-3, both offloaded", 0.31, 53.9),
    ]


def test_a_cost_that_no_run_has_has_no_panel(tables):
    shown, _ = results.mark_panels(tables(run("stage-1", 9.0, 0.5, host_peak_gib=2.0)), FIGURE.row)
    assert [name for name, _ in shown] == ["max_allocated_gib", "host_peak_gib"]
    assert all(mark.look for mark in shown[1][1]), "nothing was published of host memory"


def test_runs_that_were_not_measured_or_lack_a_figure_are_no_marks(tables):
    made = tables(
        run("stage-1", 9.0, 0.5),
        run("stage-2", 8.0, 0.5, source="simulated"),
        run("stage-3", "", 0.5),
        run("no-zero", 7.0, ""),
    )
    assert [name for name, *_ in own(marks(made))] == ["1"]


def test_the_figure_says_what_was_published_and_draws_it_hollow(tables):
    [drawn] = FIGURE.draw(tables(run("stage-2", 9.0, 0.5)))
    [ax] = drawn.axes
    hollow = [dots for dots in ax.collections if dots.get_label() == results._PUBLISHED]
    assert len(hollow) == 6
    assert all(tuple(dots.get_facecolor()[0][:3]) == (1.0, 1.0, 1.0) for dots in hollow)
    legend = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert legend == ["2: ZeRO-2", "published by others"]
    note = " ".join(drawn.get_supxlabel().split())
    assert "not measured here" in note
    assert "A CPU" in note


@pytest.mark.parametrize(
    ("cost", "said"), [("max_allocated_gib", True), ("validation_loss", False)]
)
def test_rates_and_peaks_are_explained_and_numbers_of_whole_runs_are_not(tables, cost, said):
    made = tables(run("no-zero", 9.0, 0.5))
    study = made.study.model_copy(update={"results": {"validation_loss": "a loss"}})
    made = dataclasses.replace(made, study=study)
    mark = results.Mark("0", 1.0, 9.0, None)
    notes = results._marks_notes(made, [(cost, [mark])], [])
    assert any("cost at its peak" in note for note in notes) == said


def test_nothing_to_draw_is_told(tables):
    with pytest.raises(PlotError, match="no run has samples_per_s and max_allocated_gib or host"):
        FIGURE.draw(tables(run("stage-2", 9.0, "")))


def test_names_cover_neither_marks_nor_each_other_and_those_without_room_are_hidden(tables):
    engines = ("stage-1", "stage-2", "stage-3", "stage-1-offload", "stage-2-offload")
    close = [run(engine, 9.0 + 0.01 * n, 0.5) for n, engine in enumerate(engines)]
    alone = run("stage-1", 3.0, 0.9)
    [drawn] = FIGURE.draw(tables(*close, *close, *close, alone))
    settle(drawn)
    texts = [text for ax in drawn.axes for text in ax.texts if text.get_gid() == BESIDE]
    shown = [text for text in texts if text.get_visible()]
    assert 0 < len(shown) < len(texts)
    assert [text.get_visible() for text in texts if text.xy == (0.9, 3.0)] == [True]
    boxes = [text.get_window_extent() for text in shown]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    assert "names without room are left out" in " ".join(drawn.get_supxlabel().split())
