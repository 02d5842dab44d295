"""The keys that the installed DeepSpeed is found to read are those that its loader reads."""

import importlib

import pytest
from deepspeed.runtime import config
from in_process import ask

from ds_config import installed
from ds_config.explain import words, words_file

MODELS = {
    ("zero_optimization",): ("runtime.zero.config", "DeepSpeedZeroConfig"),
    ("zero_optimization", "offload_param"): (
        "runtime.zero.offload_config", "DeepSpeedZeroOffloadParamConfig",
    ),
    ("zero_optimization", "offload_optimizer"): (
        "runtime.zero.offload_config", "DeepSpeedZeroOffloadOptimizerConfig",
    ),
    ("fp16",): ("runtime.precision_config", "DeepSpeedFP16Config"),
    ("bfloat16",): ("runtime.precision_config", "DeepSpeedBF16Config"),
    ("comms_logger",): ("comm.config", "CommsLoggerConfig"),
    ("tensorboard",): ("monitor.config", "TensorBoardConfig"),
    ("timers", "throughput"): ("utils.config", "DeepSpeedThroughputTimerConfig"),
}  # fmt: skip


@pytest.fixture(scope="module")
def keys():
    return ask({}).keys


@pytest.mark.parametrize("block", MODELS, ids=".".join)
def test_a_blocks_keys_and_defaults_are_those_of_deepspeeds_model(keys, block):
    module, name = MODELS[block]
    model = getattr(importlib.import_module(f"deepspeed.{module}"), name)
    fields = {
        word: info
        for field, info in model.model_fields.items()
        for word in filter(None, (field, info.alias))
    }
    found = {key[-1]: fact for key, fact in keys.items() if key[:-1] == block}
    assert {word for word, fact in found.items() if not fact.removed} == fields.keys()
    for word, info in fields.items():
        if isinstance(info.default, bool | int | float | str):
            assert found[word].default == info.default, word


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("gradient_predivide_factor", 1.0),  # looked up by a function
        ("flops_profiler.profile_step", 1),  # in a block without a model
        ("checkpoint.writer.io_buffer_double", True),  # in a block inside such a block
        ("optimizer.params", None),  # only where optimizer.type is a text
        ("pipeline.partition", "best"),  # in a block that is read as a whole
        ("allgather_size", 5e8),  # only where zero_optimization is true
        ("sequence_parallel_size", None),  # only where there are ranks
        ("bfloat16.enabled", False),  # an older name of the block
    ],
)
def test_a_key_is_found_wherever_the_loader_looks_for_it(keys, name, default):
    assert keys[tuple(name.split("."))].default == default


def test_what_nobody_looks_up_is_no_key(keys):
    assert ("no_such_key",) not in keys
    assert not [key for key in keys if key[:2] == ("optimizer", "params") and len(key) > 2]
    assert not [key for key in keys if installed._MARK in key or "train_batch_size" in key[1:]]


def test_removed_keys_are_known_as_such(keys):
    removed = {key for key, fact in keys.items() if fact.removed}
    tables = (
        ("_REMOVED_TOP_LEVEL_CONFIG_KEYS", ()),
        (
            "_REMOVED_ZERO_CONFIG_KEYS",
            ("zero_optimization",),
        ),
    )
    assert removed == {
        (*block, name) for table, block in tables for name in getattr(config, table, ())
    }


def test_every_key_has_words(keys):
    gone = words_file()["gone"]
    known = {key for key, fact in keys.items() if not fact.removed and key[0] not in gone}
    assert not [".".join(key) for key in known if not words().get(key)]
