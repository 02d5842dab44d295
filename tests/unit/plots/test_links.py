"""Figures of runs over links of several rates."""

import pytest

from configs.study import Figure, default_study
from plots.bars import draw_rates
from plots.lines import draw_swept
from plots.tables import read_tables

ROW = Figure(kind="swept", title="links", x="link_mbit", y=["iteration_ms"])


@pytest.fixture
def tables(sweep, tmp_path):
    for mbit in (0, 20, 100):
        for engine in ("vanilla", "async-gradients"):
            times = [{"iteration_ms": 900.0 - mbit}] * 4
            sweep.add(engine, link_mbit=mbit, label=f"{engine} {mbit}", times=times, device="cpu")
    return read_tables(sweep.write(tmp_path / "tables"), default_study())


def words(figure):
    figure.canvas.draw()
    texts = figure.findobj(lambda one: hasattr(one, "get_text"))
    return " ".join(" ".join(text.get_text().split()) for text in texts)


def test_links_as_they_are_have_no_place_on_the_axis(tables):
    (figure,) = draw_swept(tables, ROW)
    assert list(figure.axes[0].get_xticks()) == [20, 100]


def test_links_as_they_are_have_a_bar_of_their_own(tables):
    (figure,) = draw_rates(tables, ROW.model_copy(update={"kind": "rates"}))
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert sum("links as they are" in name for name in names) == 2
    assert sum("link 20 Mbit/s" in name for name in names) == 2


def test_a_figure_says_that_links_were_shaped(tables):
    (figure,) = draw_swept(tables, ROW)
    said = words(figure)
    assert "cpu NVIDIA H100, 20, 100 Mbit/s links, shaped" in said
    assert "links as they are" not in said
    (bars,) = draw_rates(tables, ROW.model_copy(update={"kind": "rates"}))
    assert "20, 100 Mbit/s links, shaped, and links as they are" in words(bars)


def test_tables_of_before_there_were_links_say_nothing_of_them(sweep, tmp_path):
    sweep.grid(micro_batch_size=[1, 2])
    old = read_tables(sweep.write(tmp_path / "tables"), default_study())
    assert "link" not in old.provenance()
