"""Bitwise equality with stock DeepSpeed: losses, norms, master weights, moments, 16-bit weights.

`docs/equality.md` holds the table of the full set of runs, which `make equality` makes and writes.
The tests make a part of them and check that the table says the same.
"""

import collections
import os
from pathlib import Path

import deepspeed
import pytest
import torch

from deep_optimizer_states.adapter.guard import NEWEST

TABLE = Path(__file__).resolve().parents[3] / "docs" / "equality.md"
FULL = "EQUALITY_FULL" in os.environ
ON_CUDA = torch.cuda.is_available()
RANKS = [n for n in (1, 2, 4) if not ON_CUDA or n <= torch.cuda.device_count()]
COLUMNS = ["stage", "parameters", "states"]
"""Columns of the table that describe a feature."""
EXTENT = "all" if FULL else "few"
"""Share of the runs that is made; four ranks are of the full set."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200 if FULL else 3000)]


@pytest.fixture(scope="module")
def reports(run_rows):
    """``[ranks][rank]`` -> report of that rank, whose ``comparisons`` say what differs."""
    numbers = [ranks for ranks in RANKS if ranks <= 2 or FULL]
    return {n: [of["equality"] for of in run_rows("equality", EXTENT, n)] for n in numbers}


def test_every_feature_under_every_policy_equals_stock(reports):
    different = {
        f"{key}, rank {rank} of {ranks}": found
        for ranks, of_ranks in reports.items()
        for rank, report in enumerate(of_ranks)
        for key, found in report["comparisons"].items()
        if found
    }
    assert different == {}


IN_BACKWARD = ["dynamic, prefetched", "stride 2, before the norm"]
"""Work in backward, in a row of its own of a few tests and in each ZeRO-3 row of the full set."""
NUM_FEATURES = 100
NUM_COMPARISONS = {
    # Features under the policies of their extent, and in backward; two engines at once; resumes.
    "few": {1: 58 + 2 + 2 + 9, 2: 57 + 2 + 2 + 3},
    # One feature and one model are beyond stock itself on more than one rank.
    "all": {1: 631 + 108 + 2 + 80, 2: 621 + 104 + 2 + 80, 4: 621 + 104 + 2 + 80},
}


def test_nothing_was_left_out(reports):
    if deepspeed.__version__ == NEWEST:
        assert [of_rank[0]["left_out"] for of_rank in reports.values()] == [{}] * len(reports)
    made = {
        ranks: len(of_rank[0]["comparisons"]) + sum(of_rank[0]["left_out"].values())
        for ranks, of_rank in reports.items()
    }
    expected = {n: num for n, num in NUM_COMPARISONS[EXTENT].items() if n in RANKS}
    assert made == expected
    refused = [report["refused"] for of_rank in reports.values() for report in of_rank]
    assert not any(refused)


def test_every_feature_stage_and_policy_is_run(reports):
    """Whatever is left out, no feature and no policy is seen less than this."""
    features, used = {}, {}
    for ranks in {1, 2} & reports.keys():
        report = reports[ranks][0]
        places = [key.split(" | ") for key in report["comparisons"] if " | " in key]
        found = {feature for feature, _ in places} - {"resume", "two engines at once"}
        features[ranks] = found | report["left_out"].keys()
        used[ranks] = collections.Counter(way for _, way in places if " to " not in way)
    assert len(set().union(*features.values())) == NUM_FEATURES
    assert min(len(found) for found in features.values()) >= NUM_FEATURES // 2
    assert [len(ways) for ways in used.values()] == [8 + len(IN_BACKWARD)] * len(used)
    together = sum(used.values(), collections.Counter())
    assert min(number for way, number in together.items() if way not in IN_BACKWARD) >= 6
    for ranks in used:
        stages = {columns["stage"] for columns in reports[ranks][0]["columns"].values()}
        assert stages == {"1", "2", "3"}


@pytest.mark.skipif(ON_CUDA, reason="the table in docs is of the emulated device")
def test_the_table_in_docs_says_what_the_runs_gave(reports):
    cells = _cells(reports)
    if FULL:
        TABLE.write_text(_table(cells))
    documented = _read_table(TABLE.read_text())
    for place, ranks in cells.items():
        assert set(ranks) <= set(documented[place]), place
    if FULL:
        assert documented == cells


def _cells(reports):
    """``(feature, policy)`` or ``("resume", way)`` -> the numbers of ranks that were equal."""
    cells = {}
    for ranks, of_rank in reports.items():
        for key in of_rank[0]["comparisons"]:
            found = any(report["comparisons"][key] for report in of_rank)
            feature, _, policy = key.partition(" | ")
            text = f"**{ranks}: differs**" if found else str(ranks)
            cells.setdefault((feature, policy), []).append(text)
        for feature, columns in of_rank[0]["columns"].items():
            cells |= {(feature, name): [text] for name, text in columns.items()}
    return cells


def _table(cells):
    ways = [policy for feature, policy in cells if feature == "resume"]
    engines = list(dict.fromkeys(way.partition(" to ")[0] for way in ways))
    features = list(dict.fromkeys(feature for feature, _ in cells if feature != "resume"))
    columns = dict.fromkeys(COLUMNS)
    columns |= dict.fromkeys(column for feature, column in cells if feature != "resume")
    return "\n".join(
        [
            "# What equals stock DeepSpeed, bit for bit",
            "",
            "Written by `make equality`, on the emulated device. A number is a number of ranks on",
            "which losses, gradient norms, master weights, moments and 16-bit weights were all",
            "bitwise equal to stock offload; an empty cell was not run. `make test` repeats a part",
            "of it. `safe_set_full_fp32_param` and experts that are no leaf modules fail in stock",
            "itself on more ranks. Models are `transformers`' classes, made small. First columns:",
            "ZeRO's stage, where 16-bit parameters live, the type of master weights and moments.",
            "The two last columns work in backward; the very last is without clipping on both",
            "sides, and not for fp16. [Other DeepSpeed releases](compatibility.md).",
            "",
            *_rows("feature", features, columns, lambda row, column: cells.get((row, column))),
            "",
            "Saved by the engine of the row, loaded and trained on by the engine of the column:",
            "equal to stock that loads stock's, which is the reference and has no cell.",
            "",
            *_rows(
                "saved by",
                engines,
                engines,
                lambda row, column: cells.get(("resume", f"{row} to {column}")),
            ),
            "",
        ]
    )


def _rows(corner, rows, columns, cell):
    yield f"| {corner} | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for row in rows:
        texts = (", ".join(cell(row, column) or []) for column in columns)
        yield f"| {row} | {' | '.join(texts)} |"


def _read_table(text):
    cells, columns, is_resume = {}, [], False
    for line in text.splitlines():
        if not line.startswith("| "):
            continue
        head, *row = (part.strip() for part in line.strip("|").split("|"))
        if head in ("feature", "saved by"):
            columns, is_resume = row, head == "saved by"
            continue
        for column, cell in zip(columns, row, strict=True):
            place = ("resume", f"{head} to {column}") if is_resume else (head, column)
            if cell:
                cells[place] = cell.split(", ")
    return cells
