"""Runs over links of different rates: told apart, named, and never held against each other."""

import csv
import json

import pytest

from configs.fields import shaped_links
from parse.__main__ import main as parse
from parse.report.__main__ import main as report
from parse.run_folder import read_sweep

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


def without_the_column(path, name):
    """Turn a table into one of a parser that did not know the column."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(
            file, [key for key in rows[0] if key != name], extrasaction="ignore"
        )
        writer.writeheader()
        writer.writerows(rows)


def reported(folder):
    report([str(folder)])
    return (folder / "report.md").read_text()


@pytest.mark.parametrize(
    ("vanilla", "hybrid", "compared"),
    [(20, 20, True), (0, 0, True), (0, 20, False), (20, 50, False), (None, 0, True),
     (0, None, True), (None, 20, False)],
)  # fmt: skip
def test_only_runs_over_the_same_links_are_held_against_each_other(
    sweep_writer, vanilla, hybrid, compared
):
    text = reported(write(sweep_writer, vanilla=vanilla, hybrid=hybrid))
    assert ("no vanilla run of this point" not in text) == compared


def test_a_report_says_that_links_were_shaped(sweep_writer):
    text = reported(write(sweep_writer, vanilla=20, hybrid=20))
    assert "in ms, measured on a CPU, 20 Mbit/s links, shaped, without" in text
    assert "| links | 20 Mbit/s links, shaped: what each rank sends, and what it receives |" in text
    sweep_writer.folder = sweep_writer.folder.with_name("another")
    both = reported(write(sweep_writer, vanilla=0, hybrid=50))
    assert f"measured on a CPU, 50 Mbit/s links, shaped, and {NO_LINKS}" in both
    assert "| tiny, link 50 Mbit/s | hybrid stride 2 |" in both
    assert f"| tiny, {NO_LINKS} | vanilla |" in both


def test_a_report_of_links_as_they_are_says_nothing_of_links(sweep_writer):
    assert "links" not in reported(write(sweep_writer, vanilla=0, hybrid=None))


def test_a_baseline_of_before_there_were_links_is_of_links_as_they_are(
    sweep_writer, tmp_path, capsys
):
    folders = []
    for name, mbit in (("old", None), ("same", 0), ("slow", 20)):
        sweep_writer.folder = tmp_path / name
        write(sweep_writer, vanilla=mbit)
        folders.append(str(tmp_path / name))
        parse([folders[-1], "--out", str(tmp_path / f"{name}-tables")])
    capsys.readouterr()

    def words(old, new):
        parse(["compare", old, new, "--json"])
        out = capsys.readouterr().out  # nothing where the two have no point in common
        return [point["word"] for point in json.loads(out)["points"]] if out else []

    assert words(folders[0], folders[1]) == ["same"]
    assert words(folders[0], folders[2]) == []
    tables = [f"{folder}-tables" for folder in folders]
    without_the_column(tmp_path / "old-tables" / "runs.csv", "link_mbit")
    assert words(tables[0], tables[1]) == ["same"]
    assert words(tables[0], tables[2]) == []


def test_an_older_run_reads_as_one_over_links_as_they_are(sweep_writer):
    (run,) = read_sweep(write(sweep_writer, vanilla=None))
    assert run.settings["link_mbit"] == run.fields["link_mbit"] == 0


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
