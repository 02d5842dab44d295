"""Refusals name the setting; a failing lane surfaces; nothing is left behind."""

import json
from pathlib import Path

import pytest
from ranks import run_ranks

WORKER = Path(__file__).with_name("refusals_worker.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    out = tmp_path_factory.mktemp("refusals") / "answers.json"
    run_ranks(WORKER, out)
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("request_for", "words"),
    [
        ("torch AdamW", ["ConfigError", "AdamW", "DeepSpeedCPUAdam"]),
        ("SGD", ["ConfigError", "SGD", "DeepSpeedCPUAdam"]),
        ("Muon", ["ConfigError", "optimizer.type = muon", 'set it to "Adam" or "AdamW"']),
        ("deepcompile", ["ConfigError", "compile.deepcompile = true", "take it out"]),
        ("unknown key", ["ConfigError", "strde", 'did you mean "stride"']),
        (
            "prefetching, windows of the caller's",
            ["ConfigError", "prefetch_memory_bytes = 'auto' needs managed_gradient_accumulation"],
        ),
        ("gradient", ["ConfigError", "gradients cannot be set", "enabled"]),
        ("other bits", ["KernelError", "has not the bits", 'policy "all-host"']),
        ("other bits, fp32", ["KernelError", "has not the bits", 'policy "all-host"']),
        ("hook", ["ConfigError", "register_step_post_hook", "engine.step()"]),
        ("little memory", ["HostMemoryError", "0.0 GiB are free", "host_memory_bytes"]),
        ("more than it shows", ["no error"]),
        ("less than it shows", ["HostMemoryError", "host_memory_bytes"]),
        ("affinity", ["no error"]),
        ("autocast fp16", ["ConfigError", "torch_autocast in fp16", "bfloat16"]),
    ],
)
def test_refusals_name_the_setting_and_the_way_out(answers, request_for, words):
    for word in words:
        assert word in answers[request_for]


def test_a_gradient_within_a_window_is_the_last_steps_as_in_stock(answers):
    gradients = answers["early gradients"]
    assert gradients["ours"] == gradients["stock"]
    assert gradients["ours"][1::2] == ["no error"] * 6


def test_a_gradient_is_refused_where_the_caller_ends_windows(answers):
    assert "ConfigError: a gradient was asked for between" in str(
        answers["early gradients"]["windows of the caller's"]
    )


def test_a_failing_lane_surfaces_where_the_update_is_waited_for(answers):
    assert "UpdateError" in answers["lane"]
    assert "lane CPU, step of tile" in answers["lane"]
    assert "the CPU lane is out of luck" in answers["lane"]


def test_an_update_that_went_wrong_is_found_by_repeating_a_sample_of_it(answers):
    assert "UpdateError: update 1 since the start, tile" in answers["wrong update"]
    assert "went wrong" in answers["wrong update"]
    assert answers["wrong update, not verified"] == "no error"


def test_an_update_that_did_not_wait_for_its_gradients_is_found_so(answers):
    assert "UpdateError: update 1 since the start, tile" in answers["late gradients"]


def test_pages_are_locked_unless_that_is_not_wanted(answers):
    assert answers["locks pages"] == [True, True, False]


def test_step_waits_for_persistent_parameters_and_for_no_others(answers):
    assert answers["returns"] == [True, True]


def test_no_thread_of_a_lane_is_left_after_refusals_failures_and_destroy(answers):
    assert answers["lanes left"] == []


def test_the_state_takes_14_host_bytes_a_parameter_where_stock_takes_18(answers):
    assert answers["host bytes"]["state"] == pytest.approx(14, rel=0.01)
    assert answers["stock's host bytes"]["state"] == pytest.approx(18, rel=0.01)


def test_nothing_beside_the_state_eats_what_it_saves(answers):
    """All tensors count, the emulated device's staging buffers and the weights too."""
    assert answers["host bytes"]["all"] < answers["stock's host bytes"]["all"]


def test_a_timeline_has_every_lane_and_a_line_an_update(answers):
    found = answers["timeline"]
    assert found["lanes"] == ["CPU", "D2H", "GPU", "H2D", "grads", "weights"]
    (update,) = found["updates"]
    assert 0 < update["share_of_limit"] <= 1
    assert update["bound_by"] in update["busy_s"]
