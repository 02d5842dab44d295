"""After a failure, an interruption or a broken load: nothing wrong is saved, trained on or kept."""

import json
from pathlib import Path

import pytest
from ranks import run_ranks

WORKER = Path(__file__).with_name("safety_worker.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
FAILURES = [
    f"{fault}, {way}"
    for fault in ("CPU lane", "GPU lane", "wrong bit")
    for way in ("just in time", "waited for")
]
CALLS = [
    *("step", "forward", "save", "state_dict", "masters", "moments", "weights", "offload"),
    "weights alone",
]


def run(ranks, folder):
    run_ranks(WORKER, folder / "out.json", folder, num_ranks=ranks)
    return [json.loads(path.read_text()) for path in sorted(folder.glob("out*.json"))]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return run(1, tmp_path_factory.mktemp("safety"))[0]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_update_is_neither_trained_on_nor_saved_until_a_checkpoint_is_loaded(
    report, failure
):
    found = report["failures"][failure]
    words = {"wrong bit": "went wrong"}.get(failure.split(",")[0], "out of luck")
    assert words in found["failing step"]
    for call in CALLS:
        for answer in found[call]:
            assert answer.startswith("UpdateError"), (call, answer)
            assert words in answer
            assert "load_checkpoint" in answer
    assert found["missing"] == ["no error: (None, None)"] * 2
    assert found["latest"] == "good"
    assert found["loaded"] == "no error: True"
    assert found["differences"] == []
    assert found["saved after"] == "after"
    assert found["destroy"] == "no error: None"


def test_destroy_tells_of_a_failure_that_nobody_was_told_of_and_ends_every_thread(report):
    first, second = report["destroy"]["answers"]
    assert "out of luck" in first
    assert second == "no error: None"
    assert report["destroy"]["threads"] == []


def test_ctrl_c_while_state_is_waited_for_loses_nothing_of_the_update(report):
    found = report["interrupted wait"]
    assert found["state_dict"] == found["finish"] == "KeyboardInterrupt: "
    assert found["differences"] == found["differences of what was saved"] == []


def test_what_is_loaded_after_ctrl_c_is_not_written_over_by_the_old_update(report):
    found = report["interrupted, then loaded"]
    assert found == {"wait": "KeyboardInterrupt: ", "differences": []}


def test_ctrl_c_in_a_step_comes_when_the_step_is_whole(report):
    found = report["interrupted step"]
    assert found == {"step": "KeyboardInterrupt: ", "steps": 2, "differences": []}


def test_what_is_half_loaded_is_not_saved(report):
    found = report["loading cut short"]
    assert found["load"].startswith("ZeroDivisionError")
    assert "loading a checkpoint was cut short by ZeroDivisionError" in found["save"]
    assert found["again"] == "no error: True"
    assert found["at home"]
    assert found["differences"] == []


@pytest.mark.parametrize("policy", ["stride 2", "all-device", "dynamic"])
def test_gradients_stay_on_the_device_where_there_is_room(report, policy):
    found = report["gradients on the device"][policy]
    assert found["kept"] == found["movable"] > 0
    assert found["differences"] == []


def test_gradients_go_home_where_there_is_no_room(report):
    assert 0 < report["gradients on the device"]["no room"] < 7


def test_nothing_waits_for_the_whole_device_while_tiles_are_in_flight(tmp_path):
    """Beside it what stock does: its timer in every step, its gather after it."""
    for found in run(2, tmp_path):
        assert found["ours"] == []
        assert {"start", "stop"} <= set(found["stock timer"])
        assert any("allgather" in name for name in found["stock gather"])
