"""Results of whole runs as bars, published values beside them and told apart."""

import pytest

from configs.study import load_study, study_from
from plots import results
from plots.registry import figures
from plots.tables import PlotError, read_tables

STUDY = load_study("imdb")


@pytest.fixture
def tables(tmp_path):
    """``tables(rows)`` -> tables of runs with these cells."""

    def make(rows, study=STUDY):
        names = ["path", "label", "case", "engine", "device", "hardware", "iteration_ms", "dp"]
        names += ["pp", *study.fields, "warmup_iterations", "timed_iterations", "source"]
        names += study.results
        lines = [",".join(names)]
        for number, row in enumerate(rows):
            same = {"path": f"{number}.log", "case": "tiny", "device": "cpu", "dp": 1}
            cells = {**same, "source": "measured", **row}
            lines.append(",".join(str(cells.get(name, "")) for name in names))
        (tmp_path / "runs.csv").write_text("\n".join(lines) + "\n")
        (tmp_path / "iterations.csv").write_text("path,label,case,engine,iteration,loss\n")
        return read_tables(tmp_path, study)

    return make


def shown(tables, study=STUDY):
    figure = figures(study)["strategies"].row
    return dict(results.panels(tables, figure))


def test_a_bar_is_the_median_of_an_engines_runs(tables):
    rows = [{"engine": "deepspeed-stage-2", "epoch_s": value} for value in (1.0, 2.0, 9.0)]
    rows += [{"engine": "no-deepspeed", "epoch_s": 5.0}]
    bars = [bar for bar in shown(tables(rows))["epoch_s"] if bar.source == "measured"]
    assert [(bar.label, bar.middle) for bar in bars] == [("no DeepSpeed", 5.0), ("ZeRO-2", 2.0)]


def test_devices_are_named_where_there_are_several_numbers_of_them(tables):
    rows = [{"engine": "no-deepspeed", "epoch_s": 5.0 / dp, "dp": dp} for dp in (1, 2)]
    labels = [bar.label for bar in shown(tables(rows))["epoch_s"] if bar.source == "measured"]
    assert labels == ["no DeepSpeed, DP 1", "no DeepSpeed, DP 2"]


def test_runs_that_differ_in_stages_or_in_an_engines_own_field_have_bars_of_their_own(tables):
    study = load_study("optimus-cc")
    own = {"engine": "cb", "backward_mib": 1.0, "pp": 2, "inter_grad_comp_epilogue_only": True}
    rows = [own, own | {"pp": 4}, own | {"inter_grad_comp_epilogue_only": False}]
    rows += [{"engine": "uncompressed", "backward_mib": 3.0, "pp": 2}]
    found = dict(results.panels(tables(rows, study), figures(study)["schemes"].row))
    labels = [bar.label for bar in found["backward_mib"]]
    assert labels == [
        "baseline, PP 2",
        "CB, PP 2, no epilogue only",
        "CB, PP 2, epilogue only",
        "CB, PP 4, epilogue only",
    ]


def test_what_was_published_stands_beside_and_says_so(tables):
    panels = shown(tables([{"engine": "no-deepspeed", "epoch_s": 5.0, "test_accuracy": 0.8}]))
    found = {name: [(b.label, b.middle) for b in bars if b.source == "published"]
             for name, bars in panels.items()}  # fmt: skip
    assert found == {
        "epoch_s": [("published: RTX 3090", 180.0), ("published: two RTX 3090", 90.0)],
        "test_accuracy": [("published: RTX 3090", 0.7)],
    }


def test_a_quantity_that_no_run_has_is_left_out_published_or_not(tables):
    assert set(shown(tables([{"engine": "no-deepspeed", "batch_s": 0.5}]))) == {"batch_s"}


def test_a_study_that_travelled_knows_what_was_published(tables):
    # As it was before a change of the shipped one.
    engines = {n: e for n, e in STUDY.as_table()["engines"].items() if n != "deepspeed-stage-1"}
    travelled = study_from({**STUDY.as_table(), "engines": engines}, "it")
    panels = shown(tables([{"engine": "no-deepspeed", "batch_s": 0.5}], travelled), travelled)
    assert [bar.source for bar in panels["batch_s"]] == ["measured", "published"]


def test_a_study_that_only_shares_the_name_has_nothing_published(tables):
    other = study_from({**STUDY.as_table(), "title": "Another"}, "it")
    assert results.published(other) == {}


def test_another_study_of_its_own_has_nothing_published(tables):
    table = {**STUDY.as_table(), "name": "of-mine"}
    assert results.published(study_from(table, "it")) == {}


def test_the_figure_names_engines_and_says_what_is_published(tables):
    made = tables([{"engine": "deep-optimizer-states", "batch_s": 0.5, "hardware": "A CPU"}])
    [drawn] = figures(STUDY)["strategies"].draw(made)
    [ax] = drawn.axes
    ticks = [text.get_text() for text in ax.get_yticklabels()]
    assert [" ".join(text.replace(",", " ").split()) for text in ticks] == [
        "ZeRO-3 optimizer offloaded with the plugin", "published: RTX 3090",
    ]  # fmt: skip
    assert "not measured here" in drawn.get_supxlabel()
    assert "A CPU" in drawn.get_supxlabel()
    faces = [patch.get_facecolor() for patch in ax.patches]
    assert faces[1][:3] == (1.0, 1.0, 1.0) != faces[0][:3]


def test_nothing_to_draw_is_told(tables):
    made = tables([{"engine": "no-deepspeed"}])
    drawing = figures(STUDY)["strategies"]
    with pytest.raises(PlotError, match="no run has epoch_s"):
        drawing.draw(made)


def test_a_damaged_row_is_named(tables, tmp_path, monkeypatch):
    (tmp_path / "published.csv").write_text("label,quantity,value\nX,epoch_s,fast\n")
    monkeypatch.setattr(results, "_folder", lambda _: tmp_path)
    with pytest.raises(PlotError, match=r"published\.csv: .*fast.*: give label, quantity"):
        results.published(STUDY)
