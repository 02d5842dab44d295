"""Work in backward: what comes between backward and ``step()`` ends in stock's bits or an error."""

import json
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

WORKER = Path(__file__).with_name("ahead_worker.py")
RANKS = [
    n for n in (1, 2) if n == 1 or not torch.cuda.is_available() or torch.cuda.device_count() > 1
]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SAID = {
    "overflow": "a gradient is not finite",
    "another rate": "lr changed from 0.01 to 0.5",
    "rate in place": "lr changed from 0.009",
    "clipping at last": "gradients are to be multiplied by 0.0003",
    "two backwards": "weights were gathered that backward has updated",
    "another forward": "weights were gathered that backward has updated",
    "hidden use": "weights were gathered that backward has updated",
    "gradient again": "a gradient came after backward had updated its parameter",
    "interrupted": "KeyboardInterrupt",
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """``[ranks][rank]`` -> report of that rank."""
    return {ranks: run(ranks, tmp_path_factory.mktemp(f"ranks{ranks}")) for ranks in RANKS}


def run(ranks, folder):
    run_ranks(WORKER, folder / "out.json", folder, num_ranks=ranks)
    return [json.loads((folder / f"out.{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def report(reports):
    return reports[1][0]


@pytest.mark.parametrize("mishap", SAID)
def test_what_no_step_can_make_good_is_said_and_nothing_wrong_is_saved(report, mishap):
    found = report["mishaps"][mishap]
    assert found["given"] > 0, "nothing was handed over before the norm"
    assert SAID[mishap] in found["said"]
    if mishap != "interrupted":
        assert "step_before_norm" in found["said"]
    for refused in [*found["save"], found["state"]]:
        assert refused.startswith("UpdateError")
    assert found["latest"] == "good"


@pytest.mark.parametrize("mishap", SAID)
def test_after_it_a_checkpoint_makes_everything_good(report, mishap):
    found = report["mishaps"][mishap]
    assert found["loaded"] == "no error: True"
    assert found["differences"] == []
    assert found["given again"] > 0


def test_nothing_is_left_of_the_window_then(report):
    mishaps = report["mishaps"].values()
    for what in ("norms", "parameters in buckets", "backwards under way", "micro-steps"):
        assert any(found["left"][what] for found in mishaps), what
    for found in mishaps:
        assert set(found["left then"].values()) == {0}


def test_state_cannot_be_looked_at_in_between_and_the_step_is_whole_all_the_same(report):
    """Nor is a part of it loaded: weights alone, or anything else than the optimizer's state."""
    found = report["looked at"]
    assert len(found["said"]) == 14
    assert all("between backward and engine.step()" in said for said in found["said"])
    assert found["latest"] == "good"
    assert found["differences"] == []


@pytest.mark.parametrize("name", ["clip_grad", "loss_scale"])
def test_a_factor_set_after_a_step_is_refused_before_anything_is_updated(report, name):
    found = report["factors"][name]
    for said in found["said"]:
        assert said.startswith(f"ConfigError: engine.optimizer.{name} = 0.5")
        assert 'step_before_norm" to false' in said
    assert found["begun"] == [False, 0]
    assert set(found["left"].values()) == {0}
    assert found["given"] > 0
    assert found["differences"] == []


@pytest.mark.parametrize("ranks", RANKS)
def test_a_parameter_that_gets_several_gradients_in_a_backward_is_updated_once(reports, ranks):
    for of_rank in reports[ranks]:
        found = of_rank["used again"]
        assert len(found) == 14
        assert {name: differ for name, (_, differ) in found.items() if differ} == {}
        assert all(early for early, _ in found.values()), "nothing was handed over before the norm"


def test_a_checkpoint_loaded_in_between_is_not_written_over(report):
    assert report["loaded between"] == {"begun": True, "differences": []}


def test_a_weight_is_updated_only_when_backward_has_released_it(report):
    assert report["detached"]["given"] > 0
    assert report["detached"]["differences"] == []


def test_a_tile_waits_for_the_gradients_of_all_its_parameters(report):
    assert report["shared tiles"]["given"] > 0
    assert report["shared tiles"]["differences"] == []


def test_nothing_is_sent_ahead_until_it_is_settled_which_gradients_stay_on_the_device(report):
    """What is ahead would count as memory that the model needs."""
    first = {name: report["ahead"][name]["first"] for name in ("fixed", "gradients kept")}
    assert first["fixed"][:2] == [0, 0]
    assert first["fixed"][2] > 0
    assert first["gradients kept"] == [0, 0, 0]


def test_an_engine_destroyed_in_between_leaves_no_thread(report):
    destroyed = {"begun": True, "destroy": "no error: None", "threads": []}
    assert report["destroyed between"] == destroyed


@pytest.mark.parametrize(
    "way",
    [
        *("fixed", "auto", "none", "gradients kept", "written", "evaluated", "out of memory"),
        *("short", "little"),
    ],
)
def test_state_sent_ahead_gives_the_bits_of_stock(report, way):
    assert report["ahead"][way]["differences"] == []


def test_state_is_sent_ahead_as_far_as_memory_goes(report):
    found = report["ahead"]
    (most,) = set(found["auto"]["ahead"])
    # 60,000 bytes take tiles of 256 elements and 14 bytes an element, and some smaller ones.
    assert all(16 <= number < most for number in found["fixed"]["ahead"])
    assert all(0 < number < 16 for number in found["little"]["ahead"])
    assert set(found["none"]["ahead"]) == {0}
    assert found["gradients kept"]["ahead"] == found["fixed"]["ahead"]


def test_state_is_not_sent_ahead_before_the_last_update_has_brought_it_home(report):
    assert report["late flushes"]["differences"] == []


@pytest.mark.parametrize("way", ["written", "evaluated"])
def test_state_sent_ahead_is_dropped_where_it_may_be_written_or_a_forward_comes_first(report, way):
    found = report["ahead"][way]
    assert all(found["waiting"])
    assert not any(found["ahead"])


@pytest.mark.parametrize("way", ["out of memory", "short"])
def test_memory_that_runs_out_is_given_back_and_training_goes_on(report, way):
    numbers = report["ahead"][way]["ahead"]
    assert max(numbers) > 0
    assert min(numbers) < max(report["ahead"]["auto"]["ahead"])
