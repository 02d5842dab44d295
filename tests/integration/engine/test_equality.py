"""Bitwise equality with stock DeepSpeed: losses, norms, master weights, moments, 16-bit weights.

`docs/equality.csv` holds the table of the full set of runs, which `make equality` makes and writes.
The tests make a part of them and check that the table says the same.
"""

import collections
import os

import deepspeed
import pytest
import torch
from equality_table import cells_of, read, write

from deep_optimizer_states.adapter.guard import NEWEST

FULL = "EQUALITY_FULL" in os.environ
ON_CUDA = torch.cuda.is_available()
RANKS = [n for n in (1, 2, 4) if not ON_CUDA or n <= torch.cuda.device_count()]
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
"""Work in backward, in a row of its own of a few tests and in each row of the full set."""
NUM_FEATURES = 100
NUM_POLICIES = 8
IN_TURN = {"few": {1: 107, 2: 18}, "all": {1: 631, 2: 621, 4: 621}}
"""Features under their policies. In the extent ``few`` each has its turn of one policy on one rank,
and one in ten on two; the first has all. One feature and one model are beyond stock itself on more
than one rank, under ten policies together."""
DURING_BACKWARD = {"few": {1: 4, 2: 2}, "all": {1: 149, 2: 145, 4: 145}}
"""Features under the two of `IN_BACKWARD`: the first one alone, on one rank that of each stage, or
all. Those of stages 1 and 2 and of fp16 are under one of both."""
AT_ONCE = 2
"""Two engines in one process, each of another policy."""
RESUMES = {
    # A ring through stock and all policies, and through three of them.
    "few": {1: 1 + NUM_POLICIES, 2: 3},
    # Every pair but stock with itself.
    "all": dict.fromkeys((1, 2, 4), (1 + NUM_POLICIES) ** 2 - 1),
}


def test_nothing_was_left_out(reports):
    if deepspeed.__version__ == NEWEST:
        assert [of_rank[0]["left_out"] for of_rank in reports.values()] == [{}] * len(reports)
    made = {
        ranks: len(of_rank[0]["comparisons"]) + sum(of_rank[0]["left_out"].values())
        for ranks, of_rank in reports.items()
    }
    parts = (IN_TURN[EXTENT], DURING_BACKWARD[EXTENT], RESUMES[EXTENT])
    expected = {n: AT_ONCE + sum(part[n] for part in parts) for n in parts[0] if n in RANKS}
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
    assert len(features[1]) == NUM_FEATURES
    assert min(len(found) for found in features.values()) >= NUM_FEATURES // 10
    assert {len(ways) for ways in used.values()} == {NUM_POLICIES + len(IN_BACKWARD)}
    together = sum(used.values(), collections.Counter())
    assert min(number for way, number in together.items() if way not in IN_BACKWARD) >= 6
    for ranks in used:
        stages = {columns["stage"] for columns in reports[ranks][0]["columns"].values()}
        assert stages == {"1", "2", "3"}


@pytest.mark.skipif(ON_CUDA, reason="the table in docs is of the emulated device")
def test_the_table_in_docs_says_what_the_runs_gave(reports):
    cells = cells_of(reports)
    if FULL:
        write(cells)
    documented = read()
    for place, cell in cells.items():
        assert set(cell.split()) <= set(documented[place].split()), place
    if FULL:
        assert documented == cells
