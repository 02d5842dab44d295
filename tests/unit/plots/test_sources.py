import pytest

from configs.study import default_study, study_from
from plots.style import Looks

ENGINES = {name: row.style for name, row in default_study().engines.items()}
PHASES = default_study().phases


def watermarks(figure):
    found = [t for ax in figure.axes for t in ax.texts if t.get_gid() == "watermark"]
    return [text.get_text() for text in found]


def both(sweep, source):
    for engine, of in (("stock", "measured"), ("stride", source)):
        for dp in (1, 2):
            sweep.add(engine, 2 if engine == "stride" else 0, model="7B", dp=dp, source=of)
        sweep.add(engine, 2 if engine == "stride" else 0, model="13B", source=of)


def test_values_over_shaped_links_are_said_to_be_so(draw, sweep):
    sweep.grid(dp=[1, 2], link_mbit=[20, 50])
    note = " ".join(draw("data-parallel", sweep).get_supxlabel().split())
    assert note.endswith("measured · cuda NVIDIA H100, 20, 50 Mbit/s links, shaped")


@pytest.mark.parametrize(
    ("name", "panels"),
    [("data-parallel", 2), ("models", 9), ("loss", 3),
     ("iteration-breakdown", 3)],
)  # fmt: skip
def test_simulated_values_are_watermarked_and_said_below(draw, sweep, name, panels):
    both(sweep, "simulated")
    figure = draw(name, sweep)
    assert watermarks(figure) == ["simulated"] * panels
    marks = [t for ax in figure.axes for t in ax.texts if t.get_gid() == "watermark"]
    assert all(mark.get_zorder() < 1 for mark in marks), "behind the data"
    note = " ".join(figure.get_supxlabel().split())
    assert "measured · cuda NVIDIA H100 · simulated" in note


def test_a_panel_that_shows_nothing_simulated_has_no_watermark(draw, sweep):
    sweep.grid(model=["7B"], dp=[1, 2])
    sweep.grid(engines=[("stock", 0)], model=["13B"], dp=[1, 2])
    for run in sweep.runs[-2:]:
        run["source"] = "simulated"
    axes = draw("data-parallel", sweep).axes
    marked = [any(t.get_gid() == "watermark" for t in ax.texts) for ax in axes]
    assert marked == [False, False, True, True]


def looks(engines, **fields):
    """Looks of engines, or of one engine with several values of a field."""
    rows = [{"engine": engine} for engine in engines]
    for name, values in fields.items():
        rows = [{**row, name: value} for row in rows for value in values]
    made = Looks(default_study(), rows)
    return [made.of(row) for row in rows]


def test_engines_differ_in_more_than_colour():
    found = looks(ENGINES)
    assert len(found) >= 7
    for attribute in ("colour", "marker", "hatch"):
        for styles in ([look.style for look in found], [look.alone for look in found]):
            assert len({getattr(style, attribute) for style in styles}) == len(ENGINES)
    assert len({phase.hatch for phase in PHASES.values()}) == 3


def test_a_variant_never_takes_the_marker_of_another_engine_that_is_shown():
    rows = [{"engine": engine} for engine in ENGINES]
    rows += [{"engine": "stride", "stride": stride} for stride in (2, 3, 4)]
    made = Looks(default_study(), rows)
    for attribute in ("marker", "hatch"):
        assert len({getattr(made.of(row).alone, attribute) for row in rows}) == len(rows)


@pytest.mark.parametrize("count", [2, 12])
def test_engines_whose_rows_leave_their_style_open_stay_apart_on_grey_paper(count):
    rows = {f"engine-{n}": {"title": f"engine {n}"} for n in range(count)}
    table = {"name": "s", "title": "s", "reference": "engine-1", "engines": rows}
    fields = [{"engine": name} for name in rows]
    made = Looks(study_from(table, "s"), fields)
    styles = [made.of(row).style for row in fields]
    for attribute in ("colour", "marker", "hatch"):
        assert len({getattr(style, attribute) for style in styles}) == count
    widths = [style.width for style in styles]
    assert widths.index(max(widths)) == 1, "the reference shows through the others"
    sizes = [made.of(row).alone.marker_size for row in fields]
    assert sizes.index(max(sizes)) == 1
