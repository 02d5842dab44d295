"""The bound of an iteration on the emulated device, and the table of predicted ones."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import iteration
from benchmarks.iteration import Rates
from benchmarks.predicted_iterations import CASES, WAYS, rows, table
from deep_optimizer_states import state_reader

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


@pytest.mark.parametrize("digests", ["aa", "ab"])
def test_times_count_only_where_every_way_ends_with_the_same_bits(monkeypatch, digests):
    ends = iter(digests)
    monkeypatch.setattr(state_reader, "read_state", lambda _engine: [])
    monkeypatch.setattr(state_reader, "digest", lambda _tensors: next(ends))
    engine = SimpleNamespace(destroy=lambda: None)
    monkeypatch.setattr(iteration, "make_engine", lambda *_given: engine)
    monkeypatch.setattr(iteration, "time_computing", lambda *_given: 1.0)
    monkeypatch.setattr(
        iteration, "time_iterations", lambda _engine, _width, number: [2.0] * number
    )
    ways = [("all-host", "after the norm"), ("all-host", "both")]
    found = iteration.run(ways, (2, 4), RATES, 3, lambda _line: None)
    assert found["equal"] is (digests == "aa")
    assert [way["median_s"] for way in found["ways"]] == [2.0, 2.0]
    last = "Same bits everywhere." if found["equal"] else "THE BITS DIFFER: no time counts."
    assert iteration.as_text(found).splitlines()[-1] == last


def test_the_table_in_docs_is_what_the_command_prints():
    assert table() in DOCUMENT.read_text()


def test_every_way_of_work_in_backward_is_nearer_to_the_bound():
    for row in rows(CASES[:2]):
        shares = [int(cell.split(", ")[1].rstrip("%")) for cell in row[4 : 3 + len(WAYS)]]
        assert shares == sorted(shares)
        assert shares[0] < shares[-1] <= 100
