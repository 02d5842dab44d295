"""Figures of a study that the code has never heard of, and what is refused of one."""

import json

import pytest
from programs import plot as main

from plots.registry import KINDS, figures
from plots.tables import read_tables

KEYS = ("path", "label", "case", "engine", "source")
STUDY = {
    "name": "ovens", "title": "Ovens and loaves", "reference": "gas",
    "phases": {
        "kneading": {"title": "kneading", "colour": "#112233", "hatch": "///"},
        "baking": {"title": "baking", "colour": "#EECC66"},
    },
    "fields": {
        "yeast_g": {
            "type": "float", "default": 1.0, "title": "yeast", "axis": "yeast (g)",
            "log_axis": True,
        },
        "flour": {"type": "str", "default": "rye", "title": "flour"},
        "fan_speed": {
            "type": "int", "default": 0, "title": "fan", "axis": "speed of the fan",
            "only_some_engines": True, "in_pairs": "free",
        },
        "steam": {
            "type": "bool", "default": False, "title": "steam", "only_some_engines": True,
            "in_pairs": "free",
        },
    },
    "engines": {
        "wood": {"title": "wood oven"},
        "gas": {"title": "gas oven", "style": {"colour": "#123456"}},
        "electric": {
            "title": "electric oven", "fields": {"fan_speed": {}, "steam": {}},
        },
    },
    "figures": {
        "parts": {"kind": "breakdown", "title": "Parts of a loaf"},
        "loss": {"kind": "loss", "title": "Loss"},
        "yeast": {
            "kind": "swept", "title": "Time against yeast", "x": "yeast_g",
            "y": ["iteration_ms", "kneading_ms", "crumb_percent"],
        },
        "flour": {"kind": "swept", "title": "Time of a flour", "x": "flour", "y": ["baking_ms"]},
        "fan": {"kind": "swept", "title": "Against the fan", "x": "fan_speed", "y": ["baking_ms"]},
        "models": {"kind": "models", "title": "Models"},
        "whole": {"kind": "results", "title": "Whole runs", "y": ["baking_ms"]},
        "cost": {"kind": "tradeoff", "title": "Crumb", "y": ["crumb_percent", "baking_ms"]},
        "memory": {"kind": "memory", "title": "Memory"},
        "use": {"kind": "utilisation", "title": "Use"},
    },
}  # fmt: skip


class Ovens:
    """Tables of that study, run by run."""

    def __init__(self, sweep):
        self.sweep = sweep

    def bake(self, engine, kneading, baking, **fields):
        form = {"model": "loaf", "yeast_g": 1.0, "flour": "rye", **fields}
        own = " ".join(f"{k} {v}" for k, v in form.items() if k in ("fan_speed", "steam"))
        case = f"{form['model']}, yeast {form['yeast_g']:g}"
        run = {
            "path": f"run-{len(self.sweep.runs)}.log", "case": case, "engine": engine,
            "label": f"{case} {form['flour']} {engine} {own}", "source": "measured",
            "device": "stove", "hardware": "", "status": "ok", "verdict": "trains",
            "warmup_iterations": 1, "timed_iterations": 2, "parameters": 10, "global_batch_size": 1,
            "micro_batch_size": 1, "dp": 1, "crumb_percent": 7 * form["yeast_g"], **form,
        }  # fmt: skip
        run["point"] = run["label"]
        same = {key: run[key] for key in KEYS}
        for i in (1, 2, 3):
            self.sweep.iterations.append({
                **same, "iteration": i, "loss": 4 - i, "kneading_ms": kneading,
                "baking_ms": baking, "iteration_ms": kneading + baking + 1,
            })  # fmt: skip
            self.sweep.memory.append({**same, "iteration": i, "title": "risen", "allocated_gib": i})
            self.sweep.monitor.append({**same, "time_s": i, "cpu_percent": 10 * i})
        run |= {key: self.sweep.iterations[-1][key] for key in ("iteration_ms", "kneading_ms")}
        run["baking_ms"] = baking
        self.sweep.runs.append(run)

    def write(self, folder, study=STUDY):
        self.sweep.write(folder)
        (folder / "study.json").write_text(json.dumps(study))
        return folder


@pytest.fixture
def folder(sweep, tmp_path):
    ovens = Ovens(sweep)
    for model in ("loaf", "bun"):
        for yeast in (1.0, 4.0):
            ovens.bake("gas", 10 * yeast, 30, model=model, yeast_g=yeast)
            ovens.bake("wood", 10 * yeast, 60, model=model, yeast_g=yeast)
            for fan in (2, 5):
                ovens.bake("electric", 9, 20 - fan, model=model, yeast_g=yeast, fan_speed=fan)
    ovens.bake("electric", 9, 10, fan_speed=2, steam=True)
    ovens.bake("gas", 10, 45, flour="spelt")
    return ovens.write(tmp_path / "tables")


def drawn(folder, name):
    tables = read_tables(folder)
    return figures(tables.study)[name].draw(tables)


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def lines(ax):
    return {c.lines[0].get_color(): list(c.lines[0].get_ydata()) for c in ax.containers}


def test_every_kind_draws_a_study_of_its_own(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("plots.canvas.FORMATS", ("svg",))
    assert {row["kind"] for row in STUDY["figures"].values()} == set(KINDS)
    assert main([str(folder), "--out", str(tmp_path / "f")]) == 0
    assert "not drawn" not in capsys.readouterr().out
    stems = {path.stem for path in (tmp_path / "f").glob("*.svg")}
    assert stems == set(STUDY["figures"])
    assert "Time against yeast" in (tmp_path / "f" / "yeast.svg").read_text()


def test_phases_are_those_of_the_study(folder):
    figure = drawn(folder, "parts")
    assert legend(figure) == ["kneading", "baking", "outside the phases"]
    (ax,) = (ax for ax in figure.axes if ax.get_title(loc="left") == "bun, yeast 4")
    widths = [patch.get_width() for patch in ax.patches]
    assert widths == [40, 60, 1, 40, 30, 1, 9, 18, 1, 9, 15, 1]
    assert [text.get_text() for text in ax.get_yticklabels()] == [
        "wood", "gas", "electric fan 2", "electric fan 5",
    ]  # fmt: skip


def test_engines_with_fields_of_their_own_are_variants_by_their_values(folder):
    names = legend(drawn(folder, "yeast"))
    assert names == [
        "wood", "gas", "electric fan 2", "electric fan 2 steam", "electric fan 5",
    ]  # fmt: skip


def test_columns_have_the_titles_and_units_of_their_names(folder):
    labels = {ax.get_ylabel().replace("\n", " ") for ax in drawn(folder, "yeast").axes}
    assert labels == {"median iteration time (ms)", "median kneading time (ms)", "median crumb (%)"}
    assert {ax.get_xlabel() for ax in drawn(folder, "yeast").axes} == {"", "yeast (g)"}
    assert drawn(folder, "yeast").axes[0].get_xscale() == "log"


def test_a_column_of_runs_alone_has_one_value_a_run(folder):
    crumbs = [ax for ax in drawn(folder, "yeast").axes if "crumb" in ax.get_ylabel()]
    assert lines(crumbs[0])["#123456"] == [7, 28]


def test_against_a_field_of_some_engines_the_others_are_levels(folder):
    ax = drawn(folder, "fan").axes[0]
    assert list(ax.get_xticks()) == [2, 5]
    across = {line.get_color(): line for line in ax.lines if list(line.get_xdata()) == [0, 1]}
    assert across["#123456"].get_ydata()[0] == 30
    assert across["#123456"].get_linestyle() == "-", "the reference is solid"
    assert {line.get_linestyle() for line in across.values()} == {"-", "--"}
    widths = {colour: line.get_linewidth() for colour, line in across.items()}
    assert max(widths, key=widths.get) == "#123456"


def test_texts_along_an_axis_are_named(folder):
    ax = drawn(folder, "flour").axes[0]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["rye", "spelt"]
    assert lines(ax)["#123456"] == [30, 45]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (
            {"kind": "pie"},
            "'figures.odd': Input tag 'pie' found using 'kind' does not match",
        ),
        ({"kind": "swept", "x": "yeast_g"}, "field 'figures.odd.swept.y' is missing"),
        ({"kind": "loss", "x": "yeast_g"}, "unknown field 'figures.odd.loss.x'"),
        ({"kind": "results", "y": []}, "'figures.odd.results.y' = []: Tuple should have at least"),
    ],
)
def test_a_figure_that_no_kind_can_draw_is_refused_by_name(sweep, tmp_path, capsys, row, why):
    ovens = Ovens(sweep)
    ovens.bake("gas", 1, 1)
    study = {**STUDY, "figures": {"odd": {"title": "t", **row}}}
    folder = ovens.write(tmp_path / "t", study)
    assert main([str(folder), "--out", str(tmp_path / "f")]) == 2
    error = capsys.readouterr().err
    assert why in error
    assert error.count("\n") == 1
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"name": "half"}'])
def test_a_study_that_cannot_be_read_is_refused_in_a_line(folder, tmp_path, capsys, content):
    (folder / "study.json").write_text(content)
    assert main([str(folder), "--out", str(tmp_path / "f")]) == 2
    error = capsys.readouterr().err
    assert f"{folder / 'study.json'}: " in error
    assert error.count("\n") == 1
