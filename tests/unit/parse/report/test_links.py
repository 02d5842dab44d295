"""Runs over links of different rates: told apart, named, and never held against each other."""

import csv

import pytest
from programs import report

from configs.fields import shaped_links

LOSSES = tuple(9.0 - 0.1 * i for i in range(8))
SECONDS = tuple(0.4 + 0.001 * (i % 4) for i in range(8))
NO_LINKS = "links as they are"


def reported(writer, reference, other):
    """Report a run of each engine over links of a rate, with a figure."""
    runs = [
        (engine, stride, {"losses": LOSSES, "seconds": SECONDS, "point": {"link_mbit": mbit}})
        for engine, stride, mbit in (("stock", 0, reference), ("stride", 2, other))
    ]
    folder = writer.write_runs(runs)
    (folder / "figures").mkdir()
    (folder / "figures" / "loss.png").write_bytes(b"not a real image")
    report([str(folder)])
    return (folder / "report.md").read_text()


@pytest.mark.parametrize(
    ("reference", "other", "compared"),
    [(20, 20, True), (0, 0, True), (0, 20, False), (20, 50, False)],
)
def test_only_runs_over_the_same_links_are_held_against_each_other(
    sweep_writer, reference, other, compared
):
    text = reported(sweep_writer, reference, other)
    assert ("no stock run of this point" not in text) == compared
    assert ("links" in text) == bool(reference or other)


def test_report_and_table_say_that_links_were_shaped(sweep_writer):
    text = reported(sweep_writer, 20, 20)
    assert "In ms, measured on a CPU, 20 Mbit/s links, shaped: median" in text
    assert ", measured on a CPU, 20 Mbit/s links, shaped](./figures/loss.png)" in text
    assert "| links | 20 Mbit/s links, shaped: what each rank sends, and what it receives |" in text
    with (sweep_writer.folder / "tables" / "runs.csv").open(newline="") as file:
        assert {row["link_mbit"] for row in csv.DictReader(file)} == {"20"}


def test_a_report_of_both_says_which_run_is_which(sweep_writer):
    text = reported(sweep_writer, 0, 50)
    assert f"measured on a CPU, 50 Mbit/s links, shaped, and {NO_LINKS}" in text
    assert "| tiny link 50 Mbit/s stride 2 |" in text
    assert f"| tiny {NO_LINKS} stock |" in text


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ([], ""),
        ([0, None, float("nan"), ""], ""),
        ([100, 20, 20], "20, 100 Mbit/s links, shaped"),
        ([20.0, None], f"20 Mbit/s links, shaped, and {NO_LINKS}"),
    ],
)
def test_words_of_links(rates, words):
    assert shaped_links(rates) == words
