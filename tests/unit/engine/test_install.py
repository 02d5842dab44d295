import importlib
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

import deep_optimizer_states
from deep_optimizer_states.adapter.guard import installed_version
from deep_optimizer_states.adapter.hooks import (
    _configure_optimizer,
    _configure_zero_optimizer,
    _is_managed,
    _step,
    check_supported,
)
from deep_optimizer_states.config import Settings
from deep_optimizer_states.errors import ConfigError, UnsupportedDeepSpeedError


@pytest.fixture
def installed():
    deep_optimizer_states.install()
    yield
    deep_optimizer_states.uninstall()


def ds_config(**changes):
    return {
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": True},
        "deep_optimizer_states": {"enabled": True},
    } | changes


def read(config):
    from deepspeed.runtime.config import DeepSpeedConfig

    return DeepSpeedConfig(config)


def test_install_twice_and_uninstall_leaves_deepspeed_as_it_was(monkeypatch):
    """Also while DeepSpeed is first imported, in a program that ``run`` started."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine

    def methods():
        names = ("_configure_optimizer", "_configure_zero_optimizer", "step", "load_checkpoint")
        found = [getattr(DeepSpeedEngine, name) for name in names]
        return [DeepSpeedConfig._initialize_params, *found]

    module = sys.modules[deep_optimizer_states.install.__module__]
    before, check, nested = methods(), module.check_deepspeed, []

    def import_deepspeed_with_its_hook(*how):
        check(*how)
        if not nested:
            nested.append(1)
            deep_optimizer_states.install()

    monkeypatch.setattr(module, "check_deepspeed", import_deepspeed_with_its_hook)
    deep_optimizer_states.install()
    once = methods()
    deep_optimizer_states.install()
    assert methods() == once
    assert [method.__wrapped__ for method in once] == before
    deep_optimizer_states.uninstall()
    assert methods() == before


def test_a_lock_that_deepspeed_would_wait_for_is_named(monkeypatch, tmp_path):
    """Whoever killed a build has left it; DeepSpeed waits for it without a word."""
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    told = []
    module = sys.modules[deep_optimizer_states.install.__module__]
    monkeypatch.setattr(module, "say", told.append)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    deep_optimizer_states.install()
    deep_optimizer_states.uninstall()
    assert len(told) == 1
    assert f"rm {lock}" in told[0]


def test_papers_keys_are_accepted_and_the_users_config_is_not_changed(installed):
    offload = {"device": "cpu", "prefetch_optimizer": 1, "part_grads_async": 1}
    offload["prefetch_optimizer_gap"] = 3
    config = ds_config(zero_optimization={"stage": 3, "offload_optimizer": offload})
    del config["deep_optimizer_states"]
    assert read(config).deep_optimizer_states.stride == 3
    assert config["zero_optimization"]["offload_optimizer"]["prefetch_optimizer_gap"] == 3


def offloaded(stage=3, offload=None, **others):
    """Changes of the config: ZeRO with the optimizer on the CPU."""
    return {
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "cpu", **(offload or {})},
            **others,
        }
    }


def optimizer(name, **params):
    return {"optimizer": {"type": name, "params": {"lr": 1e-3, **params}}}


def block(**settings):
    return {"deep_optimizer_states": {"enabled": True, **settings}}


NVME = {"device": "nvme", "nvme_path": "/tmp"}
RESIDENT = block(policy="ratio", ratio=0.5)
EARLY = block(step_before_norm=True)
IN_BACKGROUND = block(checkpoint="background")
CLIPPED = {"gradient_clipping": 1.0}
SCALED = {"fp16": {"enabled": True}, "bf16": {"enabled": False}, "gradient_clipping": 0}


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        (offloaded(0), "stage = 0: set it to 1 to 3"),
        *(
            ({"zero_optimization": {"stage": n}}, "offload_optimizer.device = none")
            for n in (1, 2, 3)
        ),
        ({"zero_optimization": {"stage": 0}}, "stage = 0: .*; offload_optimizer.device = none: "),
        (offloaded(offload=NVME), "offload_optimizer.device = nvme"),
        (offloaded(offload={"ratio": 0.5}), "ratio = 0.5"),
        (offloaded(offload_param=NVME), 'offload_param.device = nvme: set it to "cpu"'),
        (offloaded(offload={"super_offload": True}), "super_offload"),
        (offloaded(zenflow={}), "zenflow"),
        *((optimizer(n), f'{n}: set it to "Adam"') for n in ("Muon", "Lion", "Adagrad", "SGD")),
        (optimizer("Muon"), '"AdamW": Muon needs whole matrices before any tile'),
        (optimizer("Adam", torch_adam=True), "torch_adam = true: take it out"),
        ({"compile": {"deepcompile": True}}, r"compile\.deepcompile = true"),
        *(
            (offloaded(stage) | block, f"deep_optimizer_states.{setting}")
            for stage in (1, 2)
            for block, setting in (
                (RESIDENT, "ratio = 0.5: set it to 1; at st"),
                (EARLY, "step_before_norm = true.* use stage 3"),
            )
        ),
        (EARLY | CLIPPED, r"step_before_norm = true and gradient_clipping = 1.0"),
        (EARLY | SCALED, "step_before_norm = true and fp16: an overflow"),
        (IN_BACKGROUND | {"checkpoint": {"writer": {}}}, "checkpoint.writer and"),
        (IN_BACKGROUND | {"datastates_ckpt": {"enabled": True}}, "datastates_ckpt and"),
        (IN_BACKGROUND | {"checkpoint": {"use_node_local_storage": True}}, "node_local_storage"),
        (IN_BACKGROUND | {"checkpoint": {"checkpoint_serialization": False}}, "set it to true"),
    ],
)
def test_what_the_engine_does_not_do_is_refused_by_name(installed, changes, setting):
    with pytest.raises(ConfigError, match=f"(?i){setting}"):
        read(ds_config(**changes))


@pytest.mark.parametrize(
    ("version", "is_refused"),
    [
        *(("0.15.1", False), ("0.15.2", True), ("0.16.0", True), ("0.18.9", True)),
        *(("0.18.9+cpu", True), ("0.19.0", False), ("0.19.8", False), ("1.0.0", False)),
    ],
)
def test_releases_that_drop_gradients_below_stage_3_are_refused_there(
    installed, monkeypatch, version, is_refused
):
    import deepspeed

    monkeypatch.setattr(deepspeed, "__version__", version)
    read(ds_config())
    config = ds_config(zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}})
    if not is_refused:
        read(config)
        return
    with pytest.raises(UnsupportedDeepSpeedError, match=r"stage = 2: .* drop gradients of all"):
        read(config)


def test_a_disabled_block_restricts_nothing(installed):
    read(ds_config(zero_optimization={"stage": 1}, deep_optimizer_states={"enabled": False}))


def test_what_older_releases_have_of_their_own_is_refused_by_name(installed):
    """The installed release refuses both by itself, if it is 0.19.7 or newer."""
    config = read(ds_config())
    zero = {
        name: getattr(config.zero_config, name) for name in type(config.zero_config).model_fields
    }
    config.zero_config = SimpleNamespace(**zero, mics_shard_size=2)
    config._param_dict = {"compression_training": {"weight_quantization": {}}}
    with pytest.raises(
        ConfigError, match=r"mics_shard_size = 2: take it out; compression_training: take it out"
    ):
        check_supported(config)


MODULE = torch.nn.Linear(2, 2)


def configure(optimizer, settings, original, stage=3, **config):
    engine = SimpleNamespace(
        _config=SimpleNamespace(deep_optimizer_states=settings, **config),
        module=MODULE,
        zero_optimization_stage=lambda: stage,
        managed_gradient_accumulation=lambda: True,
        tput_timer=SimpleNamespace(config=SimpleNamespace(model_fields_set={"synchronized"})),
    )
    return _configure_zero_optimizer(original, engine, optimizer)


def test_a_release_without_the_setting_always_knows_when_a_window_ends():
    assert _is_managed(SimpleNamespace())
    assert not _is_managed(SimpleNamespace(managed_gradient_accumulation=lambda: False))


def cpu_adam(kind=DeepSpeedCPUAdam, **kwargs):
    return kind([torch.nn.Parameter(torch.zeros(4))], **kwargs)


def test_stocks_class_is_ours_while_the_engine_looks_it_up_and_stocks_again_after(monkeypatch):
    from deepspeed.runtime import superoffload
    from deepspeed.runtime.zero import stage3

    # As in a fresh process: the engine imports the subclass of stock's class when it runs.
    monkeypatch.delitem(sys.modules, f"{superoffload.__name__}.superoffload_stage3", raising=False)
    monkeypatch.delattr(superoffload, "superoffload_stage3", raising=False)
    stock, settings, seen = stage3.DeepSpeedZeroOptimizer_Stage3, Settings(enabled=True), []

    def original(engine, optimizer):
        from deepspeed.runtime.superoffload.superoffload_stage3 import SuperOffloadOptimizer_Stage3

        seen.extend((stage3.DeepSpeedZeroOptimizer_Stage3, SuperOffloadOptimizer_Stage3))
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        configure(cpu_adam(), settings, original)
    ours, subclass = seen
    assert ours.func.__name__ == "InterleavedZeroOptimizer"
    assert ours.keywords == {"settings": settings, "is_managed": True}
    assert subclass.__mro__[1] is stock
    assert stage3.DeepSpeedZeroOptimizer_Stage3 is stock


@pytest.mark.parametrize(("given", "numel"), [({}, 0), ({"sub_group_size": 77}, 77)])
def test_below_stage_3_ours_takes_the_place_of_the_name_that_the_engine_looks_up(given, numel):
    from deepspeed.runtime import engine as module
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    stock, settings = module.DeepSpeedZeroOptimizer, Settings(enabled=True)
    ours = configure(
        cpu_adam(),
        settings,
        lambda *_: module.DeepSpeedZeroOptimizer,
        stage=2,
        zero_config=DeepSpeedZeroConfig(**given),
    )
    assert ours.func.__name__ == "InterleavedFlatOptimizer"
    assert ours.keywords.pop("get_module")() is MODULE
    assert ours.keywords == {"settings": settings, "subgroup_numel": numel}
    assert module.DeepSpeedZeroOptimizer is stock


@pytest.mark.parametrize(
    ("adam", "settings"),
    [("any", Settings()), (None, Settings(enabled=True))],  # the second is for inference
    ids=["a disabled block", "no optimizer"],
)
def test_what_is_not_ours_is_left_to_stock(adam, settings):
    from deepspeed.runtime.zero import stage3

    def original(engine, optimizer):
        return stage3.DeepSpeedZeroOptimizer_Stage3, optimizer

    stock = stage3.DeepSpeedZeroOptimizer_Stage3
    assert configure(adam, settings, original) == (stock, adam)


class OwnAdam(DeepSpeedCPUAdam):
    """May step otherwise than ours."""


@pytest.mark.parametrize(
    ("make", "forces", "words"),
    [
        (lambda: torch.optim.AdamW([torch.zeros(4)]), True, "works on DeepSpeedCPUAdam; the optim"),
        (lambda: cpu_adam(OwnAdam), True, "works on DeepSpeedCPUAdam; the optimizer is"),
        (lambda: cpu_adam(OwnAdam), False, 'take "zero_force_ds_cpu_optimizer": false out'),
    ],
    ids=["torch's", "a subclass", "one that the config keeps"],
)
def test_an_optimizer_that_is_not_deepspeeds_cpu_adam_is_refused(make, forces, words):
    with pytest.raises(ConfigError, match=words):
        configure(
            make(), Settings(enabled=True), lambda *_: None, zero_force_ds_cpu_optimizer=forces
        )


def engine_of(config):
    """What our wrappers look at of an engine that has stock's optimizer."""
    stage = config.zero_config.stage
    return SimpleNamespace(_config=config, optimizer=None, zero_optimization_stage=lambda: stage)


WITHOUT_BLOCK = {"train_batch_size": 1, "zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("config", "is_stocks"),
    [
        (WITHOUT_BLOCK, True),
        (ds_config(deep_optimizer_states={"enabled": False}), True),
        (ds_config(), False),
    ],
)
def test_an_engine_without_an_enabled_block_says_that_it_is_stocks(
    installed, monkeypatch, config, is_stocks
):
    told = []
    monkeypatch.setattr("deepspeed.utils.log_dist", lambda *line, **how: told.append((line, how)))
    engine = engine_of(read(config))
    assert _configure_optimizer(lambda *given: given, engine, "adam", []) == (engine, "adam", [])
    assert len(told) == is_stocks
    for (line,), how in told:
        assert f"this engine is stock's (DeepSpeed {installed_version()}, ZeRO stage" in line
        assert 'its config has no enabled "deep_optimizer_states" block' in line
        assert how == {"ranks": [0], "level": logging.WARNING}


@pytest.mark.parametrize("config", [WITHOUT_BLOCK, ds_config(), ds_config(**block(enabled=False))])
def test_an_engine_that_was_made_before_install_is_refused_if_it_asks_for_the_plugin(config):
    engine = engine_of(read(config))
    deep_optimizer_states.install()
    try:
        assert read(WITHOUT_BLOCK).deep_optimizer_states == Settings()
        if config.get("deep_optimizer_states", {}).get("enabled"):
            words = r"made before deep_optimizer_states.install\(\), .* call install\(\) before"
            with pytest.raises(ConfigError, match=words):
                _step(lambda _: "stepped", engine)
        else:
            assert _step(lambda _: "stepped", engine) == "stepped"
    finally:
        deep_optimizer_states.uninstall()


def test_importing_installed_installs_also_by_its_path(monkeypatch):
    """As ms-swift does, which puts the file's folder on Python's path: it does not stay there."""
    monkeypatch.setattr(deep_optimizer_states, "install", lambda: called.append(1))
    called, folder = [], Path(deep_optimizer_states.__file__).parent
    before = [*sys.path]
    monkeypatch.setattr(sys, "path", [str(folder), *before])
    for module in ("installed", "deep_optimizer_states.installed"):
        monkeypatch.delitem(sys.modules, module, raising=False)
        importlib.import_module(module)
        monkeypatch.delitem(sys.modules, module)
    assert called == [1, 1]
    assert sys.path == before
