"""Runs over links of different rates: told apart, named, and never held against each other."""

import pytest
from programs import report

from configs.fields import shaped_links

LOSSES = tuple(9.0 - 0.1 * i for i in range(8))
SECONDS = tuple(0.4 + 0.001 * (i % 4) for i in range(8))
NO_LINKS = "links as they are"


def write(writer, **links):
    """A run of each engine over links of a rate; None for a run of before there were links."""
    strides = {"vanilla": 0, "hybrid": 2}
    runs = []
    for engine, mbit in links.items():
        point = {} if mbit is None else {"link_mbit": mbit}
        runs.append(
            (engine, strides[engine], {"losses": LOSSES, "seconds": SECONDS, "point": point})
        )
    return writer.write_runs(runs)


def reported(folder):
    report([str(folder)])
    return (folder / "report.md").read_text()


@pytest.mark.parametrize(
    ("vanilla", "hybrid", "compared"),
    [(20, 20, True), (0, 0, True), (0, 20, False), (20, 50, False),
     (None, 20, False)],
)  # fmt: skip
def test_only_runs_over_the_same_links_are_held_against_each_other(
    sweep_writer, vanilla, hybrid, compared
):
    text = reported(write(sweep_writer, vanilla=vanilla, hybrid=hybrid))
    assert ("no vanilla run of this point" not in text) == compared


def test_a_report_says_that_links_were_shaped(sweep_writer):
    text = reported(write(sweep_writer, vanilla=20, hybrid=20))
    assert "In ms, measured on a CPU, 20 Mbit/s links, shaped: median" in text
    assert "| links | 20 Mbit/s links, shaped: what each rank sends, and what it receives |" in text
    sweep_writer.folder = sweep_writer.folder.with_name("another")
    both = reported(write(sweep_writer, vanilla=0, hybrid=50))
    assert f"measured on a CPU, 50 Mbit/s links, shaped, and {NO_LINKS}" in both
    assert "| tiny link 50 Mbit/s hybrid stride 2 |" in both
    assert f"| tiny {NO_LINKS} vanilla |" in both


def test_a_report_of_links_as_they_are_says_nothing_of_links(sweep_writer):
    assert "links" not in reported(write(sweep_writer, vanilla=0, hybrid=0))


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ([], ""),
        ([0, None, float("nan"), ""], ""),
        ([20], "20 Mbit/s links, shaped"),
        ([100, 20, 20], "20, 100 Mbit/s links, shaped"),
        ([20.0, None], f"20 Mbit/s links, shaped, and {NO_LINKS}"),
    ],
)
def test_words_of_links(rates, words):
    assert shaped_links(rates) == words
