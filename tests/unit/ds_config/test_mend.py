"""``--fix``: a corrected copy needs no second correction, and says of each loss what it was."""

import json
import logging

import pytest
from hypothesis import example, given, settings, strategies as st
from in_process import ask, told

from ds_config.explain import as_text
from ds_config.installed import release_keys
from ds_config.mend import fixed

NAMES = sorted({name for key in release_keys()[0] for name in key})
BLOCKS = ["zero_optimization", "offload_optimizer", "fp16", "aio", "optimizer", "params"]
OLD = ["cpu_offload", "all_reduce_bucket_size", "reduce_bucket_size", "max_grad_norm", "elasticity"]
ODD = ["", "a.b", "stagee", "_comment", "deep_optimizer_states", "frobnicate"]
KEYS = st.sampled_from([*BLOCKS, *OLD, *ODD]) | st.sampled_from(NAMES)
SCALARS = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        3,
        -1,
        2.5,
        1e9,
        "auto",
        "4",
        "5e8",
        "true",
        "inf",
        "cpu",
        "text",
        [2, 3],
        [],
    ]
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)
DOCUMENTS = st.dictionaries(KEYS, VALUES, max_size=4)


@pytest.fixture(scope="module", autouse=True)
def silent():
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def leaves(table, at=()):
    for name, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, (*at, name))
        else:
            yield (*at, name), value


@settings(max_examples=60, derandomize=True)
@given(DOCUMENTS)
@example({"zero_optimization": {"aio": {"enabled": True, "thread_count": 1}}})
@example({"zero_optimization": {"reduce_bucket_size": 2, "all_reduce_bucket_size": 3}})
@example({"zero_optimization": {"offload_optimizer": {"device": "none"}, "cpu_offload": True}})
@example({"zero_optimization": {"fp16": {"enabled": "true", "losscale": "0"}}, "fp16": {}})
@example({"zero_optimization": 7, "overlap_comm": True, "stage": "3", "bf16": True})
@example({"optimizer": {"params": {"max_grad_norm": 1.0}}, "gradient_clipping": "auto"})
@example({"a.b": {"c": 1}, "gradient.clipping": 1})
def test_a_corrected_copy_needs_no_second_one_and_loses_nothing_in_silence(table):
    result, changes = fixed(table, ask(table))
    found = told(result)
    assert as_text("file.json", found)
    assert not [n for n in (*found.unknown, *found.faults, *found.warnings) if n.mend]
    assert fixed(result, ask(result)) == (result, [])
    kept = dict(leaves(result))
    said = {change.partition(": ")[0] for change in changes}
    for key, value in leaves(table):
        parts = {".".join(key[: end + 1]) for end in range(len(key))}
        assert (key in kept and kept[key] == value) or parts & said, key
    json.dumps(result, allow_nan=False)


def zero(**more):
    return {"train_batch_size": 4, "zero_optimization": more}


MENDED = {
    "a switch for a block": (
        zero(stage=2, offload_optimizer=True),
        zero(stage=2, offload_optimizer={"device": "cpu"}),
        "zero_optimization.offload_optimizer: true written as",
    ),
    "a switch that is off": (
        zero(stage=2, offload_param=False),
        zero(stage=2, offload_param={"device": "none"}),
        "zero_optimization.offload_param: false written as",
    ),
    "a device for a block": (
        zero(stage=3, offload_param="nvme"),
        zero(stage=3, offload_param={"device": "nvme"}),
        'zero_optimization.offload_param: "nvme" written as',
    ),
    "a switch of a type": (
        {"train_batch_size": 4, "bf16": True},
        {"train_batch_size": 4, "bf16": {"enabled": True}},
        "bf16: true written as",
    ),
    "a stage for ZeRO": (
        {"train_batch_size": 4, "zero_optimization": 2},
        zero(stage=2),
        "zero_optimization: 2 written as",
    ),
    "a second name": (
        zero(reduce_bucket_size=2, all_reduce_bucket_size=3),
        zero(reduce_bucket_size=2),
        "zero_optimization.all_reduce_bucket_size: left out, since "
        "zero_optimization.reduce_bucket_size is given too; it was 3",
    ),
    "an older name beside the newer": (
        zero(stage=2, cpu_offload=True, offload_optimizer={"device": "cpu"}),
        zero(stage=2, offload_optimizer={"device": "cpu"}),
        "zero_optimization.cpu_offload: left out, since zero_optimization.offload_optimizer is "
        "given too; it was true",
    ),
    "a block in the wrong place, with a key in it": (
        zero(stage=3, aio={"block_size": 1024, "queue_dept": 4}),
        {**zero(stage=3), "aio": {"block_size": 1024, "queue_depth": 4}},
        "aio.queue_dept: now queue_depth",
    ),
    "no place for it": (
        {"train_batch_size": 4, "zero_optimization": True, "overlap_comm": True},
        {"train_batch_size": 4, "zero_optimization": True},
        "overlap_comm: left out, since zero_optimization is no block; it was true",
    ),
    "clipping in the optimizer": (
        {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}},
        {
            "train_batch_size": 4,
            "optimizer": {"type": "Adam", "params": {}},
            "gradient_clipping": 1,
        },
        "optimizer.params.max_grad_norm: moved to the top level",
    ),
    "a name of earlier releases that is a key elsewhere": (
        zero(stage=2, allgather_size=5e8),
        zero(stage=2, allgather_bucket_size=5e8),
        "zero_optimization.allgather_size: now allgather_bucket_size",
    ),
    "a word that says nothing of its place": (
        {"train_batch_size": 4, "seed": 7},
        {"train_batch_size": 4},
        "seed: left out; it was 7",
    ),
    "a word beside the block that has it": (
        {"train_batch_size": 4, "seed": 7, "data_efficiency": {"enabled": False}},
        {"train_batch_size": 4, "data_efficiency": {"enabled": False, "seed": 7}},
        "seed: moved to data_efficiency",
    ),
    "a number in quotes": (
        zero(stage="3", reduce_bucket_size="5e8"),
        zero(stage=3, reduce_bucket_size=500_000_000),
        'zero_optimization.reduce_bucket_size: "5e8" written as 500000000',
    ),
    "a switch in quotes": (
        zero(stage=1, overlap_comm="False"),
        zero(stage=1, overlap_comm=False),
        'zero_optimization.overlap_comm: "False" written as false',
    ),
}


@pytest.mark.parametrize(("table", "wanted", "line"), MENDED.values(), ids=MENDED)
def test_what_is_meant_is_written(table, wanted, line):
    result, changes = fixed(table, ask(table))
    assert result == wanted
    assert [change for change in changes if change.startswith(line)], changes


TYPES = [
    ("train_batch_size", "4", '= "4" is a string, where a whole number belongs; write the number'),
    ("train_batch_size", [4], "= [4] is a list, where a whole number belongs; give a whole number"),
    ("train_batch_size", {}, "= {} is an object, where a whole number belongs"),
    ("train_batch_size", True, "= true is a boolean; give a whole number of 1 or more"),
    ("train_batch_size", 4.5, "= 4.5; give a whole number of 1 or more"),
    ("gradient_clipping", "1.0", '= "1.0" is a string, where a number belongs; write the number'),
    ("gradient_clipping", "one", '= "one" is a string, where a number belongs; give a number'),
    ("steps_per_print", "inf", '= "inf" is a string, where a number belongs; give a number'),
    (
        "wall_clock_breakdown",
        "true",
        "is a string, where true or false belongs; write true without",
    ),
    ("fp16.loss_scale_window", [1], "= [1] is a list, where a whole number belongs"),
    ("fp16.initial_scale_power", "x", '= "x" is a string, where a whole number belongs'),
    (
        "zero_optimization.stage",
        [2, 3],
        "= [2, 3] is a list, where a whole number belongs; give 0, 1",
    ),
    ("zero_optimization.stage", "3", '= "3" is a string, where a whole number belongs'),
    ("zero_optimization.overlap_comm", "maybe", "is a string, where true or false belongs"),
    ("zero_optimization.sub_group_size", {"a": 1}, "is an object, where a whole number belongs"),
]


@pytest.mark.parametrize(("name", "value", "words"), TYPES)
def test_the_type_of_a_wrong_value_is_named_once(name, value, words):
    table = block = zero(stage=3)
    for around in name.split(".")[:-1]:
        block = block.setdefault(around, {})
    block[name.rpartition(".")[2]] = value
    found = told(table)
    (text,) = [
        f"{note.text}; {note.remedy}"
        for note in (*found.unknown, *found.faults, *found.warnings)
        if note.key.startswith(name)
    ]
    assert words in text


def test_a_list_of_stages_draws_no_rule_of_one_stage():
    nvme = {"device": "nvme", "nvme_path": "/x"}
    found = told(zero(stage=[2, 3], offload_param=nvme, stage3_max_live_parameters=1e9))
    assert [note.key for note in found.faults] == ["zero_optimization.stage"]
    assert not found.warnings
