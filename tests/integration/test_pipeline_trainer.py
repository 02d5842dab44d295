"""The trainer with a pipeline: four processes, two stages, with and without compression."""

import json
import math

import pytest
from trainer_runs import PIPELINE, events_of, train_pipelines

from configs.study import load_study
from launch.backends.own import PipelineTrainer
from launch.simulate.workloads import gpt_of
from launch.train_loop.checkpoint import find_checkpoint
from optimus_cc import Settings
from optimus_cc.predict import ELEMENT_BYTES, Costs, Workload, predict

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STUDY = load_study("optimus-cc")
MODEL = PIPELINE["model"]
COMMON = {
    **PIPELINE,
    "pp": 2,
    "dp": 2,
    "global_batch_size": 16,
    "lr": 1e-2,
    "eval_interval": 3,
    "eval_iterations": 2,
}
SCHEMES = {
    "engine": "cb+fe+sc",
    "inter_grad_comp_rank": 2,
    "grad_comp_rank": 2,
    "grad_comp_warm_up": 0.2,
    "save_interval": 3,
}
PEERS = {
    "engine": "cb-4bit",
    "inter_grad_comp_epilogue_only": False,
    "save_interval": 3,
    "check_orth_error": True,
}
GRADIENTS = {
    "engine": "fe+sc-4bit",
    "grad_comp_warm_up": 0.2,
    "save_interval": 3,
    "selective_grad_comp_way": 2,
}
RUNS = {
    "replicas": {"engine": "uncompressed"},
    "shards": {"engine": "uncompressed", "dp": 1, "tp": 2},
    "schemes": SCHEMES,
    "continued": {**SCHEMES, "from": "schemes"},
    "bf16": {"engine": "cb", "inter_grad_comp_rank": 2, "dtype": "bf16"},
    "four-stages": {"engine": "cb", "inter_grad_comp_rank": 2, "pp": 4, "dp": 1,
                    "save_interval": 6, "model": {**MODEL, "layers": 6}},
    "peers": PEERS,
    "peers-continued": {**PEERS, "from": "peers"},
    "peers-unchecked": {**PEERS, "check_orth_error": False},
    "gradients-4bit": GRADIENTS,
    "gradients-4bit-continued": {**GRADIENTS, "from": "gradients-4bit"},
    "unknown": {"engine": "uncompressed", "ds": {"optimus_cc": {"inter_grad_compress": True}}},
    "untied": {"engine": "cb+fe", "model": {**MODEL, "architecture": "llama"}},
}  # fmt: skip
WHOLE = {name: fields["from"] for name, fields in RUNS.items() if "from" in fields}
"""Runs that go on from the middle of another."""


def point_of(fields):
    return STUDY.point_type(**{**COMMON, **fields})


@pytest.fixture(scope="module")
def folders(corpus, tmp_path_factory):
    parent = tmp_path_factory.mktemp("runs")
    train_pipelines(parent, corpus, STUDY, {n: {**COMMON, **f} for n, f in RUNS.items()})
    return parent


@pytest.fixture
def events(folders):
    def read(name, kind="iteration"):
        return [event for event in events_of(folders / name) if event["event"] == kind]

    return read


def test_the_first_loss_is_that_of_guessing_and_it_falls(events):
    for name in ("replicas", "schemes", "bf16", "four-stages"):
        losses = [event["loss"] for event in events(name)]
        assert losses[0] == pytest.approx(math.log(512), abs=0.3)
        assert losses[-1] < losses[0] - 0.15


def test_replicas_and_shards_train_the_same_model(events):
    """Two replicas of a stage, or its two shards: the same weights, samples and sums."""
    for one, other in zip(events("replicas"), events("shards"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=2e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-3)
    evaluations = (events(name, "evaluation") for name in ("replicas", "shards"))
    for one, other in zip(*evaluations, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=2e-4)


def test_an_evaluation_is_its_perplexity_and_a_result_of_the_run(events):
    first, last = events("schemes", "evaluation")
    assert (first["iteration"], last["iteration"]) == (3, 6)
    assert last["perplexity"] == pytest.approx(math.exp(last["loss"]))
    assert last["tokens"] == 2 * 16 * 16
    (end,) = events("schemes", "end")
    assert end["validation_loss"] == last["loss"]
    assert end["validation_perplexity"] == last["perplexity"]


@pytest.mark.parametrize("name", WHOLE)
def test_a_continued_run_is_one_that_never_stopped(events, name):
    """Bit for bit, with the queries and errors of every kind of compression."""
    losses = [event["loss"] for event in events(WHOLE[name])]
    assert [event["loss"] for event in events(name)] == losses[3:]
    (whole,), (continued,) = events(WHOLE[name], "end"), events(name, "end")
    for digest in ("weights_sha256", "optimizer_sha256"):
        assert whole[digest] == continued[digest]
    assert whole["weights_sha256"] != events("replicas", "end")[0]["weights_sha256"]


def test_statistics_of_errors_change_nothing_and_are_of_each_link(events):
    """Four micro-batches of one link: four errors, three of which another micro-batch follows."""
    (checked,), (plain,) = events("peers", "end"), events("peers-unchecked", "end")
    assert checked["weights_sha256"] == plain["weights_sha256"]
    names = ("error_cosine", "error_mean", "difference_mean", "relative_error")
    every = events("peers")
    for event in every:
        assert {key for key in event if key.startswith("link_")} == {f"link_0_{n}" for n in names}
        assert 0.05 < event["link_0_relative_error"] < 0.3
        assert all(-1 < event[f"link_0_{name}"] < 1 for name in names)
    for name in names:
        sizes = [abs(event[f"link_0_{name}"]) for event in every]
        assert checked[name] == pytest.approx(sum(sizes) / len(sizes))
        assert name not in plain
    assert not any(key.startswith("link_") for key in events("peers-unchecked")[0])


def test_bytes_of_an_iteration_are_those_of_its_messages(events):
    """Two replicas of one link, four micro-batches of 2 x 16 tokens of 32 hidden units in fp32."""
    message, pair = 4 * 2 * 16 * 32, 4 * 2 * (2 * 16 + 32)
    for event in events("replicas"):
        assert event["forward_bytes"] == event["backward_bytes"] == 2 * 4 * message
    for event in events("schemes"):
        assert event["forward_bytes"] == 2 * 4 * message
        assert event["backward_bytes"] == 2 * (3 * message + pair)
    embedding = 4 * 512 * 32
    assert {e["embedding_bytes"] for e in events("schemes")} == {4 * embedding * 3 // 2}
    assert {e["embedding_bytes"] for e in events("replicas")} == {4 * embedding}
    assert {e["backward_bytes"] for e in events("peers")} == {2 * 4 * 34 * (2 * 16 * 32) // 64}
    (end,) = events("schemes", "end")
    assert end["backward_mib"] == 6 * 2 * (3 * message + pair) / 2**20


@pytest.mark.parametrize("name", ["replicas", "schemes", "bf16", "four-stages"])
def test_a_predicted_iteration_sends_what_the_trained_one_sent(folders, name):
    """All kinds, to the byte, after the warm-up of the gradients' compression."""
    run = json.loads((folders / name / "run.json").read_text())
    config = json.loads((folders / name / "ds_config.json").read_text())
    point = load_study("optimus-cc").make_point(run["point"])
    workload = Workload(
        model=gpt_of(point),
        pp=point.pp,
        dp=point.dp,
        tp=point.tp,
        micro_batch_size=point.micro_batch_size,
        num_micro_batches=point.accumulation,
        element_bytes=ELEMENT_BYTES[point.dtype],
        recomputes=point.activation_checkpointing,
    )
    free = Costs(*([0.0] * workload.pp for _ in range(4)))
    settings = Settings(**config.get("optimus_cc", {}))
    predicted = predict(workload, settings, free).sent_bytes
    last = [event for event in events_of(folders / name) if event["event"] == "iteration"][-1]
    assert predicted == {kind: last[f"{kind}_bytes"] for kind in predicted}
    assert all(predicted[kind] for kind in ("forward", "backward", "embedding"))


def test_gradients_are_compressed_after_the_warm_up(events):
    sent = [event["gradients_bytes"] for event in events("schemes")]
    assert sent[0] > 1.2 * sent[1]
    assert len(set(sent[1:])) == 1


def test_memory_of_compression_is_that_of_the_rank_with_most(events):
    """The first stage keeps its gradients', the last one its messages'; one layer of GPT-2."""
    matrices = [(96, 32), (32, 32), (64, 32), (32, 64), (16, 32)]
    settings = PipelineTrainer().ds_config(point_of(SCHEMES))["optimus_cc"]
    rank, message_rank = settings["grad_comp_rank"], settings["inter_grad_comp_rank"]
    # A query, and the error of what is sent as P and Q.
    first = sum(
        4 * columns * (rank + rows)
        for rows, columns in matrices
        if rank * (rows + columns) < rows * columns
    )
    last = 4 * 32 * (message_rank + 16 * 2)
    assert first > last > 0
    (end,) = events("schemes", "end")
    assert end["compression_state_mib"] == first / 2**20
    assert "device_peak_mib" not in end
    assert events("replicas", "end")[0]["compression_state_mib"] == 0
    assert events("bf16", "end")[0]["compression_state_mib"] == last / 2**20


def test_phases_add_up_to_the_iteration(events):
    for event in (*events("replicas"), *events("four-stages")):
        parts = [event[f"{name}_ms"] for name in STUDY.phases if name != "gradients"]
        assert all(part > 0 for part in parts)
        assert sum(parts) + event["gradients_ms"] <= event["iteration_ms"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unknown", "optimus_cc: ['inter_grad_compress'] not known; settings are inter_grad_comp,"),
        ("untied", "optimus_cc: emb_comm_opt = True: architecture 'llama' has no tied embedding"),
    ],
)
def test_what_the_user_has_to_mend_is_named(folders, name, message):
    assert (folders / name / "refused").read_text().startswith(message)
    assert not (folders / name / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"zero_stage": 3}, "zero_stage = 3: --trainer megatron-pipeline runs without DeepSpeed"),
        ({"offload_optimizer": "cpu"}, "offload_optimizer = 'cpu': --trainer megatron-pipeline"),
        ({"dtype": "fp16"}, "dtype = 'fp16': --trainer megatron-pipeline has no loss scale"),
        ({"dtype": "bf16", "grad_accum_dtype": "fp32"}, "grad_accum_dtype = 'fp32': "),
        ({"pp": 4}, "pp = 4: a stage needs a layer, and the model has 2"),
    ],
)
def test_what_it_cannot_run_is_refused_with_a_remedy(fields, reason):
    (found,) = PipelineTrainer().refuse(point_of({"engine": "uncompressed", **fields}))
    assert found.startswith(reason)
    assert "; give" in found


def test_a_checkpoint_of_another_scheme_is_refused(folders):
    trainer = PipelineTrainer(checkpoint=find_checkpoint(folders / "schemes"))
    reason, *_ = trainer.refuse(point_of({"engine": "uncompressed", "iterations": 9}))
    assert reason.startswith("engine = 'uncompressed': the checkpoint ")
    assert "was saved with 'cb+fe+sc'" in reason


@pytest.mark.parametrize("name", STUDY.engines)
def test_every_engine_is_what_its_name_says(name):
    block = PipelineTrainer().ds_config(point_of({"engine": name})).get("optimus_cc", {})
    assert block.get("inter_grad_comp", False) == ("cb" in name)
    assert block.get("use_error_feedback", False) == (
        name != "uncompressed" and "without-lep" not in name
    )
    assert block.get("emb_comm_opt", False) == ("fe" in name)
    assert (
        block.get("selective_grad_comp", False) == block.get("grad_comp", False) == ("sc" in name)
    )
    bits = {"4bit": "hadamard-4bit", "fp8": "fp8"}
    methods = [method for word, method in bits.items() if word in name and "cb" in name]
    assert block.get("inter_grad_comp_method", "low-rank") == (methods or ["low-rank"])[0]
    gradients = {"fe+sc-torch": "torch-power-sgd", "fe+sc-4bit": "4bit"}
    assert block.get("grad_comp_method", "power-sgd") == gradients.get(name, "power-sgd")
    if "cb" in name:
        assert block["inter_grad_comp_epilogue_only"] is True
        assert block.get("inter_grad_comp_rank", 12) == 12
