"""What a configuration costs a model, and what is said first."""

import json

import pytest
from in_process import explain_or_advise

from deep_optimizer_states.predict.machine import load_machine
from deep_optimizer_states.predict.memory import peaks_of
from deep_optimizer_states.predict.model import load_model
from deep_optimizer_states.predict.predict import predict
from deep_optimizer_states.predict.workload import workload_of_json
from deep_optimizer_states.units import GIB
from ds_config.costs import costs_of
from ds_config.lenient import Placeholder

OFFLOADED = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**OFFLOADED, "seed": 3, "fp16": {"enabled": True}}))
    return path


def test_the_costs_are_those_that_are_predicted_of_the_run():
    model, machine = load_model("tiny")[0], load_machine("h100x4")
    found = costs_of(OFFLOADED, model, 2, machine, 64)
    table = {name: value for name, value in OFFLOADED.items() if value != "auto"}
    for peaks, recomputes in ((found.peaks, False), (found.recomputed, True)):
        workload = workload_of_json(
            table, model, dp=2, sequence_length=64, activation_checkpointing=recomputes,
            materialized_attention=False,
        )  # fmt: skip
        assert peaks == peaks_of(workload, True)
        assert recomputes or found.time == predict(workload, machine)
    assert found.reason == ""


def test_layers_that_are_computed_again_take_less_memory():
    found = costs_of(OFFLOADED, load_model("1.3B")[0], 1, None, 0)
    assert found.recomputed.train.device_bytes < found.peaks.train.device_bytes


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("moments", ".offload_optimizer"),
        ("weights", ".offload_param"),
        ("bucket of gradients", "reduce_bucket_size"),
        ("logits and their gradients", "train_micro_batch_size_per_gpu"),
    ],
)
def test_an_array_is_told_with_the_keys_that_decide_it(name, keys):
    found = costs_of(OFFLOADED, load_model("1.3B")[0], 1, None, 0)
    by_name = {one.name: one for one in found.arrays}
    assert by_name[name].decided_by.endswith(keys)
    assert [one.num_bytes for one in found.arrays] == sorted(
        (one.num_bytes for one in found.arrays), reverse=True
    )
    assert (by_name["moments"].place, by_name["weights"].place) == ("host", "GPU")


@pytest.mark.parametrize(
    "zero", [{"stage": "three"}, {"stage": 3, "sub_group_size": [1]}, 7, {"offload_param": "cpu"}]
)
def test_of_a_faulty_value_no_cost_is_known_and_a_line_says_so(zero):
    found = costs_of({"zero_optimization": zero}, load_model("tiny")[0], 1, None, 0)
    assert found.peaks is None
    assert found.reason
    assert "\n" not in found.reason
    assert list(found.lines())[1] == f"  not known: {found.reason}"


def test_what_is_still_to_be_chosen_is_left_to_the_default():
    model, stage = load_model("tiny")[0], {"zero_optimization": {"stage": Placeholder("<1|2>")}}
    assert costs_of(stage, model, 1, None, 0).peaks == costs_of({}, model, 1, None, 0).peaks


def test_faults_come_first_then_costs_then_the_keys(file, capsys):
    words = ["explain", file, "--model", "tiny", "--machine", "h200x1"]
    assert explain_or_advise(words) == 1
    text = capsys.readouterr().out
    titles = ["Faults", "Unknown keys", "What becomes of auto", "What it costs tiny on 1 rank",
              "Key by key"]  # fmt: skip
    at = [text.index(f"\n{title}") for title in titles]
    assert at == sorted(at)
    assert "an iteration takes" in text
    assert explain_or_advise([*words, "--json"]) == 1
    costs = json.loads(capsys.readouterr().out)["costs"]
    assert costs["iteration_s"] > 0
    size = costs["memory"]["kept"]["train"]["device_bytes"] / GIB
    assert f"a rank takes {size:.1f} GiB of its GPU" in text


def test_a_machine_without_a_model_is_refused(file, capsys):
    assert explain_or_advise(["explain", file, "--machine", "h200x1"]) == 2
    assert "go with --model or --config" in capsys.readouterr().err
