import pytest

from plots.registry import FIGURES
from plots.style import ENGINES, PHASES, engine_style, sweep_style
from plots.tables import read_tables


@pytest.fixture
def draw(tmp_path):
    def draw(name, sweep, **options):
        return FIGURES[name].draw(read_tables(sweep.write(tmp_path / "tables", **options)))

    return draw


def watermarks(figure):
    found = [t for ax in figure.axes for t in ax.texts if t.get_gid() == "watermark"]
    return [text.get_text() for text in found]


def both(sweep, source):
    for engine, of in (("vanilla", "measured"), ("hybrid", source)):
        for dp in (1, 2):
            sweep.add(engine, 2 if engine == "hybrid" else 0, model="7B", dp=dp, source=of)
        sweep.add(engine, 2 if engine == "hybrid" else 0, model="13B", source=of)


def test_tables_without_a_source_are_measured(draw, sweep):
    both(sweep, "measured")
    for row in sweep.iterations:
        del row["source"]
    figure = draw("data-parallel", sweep, without=("source",))
    assert watermarks(figure) == []
    assert figure.get_supxlabel().endswith("measured · cuda NVIDIA H100")


@pytest.mark.parametrize(
    ("name", "panels"),
    [("data-parallel", 2), ("models", 3), ("update-rates", 3), ("loss", 3),
     ("iteration-breakdown", 3)],
)  # fmt: skip
def test_simulated_values_are_watermarked_and_said_below(draw, sweep, name, panels):
    both(sweep, "simulated")
    figure = draw(name, sweep)
    assert watermarks(figure) == ["simulated"] * panels
    note = " ".join(figure.get_supxlabel().split())
    assert "measured · cuda NVIDIA H100 · simulated" in note


def test_a_panel_that_shows_nothing_simulated_has_no_watermark(draw, sweep):
    sweep.grid(model=["7B"], dp=[1, 2])
    sweep.grid(engines=[("vanilla", 0)], model=["13B"], dp=[1, 2])
    for run in sweep.runs[-2:]:
        run["source"] = "simulated"
    axes = draw("data-parallel", sweep).axes
    marked = [any(t.get_gid() == "watermark" for t in ax.texts) for ax in axes]
    assert marked == [False, False, True, True]


def test_published_values_have_hollow_markers(draw, sweep):
    both(sweep, "published")
    ax = draw("data-parallel", sweep).axes[0]
    faces = {c.lines[0].get_color(): c.lines[0].get_markerfacecolor() for c in ax.containers}
    assert faces == {
        ENGINES["vanilla"].colour: ENGINES["vanilla"].colour, ENGINES["hybrid"].colour: "white",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["models", "update-rates", "iteration-breakdown"])
def test_published_bars_are_hollow(draw, sweep, name):
    both(sweep, "published")
    figure = draw(name, sweep)
    white = (1.0, 1.0, 1.0, 1.0)
    faces = {p.get_facecolor() == white for ax in figure.axes for p in ax.patches if p.get_hatch()}
    assert True in faces
    assert {p.get_facecolor() == white for ax in figure.axes for p in ax.patches} == {True, False}
    assert watermarks(figure) == []


def test_a_source_is_in_the_legend_unless_measured(draw, sweep):
    both(sweep, "published")
    (legend,) = draw("data-parallel", sweep).legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "ZeRO-3 offload (vanilla)", "hybrid (stride 2), published",
    ]  # fmt: skip


def test_engines_differ_in_more_than_colour():
    for attribute in ("colour", "marker", "hatch"):
        for style in (engine_style, sweep_style):
            assert len({getattr(style(engine), attribute) for engine in ENGINES}) == len(ENGINES)
    assert len({style.hatch for style in PHASES.values() if style.colour != "#FFFFFF"}) == 3


def test_strides_of_the_hybrid_differ_in_marker_and_hatch_and_share_their_colour():
    styles = [sweep_style("hybrid", variant) for variant in range(7)]
    assert len({style.marker for style in styles}) == 7
    assert len({style.hatch for style in styles}) == 7
    assert len({style.colour for style in styles}) == 1
