"""What is said of a configuration is what an engine of the installed DeepSpeed does with it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from in_process import ask

from ds_config.explain import explain
from ds_config.rules import buckets

WORKER = Path(__file__).resolve().parents[2] / "support" / "engine_verdicts.py"
NUMEL = 4096
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


def config(stage=0, zero=None, **more):
    table = {"train_batch_size": 1, "bf16": {"enabled": True}, "optimizer": ADAM}
    table["zero_force_ds_cpu_optimizer"] = False
    return table | {"zero_optimization": {"stage": stage, **(zero or {})}} | more


def optimizer(kind, **params):
    return {"optimizer": {"type": kind, "params": {"lr": 1e-3, **params}}}


def scheduler(kind, **params):
    return {"scheduler": {"type": kind, "params": params}}


CPU = {"offload_optimizer": {"device": "cpu"}}
REFUSED = {
    "an unknown optimizer": (config(2, **optimizer("AdamQ")), "optimizer.type", "mean Adam?"),
    "one that is gone": (config(**optimizer("OneBitAdam")), "optimizer.type", "give AdamW"),
    "torch's in lower case": (config(**optimizer("sgd")), "optimizer.type", "mean SGD?"),
    "untested under ZeRO": (config(1, **optimizer("SGD")), "optimizer.type", "untested"),
    "a parameter of clipping": (
        config(2, **optimizer("AdamW", torch_adam=True, max_grad_norm=1.0)),
        "optimizer.params.max_grad_norm",
        "write gradient_clipping",
    ),
    "a scheduler misspelt": (config(**scheduler("WarmupLr")), "scheduler.type", "mean WarmupLR?"),
    "types without ZeRO": (
        config(data_types={"grad_accum_dtype": "fp32"}),
        "data_types.grad_accum_dtype",
        "give stage 1, 2 or 3",
    ),
}
TAKEN = {
    "torch's optimizer without ZeRO": config(**optimizer("SGD")),
    "untested and allowed": config(2, **optimizer("SGD"), zero_allow_untested_optimizer=True),
    "any case of DeepSpeed's names": config(2, **optimizer("aDaGrad")),
    "torch's scheduler": config(**scheduler("LinearLR"), bf16={"enabled": False}),
    "no norm and no clipping": config(2, {"compute_grad_norm": False}, gradient_clipping=0),
    "a comment": config(1, _comment="mine"),
    "nvme below stage 3": config(2, {"offload_optimizer": {"device": "nvme"}}),
    "a share on the GPU": config(
        3,
        {"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "contiguous_gradients": False},
        **optimizer("AdamW"),
        **scheduler("WarmupLR", warmup_min_lr=1e-4, warmup_type="linear"),
    ),
    "a sum in another type": config(2, data_types={"grad_accum_dtype": "fp32"}),
}
AUTO_FAILS = {
    "gradient_clipping": config(2, gradient_clipping="auto"),
    "steps_per_print": config(2, steps_per_print="auto"),
    "optimizer.params.lr": config(2, **optimizer("AdamW", torch_adam=True, lr="auto")),
    "optimizer.params.betas": config(2, **optimizer("AdamW", torch_adam=True, betas="auto")),
    "scheduler.params.warmup_num_steps": config(
        2, **scheduler("WarmupLR", warmup_num_steps="auto")
    ),
    "train_micro_batch_size_per_gpu": config(2, train_micro_batch_size_per_gpu="auto"),
    "communication_data_type": config(2, communication_data_type="auto"),
}
"""Configurations whose one ``auto`` ends with an error if no framework fills it in."""
AUTO_DROPPED = {
    "zero_optimization.stage": config("auto"),
    "zero_optimization.sub_group_size": config(3, {"sub_group_size": "auto"}),
    "zero_optimization.offload_optimizer.device": config(
        2, {"offload_optimizer": {"device": "auto"}}
    ),
}
"""Those whose ``auto`` is dropped for the default."""
BUCKETS = {
    f"stage {stage} {json.dumps({**zero, **more})}": config(
        stage, {"reduce_bucket_size": NUMEL, "allgather_bucket_size": 8 * NUMEL, **zero}, **more
    )
    for stage, zero, more in [
        (1, {}, {"data_types": {"grad_accum_dtype": "fp32"}}),
        (1, {"overlap_comm": True, **CPU}, {"data_types": {"grad_accum_dtype": "fp32"}}),
        (2, {}, {"bf16": {"enabled": False}}),
        (2, {"overlap_comm": True}, {}),
        (2, {"overlap_comm": True, "contiguous_gradients": False}, {}),
        (2, {"overlap_comm": True, "contiguous_gradients": False, **CPU}, {}),
        (3, {"overlap_comm": True}, {}),
        (3, {"overlap_comm": True}, {"communication_data_type": "fp32"}),
        (3, {"contiguous_gradients": False, **CPU}, {}),
    ]
}


@pytest.fixture(scope="module")
def engines():
    """What became of each, by its name; they are made by one process, one after the other."""
    tables = {name: table for name, (table, *_) in REFUSED.items()} | TAKEN | BUCKETS
    tables |= AUTO_FAILS | AUTO_DROPPED
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(WORKER)],
        input=json.dumps(list(tables.values())),
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return dict(zip(tables, json.loads(done.stdout.splitlines()[-1]), strict=True))


def judged(table):
    found = explain(table, ask(table))
    return {note.key: f"{note.text}; {note.remedy}" for note in (*found.unknown, *found.faults)}


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_engine_refuses_is_told_with_its_remedy(engines, name):
    table, key, words = REFUSED[name]
    assert engines[name][0]
    assert words in judged(table)[key]


@pytest.mark.parametrize("name", TAKEN)
def test_what_an_engine_takes_is_accepted(engines, name):
    assert engines[name][0] == ""
    assert judged(TAKEN[name]) == {}


@pytest.mark.parametrize("name", AUTO_FAILS)
def test_an_auto_that_nobody_fills_in_fails_where_it_is_said_to(engines, name):
    assert engines[name][0]
    found = explain(AUTO_FAILS[name], ask(AUTO_FAILS[name]), framework="none")
    assert [note.key for note in found.faults] == [name]


@pytest.mark.parametrize("name", AUTO_DROPPED)
def test_an_auto_that_is_said_to_be_dropped_trains(engines, name):
    assert engines[name][0] == ""
    found = explain(AUTO_DROPPED[name], ask(AUTO_DROPPED[name]), framework="none")
    assert found.is_accepted
    assert name in [note.key for note in found.warnings]


@pytest.mark.parametrize("name", BUCKETS)
def test_buckets_are_those_that_an_engine_allocates(engines, name):
    found = buckets(BUCKETS[name])
    assert engines[name][:2] == ["", found.count * found.num_bytes]


def test_a_share_on_the_gpu_keeps_the_first_learning_rate(engines):
    assert engines["a share on the GPU"] == ["", 0, [1e-4, 1e-3]]


def test_values_that_hugging_face_fills_in_are_not_missing():
    auto = scheduler("WarmupDecayLR", total_num_steps="auto", warmup_num_steps="auto")
    assert judged(config(3, **auto, **optimizer("AdamW", betas="auto"))) == {}
    nobodys = judged(config(3, scheduler={"type": "auto"}, optimizer={"type": "auto"}))
    assert nobodys.keys() == {"scheduler.type", "optimizer.type"}
