import re
import struct
import xml.etree.ElementTree as ET

import matplotlib
import pytest
from full_disk import files_of_at_most
from programs import plot as main, python

from configs.study import default_study
from plots.current import Drawn
from plots.registry import figures

FIGURES = figures(default_study())

EVERY = {
    "model": "13B", "micro_batch_size": 4, "subgroup_numel": 10**9, "dp": 2, "offload_ratio": 0.5,
    "accumulation": 8, "hog_share": 0.4,
}  # fmt: skip
SWEEPS = (
    *("micro-batch", "subgroup-size", "data-parallel", "offload-ratio", "accumulation"),
    "gpu-hogging",
)
SVG = "{http://www.w3.org/2000/svg}"


def every_table(sweep):
    """Tables of which each figure can be made."""
    sweep.grid(engines=[("stock", 0), ("stride", 2), ("stride", 3)], model=["$odd^ & <b>"])
    for setting, value in EVERY.items():
        sweep.add("stock", **{"model": "$odd^ & <b>", setting: value})
    for run in sweep.runs:
        run["gpu_peak_gib"] = 9
        run["hardware"] = "100% $\\nope$"  # no mathematics
    same = {key: sweep.runs[0][key] for key in ("path", "label", "case", "engine", "stride")}
    sweep.memory = [
        {**same, "iteration": 2, "title": title, "allocated_gib": 1, "host_used_gib": 9}
        for title in ("before", "after")
    ]
    sweep.monitor = [{**same, "time_s": t, "cpu_percent": 50} for t in (0, 1, 2)]
    return sweep


@pytest.fixture
def svg_alone(monkeypatch):
    """Draw in the format that takes the least time."""
    monkeypatch.setattr("plots.canvas.FORMATS", ("svg",))


@pytest.fixture
def unsaved(monkeypatch):
    """Draw, and write an empty file for each figure: to lay texts out takes the most time."""

    def save(_figure, out, stem, _text):
        path = out / f"{stem}.svg"
        path.touch()
        return [path]

    monkeypatch.setattr("plots.draw.save", save)


@pytest.mark.usefixtures("svg_alone")
def test_every_figure_is_made_and_describes_itself(sweep, tmp_path):
    tables = every_table(sweep).write(tmp_path / "tables")
    out = tmp_path / "a folder" / "figures"
    assert main([str(tables), "--out", str(out)]) == 0
    assert {path.stem for path in out.glob("*.svg")} == {*FIGURES}
    for path in out.glob("*.svg"):
        described(path)


def test_figures_have_three_formats_and_equal_tables_give_equal_files(sweep, tmp_path, capsys):
    tables = sweep.grid(model=["7B"], dp=[1, 2]).write(tmp_path / "tables")
    for out in ("one", "two"):
        assert main([str(tables), "--out", str(tmp_path / out), "--figure", "data-parallel"]) == 0
    assert "data-parallel.png (and .pdf, .svg)\n" in capsys.readouterr().out
    written = sorted((tmp_path / "one").iterdir())
    kinds = ("csv", "pdf", "png", "svg")
    assert [path.name for path in written] == [f"data-parallel.{kind}" for kind in kinds]
    told = [line.split(",") for line in (tmp_path / "one/data-parallel.csv").read_text().split()]
    assert told
    for path in written:
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name
        content = path.read_bytes()
        if path.suffix == ".png":
            assert content.startswith(b"\x89PNG")
            assert struct.unpack(">II", content[16:24])[0] == 1280
        assert path.suffix != ".pdf" or content.startswith(b"%PDF")


def test_a_full_disk_is_one_line_that_names_the_file(sweep, tmp_path, capsys):
    tables = sweep.grid(model=["7B"]).write(tmp_path / "tables")
    out = tmp_path / "f"
    out.mkdir()
    (out / "loss.png").write_bytes(b"an older figure")
    with files_of_at_most(1000):
        assert main([str(tables), "--out", str(out), "--figure", "loss"]) == 1
    error = capsys.readouterr().err
    assert error == f"plots: error: {out / 'loss.png'}: cannot be written: File too large\n"
    assert [path.name for path in out.iterdir()] == ["loss.png"]
    assert (out / "loss.png").read_bytes() == b"an older figure"


def described(path):
    root = ET.parse(path).getroot()
    assert root.find(f"{SVG}title").text == path.stem
    assert "measured" in "".join(root.find(f"{SVG}metadata").itertext())
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert any("measured" in (word or "") for word in words), "text is text, not outlines"


def missed(line):
    """Names of the figures that a line says are not drawn, in the order of the study."""
    groups = re.split(r"\); ", line.removeprefix("not drawn: ").removesuffix(")"))
    names = [name for group in groups for name in group.partition(" (")[0].split(", ")]
    return sorted(names, key=[*FIGURES].index)


@pytest.mark.usefixtures("unsaved")
def test_what_the_tables_do_not_vary_is_skipped_and_said(sweep, tmp_path, capsys):
    tables = sweep.grid(model=["7B"]).write(tmp_path / "tables")
    assert main([str(tables), "--out", str(tmp_path / "f")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert missed(said[-1]) == [
        "stride",
        "models",
        *SWEEPS,
        "update-rates",
        "memory",
        "peaks",
        "utilisation",
    ]
    assert not any("not drawn" in line for line in said[:-1])
    assert [".png" in line or ".svg" in line for line in said[:-1]] == [True] * len(said[:-1])


@pytest.mark.usefixtures("svg_alone")
def test_a_figure_of_one_value_is_drawn_when_asked_for(sweep, tmp_path):
    tables = sweep.grid(model=["7B"]).write(tmp_path / "tables")
    assert main([str(tables), "--out", str(tmp_path / "f"), "--figure", "stride"]) == 0
    assert (tmp_path / "f" / "stride.svg").exists()


@pytest.mark.usefixtures("svg_alone")
@pytest.mark.parametrize("name", ["memory", "utilisation"])
def test_an_impossible_figure_asked_for_is_an_error_and_the_others_are_drawn(
    sweep, tmp_path, capsys, name
):
    tables = sweep.grid(model=["7B"]).write(tmp_path / "tables")
    assert main([str(tables), "--out", str(tmp_path / "f"), "--figure", name, "loss"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"plots: error: {name}: " in error
    assert (tmp_path / "f" / "loss.svg").exists()


def test_runs_that_all_failed_leave_no_figure_and_say_why(sweep, tmp_path, capsys):
    for engine in ("stock", "stride"):
        sweep.add(engine, times=(), status="oom-host")
    tables = sweep.write(tmp_path / "tables")
    assert main([str(tables), "--out", str(tmp_path / "f")]) == 1
    said = capsys.readouterr().out.splitlines()
    (line,) = said
    assert missed(line) == [*FIGURES]


@pytest.mark.usefixtures("unsaved")
def test_only_expected_figures_are_missed(sweep, tmp_path, capsys):
    tables = sweep.grid(model=["7B"]).write(tmp_path / "tables")
    assert main([str(tables), "--out", str(tmp_path / "f"), "--expect", "memory", "loss"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert missed(said[-1]) == ["memory"]
    assert any("loss.svg" in line for line in said)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--figure", "stirde"], "figure 'stirde' is unknown; known: iteration-breakdown, loss"),
        ([], "required: TABLES_DIR, --out"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(tmp_path, capsys, arguments, why):
    given = [str(tmp_path), "--out", str(tmp_path / "f"), *arguments] if arguments else []
    assert main(given) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert why in error


def test_a_folder_around_the_tables_and_a_file_for_figures_are_named(sweep, tmp_path, capsys):
    tables, file = sweep.grid(model=["7B"]).write(tmp_path / "tables"), tmp_path / "README.md"
    file.write_text("mine")
    for given, out, why in (
        (tmp_path, tmp_path / "f", f"{tmp_path}: no runs.csv in it: did you mean {tables}?"),
        (tables, file, f"--out {file}: is a file, where a folder is needed; give another one"),
    ):
        assert main([str(given), "--out", str(out), "--figure", "loss"]) == 2
        assert capsys.readouterr().err == f"plots: error: {why}\n"
    assert file.read_text() == "mine"


def test_a_figure_of_times_says_that_the_machine_was_busy(sweep, draw):
    sweep.grid(model=["7B"])

    def caption(name):
        return " ".join(draw(name, sweep).get_supxlabel().split())

    assert "other programs" not in caption("iteration-breakdown")
    for run in sweep.runs:
        run["busy"] = ""
    sweep.runs[0]["busy"] = "others used 70% of its cores"
    words = f"other programs used much of the machine when 1 of {len(sweep.runs)} runs began"
    assert words in caption("iteration-breakdown")
    assert "other programs" not in caption("loss")


@pytest.fixture
def loss(sweep, tmp_path, monkeypatch):
    """Tables and a folder of figures of which ``loss`` is current."""
    monkeypatch.setattr("plots.canvas.FORMATS", ("svg",))
    monkeypatch.setattr("plots.current.FORMATS", ("svg",))
    tables, out = sweep.grid(model=["7B"]).write(tmp_path / "tables"), tmp_path / "f"
    out.mkdir()
    (out / "loss.svg").write_text("as it was drawn")
    Drawn(out, tables).remember({"loss": "", "memory": "of no use here"})
    assert current(tables, out) == {"loss": "", "memory": "of no use here"}
    return tables, out


def current(tables, out):
    return Drawn(out, tables).current(FIGURES)


@pytest.mark.usefixtures("unsaved")
def test_only_what_is_not_current_is_drawn(loss, capsys):
    tables, out = loss
    assert main([str(tables), "--out", str(out), "--expect", "memory"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "figures: 1 up to date"
    assert said[-1] == "not drawn: memory (of no use here)"
    assert any(line.startswith(f"{out / 'iteration-breakdown.svg'} ") for line in said)
    assert not any("loss" in line for line in said)
    assert (out / "loss.svg").read_text() == "as it was drawn"
    assert current(tables, out).keys() == FIGURES.keys()


@pytest.mark.parametrize("what", ["table", "study", "style", "library", "file", "record"])
def test_a_figure_is_current_while_what_it_is_made_of_is_the_same(
    loss, sweep, tmp_path, monkeypatch, what
):
    tables, out = loss
    if what == "table":
        sweep.add("stride", 3, model="7B")
        sweep.write(tables)
    elif what == "study":
        (tables / "study.json").write_text(default_study().as_json())
    elif what == "style":
        (tmp_path / "plots").mkdir()
        (tmp_path / "plots" / "paper.mplstyle").touch()
        monkeypatch.setattr("plots.current.ROOT", tmp_path)
    elif what == "library":
        monkeypatch.setattr("plots.current.metadata.version", lambda package: "another")
    elif what == "file":
        (out / "loss.svg").unlink()
    else:
        (out / ".drawn.json").write_text('{"loss": {"of": ')
    assert "loss" not in current(tables, out)


def test_a_figure_that_was_drawn_of_other_tables_is_not_current(loss, tmp_path, sweep):
    tables, out = loss
    sweep.add("stride", 3, model="7B")
    others = sweep.write(tmp_path / "others")
    assert main([str(others), "--out", str(out), "--figure", "loss"]) == 0
    assert current(tables, out) == {"memory": "of no use here"}


def test_a_readers_own_settings_of_matplotlib_change_no_figure(loss, monkeypatch):
    tables, out = loss

    def drawn():
        assert main([str(tables), "--out", str(out), "--figure", "loss"]) == 0
        return (out / "loss.svg").read_bytes()

    before = drawn()
    monkeypatch.setitem(matplotlib.rcParams, "axes.facecolor", "red")
    monkeypatch.setitem(matplotlib.rcParams, "axes.labelpad", 20.0)
    assert drawn() == before


def test_who_has_nothing_to_draw_loads_nothing_that_draws(sweep, tmp_path):
    tables = sweep.grid(model=["7B"]).write(tmp_path / "tables")
    out = tmp_path / "f"
    out.mkdir()
    Drawn(out, tables).remember(dict.fromkeys(FIGURES, "for a test"))
    done = python("-X", "importtime", "-m", "plots", tables, "--out", out)
    assert done.returncode == 1  # there is none
    assert "(for a test)\n" in done.stdout
    assert not re.search(r"\| +(matplotlib|pandas|numpy)\b", done.stderr)
