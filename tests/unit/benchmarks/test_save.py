"""The table of what a save costs; nothing is timed here."""

import pytest
import torch

from benchmarks.save import _digest, as_text
from benchmarks.timing import Times


def row(cost, copied=0):
    seconds = {"iteration": 1.0, "call": 0.01, "cost": cost, "copied": copied, "waited for": 0}
    return {name: Times((value,)) for name, value in seconds.items()}


@pytest.mark.parametrize(("cost", "of_stock"), [(0.04, "2.0%"), (0.2, "10.0%")])
def test_shares_are_of_what_stock_loses_and_of_an_iteration(cost, of_stock):
    text = as_text({"stock": row(2.0), "background": row(cost, 2**21)}, 10**6, 5)
    said = "met" if cost == 0.04 else "missed"
    assert "1,000,000 parameters, a save every 5 iterations" in text
    assert "2 MiB copied" in text
    assert f"background loses {of_stock} of what stock loses; goal at most 5%: {said}" in text
    assert f"background loses {cost:.1%} of an iteration; goal at most 5%: {said}" in text


def test_what_the_disk_alone_takes_is_told_apart():
    rows = {"stock": row(2.0), "background": row(0.5), "disk": row(0.3)}
    text = as_text(rows, 10**6, 5)
    assert "the disk alone takes 15.0% of what stock loses; background loses 10.0% beyond" in text


def test_engines_that_saved_other_numbers_are_told(tmp_path):
    found = []
    for name, value in (("stock", 1.0), ("same", 1.0), ("other", 2.0)):
        (tmp_path / name / "saved").mkdir(parents=True)
        states = {"fp32_flat_groups": [torch.full((3,), value)]}
        path = tmp_path / name / "saved" / "rank_0_optim_states.pt"
        torch.save({"optimizer_state_dict": states}, path)
        found.append(_digest(tmp_path / name))
    assert found[0] == found[1] != found[2]
