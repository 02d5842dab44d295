"""Keys that are read from a release's source are those that its own models have."""

import importlib
from pathlib import Path

import deepspeed
import pytest

from ds_config.explain import words
from ds_config.releases import history, keys_of, versions
from ds_config.source import read_keys

PACKAGE = Path(deepspeed.__file__).parent
VERSION = deepspeed.__version__.partition("+")[0]
MODELS = {
    ("zero_optimization",): ("runtime.zero.config", "DeepSpeedZeroConfig"),
    ("zero_optimization", "offload_param"): (
        "runtime.zero.offload_config", "DeepSpeedZeroOffloadParamConfig",
    ),
    ("zero_optimization", "offload_optimizer"): (
        "runtime.zero.offload_config", "DeepSpeedZeroOffloadOptimizerConfig",
    ),
    ("zero_optimization", "zenflow"): ("runtime.zenflow.zenflow_config", "ZenFlowConfig"),
    ("fp16",): ("runtime.precision_config", "DeepSpeedFP16Config"),
    ("bf16",): ("runtime.precision_config", "DeepSpeedBF16Config"),
    ("comms_logger",): ("comm.config", "CommsLoggerConfig"),
    ("compile",): ("compile.config", "CompileConfig"),
    ("hybrid_engine",): ("runtime.config", "HybridEngineConfig"),
    ("tensorboard",): ("monitor.config", "TensorBoardConfig"),
    ("wandb",): ("monitor.config", "WandbConfig"),
    ("csv_monitor",): ("monitor.config", "CSVConfig"),
    ("comet",): ("monitor.config", "CometConfig"),
    ("tensor_parallel",): ("runtime.tensor_parallel.config", "TPTrainingConfig"),
    ("timers", "throughput"): ("utils.config", "DeepSpeedThroughputTimerConfig"),
}  # fmt: skip


@pytest.fixture(scope="module")
def keys():
    return read_keys(PACKAGE)


@pytest.mark.parametrize("block", MODELS, ids=".".join)
def test_a_blocks_keys_and_defaults_are_those_of_deepspeeds_model(keys, block):
    module, name = MODELS[block]
    model = getattr(importlib.import_module(f"deepspeed.{module}"), name)
    expected = {}
    for field, info in model.model_fields.items():
        for word in filter(None, (field, info.alias)):
            expected[word] = info
    found = {key[-1]: fact for key, fact in keys.items() if key[:-1] == block}
    assert {word for word, fact in found.items() if not fact.removed} == expected.keys()
    for word, info in expected.items():
        is_plain = isinstance(info.default, bool | int | float | str)
        # A default that is computed when the class is made is on file as none.
        if is_plain and (found[word].default is not None or info.default is False):
            assert found[word].default == info.default, word


def test_keys_that_functions_look_up_are_found(keys):
    for name in (
        "train_batch_size",
        "gradient_clipping",
        "steps_per_print",
        "wall_clock_breakdown",
    ):
        assert (name,) in keys
    assert ("optimizer", "params") in keys
    assert ("activation_checkpointing", "cpu_checkpointing") in keys
    assert ("aio", "queue_depth") in keys
    assert ("pipeline", "partition") in keys
    assert keys[("flops_profiler", "profile_step")].default == 1
    assert ("no_such_key",) not in keys


def test_every_key_that_deepspeed_looks_up_at_the_top_is_found(keys):
    """What its loader asks a configuration for while it runs."""
    asked = set()

    class Asked(dict):
        def __contains__(self, name):
            asked.add(name)
            return super().__contains__(name)

        def get(self, name, default=None):
            asked.add(name)
            return super().get(name, default)

        def keys(self):
            return Keys(self)

        def __copy__(self):
            return Asked(self)

    class Keys:
        def __init__(self, table):
            self.table = table

        def __contains__(self, name):
            return name in self.table

        def __iter__(self):
            return iter(dict(self.table))

    from deepspeed.runtime.config import DeepSpeedConfig

    DeepSpeedConfig(Asked(train_batch_size=1))
    assert len(asked) > 40
    assert asked <= {key[0] for key in keys}


def test_removed_keys_are_known_as_such(keys):
    from deepspeed.runtime import config

    removed = {key for key, fact in keys.items() if fact.removed}
    for name in config._REMOVED_TOP_LEVEL_CONFIG_KEYS:
        assert (name,) in removed
    for name in config._REMOVED_ZERO_CONFIG_KEYS:
        assert ("zero_optimization", name) in removed


def test_every_key_has_words(keys):
    gone = {key for key, fact in keys.items() if fact.removed}
    assert not [".".join(key) for key in keys.keys() - gone if not words().get(key)]


def test_words_are_of_keys_that_a_release_has():
    known = {key for version in versions() for key in keys_of(version)}
    assert not [".".join(key) for key in words() if key not in known]


def test_the_installed_release_is_on_file_as_it_is(keys):
    assert VERSION in versions(), f"python -m ds_config.releases ... for {VERSION}"
    assert keys_of(VERSION) == keys


def test_releases_tell_what_moved():
    pinned = history(("zero_optimization", "offload_optimizer", "pin_memory"))
    assert [(since, fact.default) for since, fact in pinned] == [("0.8.2", False), ("0.19.5", True)]
    assert not keys_of("0.8.2")[("elasticity",)].removed
    assert keys_of("0.19.8")[("elasticity",)].removed


def test_a_release_that_is_not_on_file_is_named():
    with pytest.raises(LookupError, match=r"0\.1\.0"):
        keys_of("0.1.0")


def test_a_folder_that_is_no_release_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.py"):
        read_keys(tmp_path)
