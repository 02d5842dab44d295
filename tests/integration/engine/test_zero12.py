"""ZeRO-1 and ZeRO-2 beside the table of equality: rules, failures, checkpoints, refusals."""

import json
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

WORKER = Path(__file__).with_name("zero12_worker.py")
ON_CUDA = torch.cuda.is_available()
RANKS = [n for n in (1, 2) if not ON_CUDA or n <= torch.cuda.device_count()]
FAULTS = {"CPU lane": "out of luck", "GPU lane": "out of luck", "wrong bit": "went wrong"}
CALLS = [
    *("step", "forward", "save", "state_dict", "masters", "moments", "reader", "offload"),
    "weights alone",
]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def run(ranks, folder):
    run_ranks(WORKER, folder / "out.json", folder, num_ranks=ranks)
    return [json.loads(path.read_text()) for path in sorted(folder.glob("out.*.json"))]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """``[ranks][rank]`` -> report of that rank."""
    return {ranks: run(ranks, tmp_path_factory.mktemp(f"ranks{ranks}")) for ranks in RANKS}


@pytest.fixture(scope="module")
def report(reports):
    return reports[1][0]


@pytest.mark.parametrize("ranks", RANKS)
def test_checkpoints_are_exchanged_with_stock_both_ways(reports, ranks):
    """Of each stage, also from before the first step; and universal ones."""
    for found in reports[ranks]:
        ways = {way: [] for way in ("stock to ours", "ours to stock", "ours to ours")}
        assert found["exchange"] == {stage: {"new": ways, "step3": ways} for stage in "12"}
        assert found["universal"] == ways


@pytest.mark.parametrize(
    "rule",
    [
        *("PREFETCHED", "STEPPED", "SLOT_FREE", "STAGING_FREE", "old gradients are scaled again"),
        *("new gradients owe nothing", "the tail is the group's", "steps are counted once"),
    ],
)
@pytest.mark.skipif(ON_CUDA, reason="waits are left out of the emulated device")
def test_without_a_rule_the_result_differs(report, rule):
    assert report["controls"][rule] != []
    assert report["controls"].get(f"{rule}, kept", []) == []


@pytest.mark.skipif(ON_CUDA, reason="the update is slow on the emulated device")
def test_without_waiting_in_step_ranks_gather_old_weights(reports):
    assert any(found["not waited for"] for found in reports[2])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_update_is_neither_trained_on_nor_saved_until_a_checkpoint_is_loaded(
    report, fault
):
    found = report["failures"][fault]
    for answer in [found["failing step"], *(answer for call in CALLS for answer in found[call])]:
        assert answer.startswith("UpdateError")
        assert FAULTS[fault] in answer
        assert "load_checkpoint" in answer
    assert (found["latest"], found["loaded"]) == ("good", "no error: True")
    assert found["differences"] == []
    assert found["destroy"] == "no error: None"


def test_ctrl_c_in_a_step_comes_when_the_step_is_whole(report):
    assert report["once"] == {"step": "KeyboardInterrupt: ", "steps": 2, "differences": []}


def test_a_second_ctrl_c_leaves_nothing_that_is_saved_or_trained_on(report):
    found = report["twice"]
    assert found["step"] == "KeyboardInterrupt: "
    assert found["in flight"]
    assert not found["hidden"]
    assert "engine.step() was cut short by KeyboardInterrupt()" in found["save"]
    assert (found["loaded"], found["differences"]) == ("no error: True", [])


def test_what_is_half_loaded_is_not_saved(report):
    found = report["loading cut short"]
    assert found["load"].startswith("ZeroDivisionError")
    assert "loading a checkpoint was cut short by ZeroDivisionError" in found["save"]
    assert (found["again"], found["at home"]) == ("no error: True", True)
    assert found["differences"] == []


def test_state_is_read_as_of_stock(report):
    assert report["reader"] == {"equal": True, "moments": 2}


def test_moments_of_every_group_can_be_asked_for_where_stock_has_those_of_the_first_alone(report):
    """The line of docs/settings.md that says so is about this."""
    stock, ours = (report["moments by parameter"][name] for name in ("stock", "ours"))
    assert ours["groups"] == stock["groups"]
    assert ours["accessor"][0] == stock["accessor"][0]
    for said in stock["accessor"][1]:
        assert said == "ValueError: exp_avg not found in optimizer state fragment"
    for answers, group in zip(ours["accessor"], ours["groups"], strict=True):
        found = [number for said in answers for number in json.loads(said.split(": ", 1)[1])]
        assert any(found)
        assert found == group[: len(found)]


def test_the_state_takes_16_host_bytes_a_parameter_where_stock_takes_18(report):
    assert report["host bytes"] == pytest.approx([16, 18], rel=0.001)


def test_pages_are_locked_unless_that_is_not_wanted_and_never_twice(report):
    assert report["locks pages"] == [[True, True, 0], [False, False, 0]]


@pytest.mark.parametrize(
    ("request_for", "words"),
    [
        ("types", ["ConfigError", "torch.bfloat16 and torch.float32: convert the model to one"]),
        ("hook", ["ConfigError", "register_step_post_hook", "engine.step()"]),
        ("memory", ["HostMemoryError", "host_memory_bytes"]),
    ],
)
def test_refusals_name_the_setting_and_the_way_out(report, request_for, words):
    for word in words:
        assert word in report["refusals"][request_for]


@pytest.mark.parametrize("ranks", RANKS)
def test_no_thread_of_a_lane_is_left(reports, ranks):
    assert [found["threads"] for found in reports[ranks]] == [[]] * ranks
