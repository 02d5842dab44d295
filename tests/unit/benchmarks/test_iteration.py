"""The bound of an iteration on the emulated device, and the table of predicted ones."""

from pathlib import Path

import pytest

from benchmarks.iteration import Rates
from benchmarks.predicted_iterations import CASES, WAYS, rows, table

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "prediction.md"
RATES = Rates(link_bytes_per_s=100.0, host_parameters_per_s=10.0, device_parameters_per_s=1e9)


def test_a_bound_of_computing_needs_no_device():
    assert RATES.bound_s(100, computing_s=50.0) == (50.0, 0.0)


def test_a_bound_of_lanes_gives_both_as_much_as_they_do_in_the_same_time():
    # The CPU takes 10 (1 - x), the link to the device 14 x + 2 (1 - x), for 100 parameters.
    seconds, share = RATES.bound_s(100, computing_s=0.0)
    assert share == pytest.approx(8 / 22, abs=0.005)
    assert seconds == pytest.approx(10 * (1 - 8 / 22), rel=0.01)


def test_gradients_alone_bind_a_link_that_is_slow_enough():
    slow = Rates(link_bytes_per_s=1.0, host_parameters_per_s=1e9)
    assert slow.bound_s(100, computing_s=0.0) == (200.0, 0.0)


def test_the_table_in_docs_is_what_the_command_prints():
    assert table() in DOCUMENT.read_text()


def test_every_way_of_work_in_backward_is_nearer_to_the_bound():
    for row in rows(CASES[:2]):
        shares = [int(cell.split(", ")[1].rstrip("%")) for cell in row[4 : 3 + len(WAYS)]]
        assert shares == sorted(shares)
        assert shares[0] < shares[-1] <= 100
