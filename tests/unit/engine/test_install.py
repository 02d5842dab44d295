import sys
from types import SimpleNamespace

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

import deep_optimizer_states
from deep_optimizer_states.adapter import guard as deepspeed_guard
from deep_optimizer_states.adapter.hooks import (
    _configure_zero_optimizer,
    _is_managed,
    check_supported,
)
from deep_optimizer_states.config import Settings
from deep_optimizer_states.errors import ConfigError, UnsupportedDeepSpeedError

STAGE3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"


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


def test_install_twice_and_uninstall_leaves_deepspeed_as_it_was():
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine

    def methods():
        return DeepSpeedConfig._initialize_params, DeepSpeedEngine._configure_zero_optimizer

    before = methods()
    deep_optimizer_states.install()
    once = methods()
    deep_optimizer_states.install()
    assert methods() == once
    assert not set(once) & set(before)
    deep_optimizer_states.uninstall()
    assert methods() == before


def test_installing_while_deepspeed_is_first_imported_wraps_nothing_twice(monkeypatch):
    """As in a program that installs the plugin itself and is started by ``run``."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    module = sys.modules[deep_optimizer_states.install.__module__]
    before, check, nested = DeepSpeedEngine.step, module.check_deepspeed, []

    def import_deepspeed_with_its_hook(*how):
        refused = check(*how)
        if not nested:
            nested.append(1)
            deep_optimizer_states.install()
        return refused

    monkeypatch.setattr(module, "check_deepspeed", import_deepspeed_with_its_hook)
    deep_optimizer_states.install()
    try:
        assert DeepSpeedEngine.step.__wrapped__ is before
    finally:
        deep_optimizer_states.uninstall()
    assert DeepSpeedEngine.step is before


def test_block_is_accepted(installed):
    assert read(ds_config()).deep_optimizer_states.policy == "stride"


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize(
    "offload_param", [{}, {"device": "none"}, {"device": "cpu", "pin_memory": False}]
)
def test_what_changes_no_arithmetic_is_accepted(installed, name, offload_param):
    zero = ds_config()["zero_optimization"] | {"offload_param": offload_param}
    optimizer = {"type": name, "params": {"torch_adam": False}}
    read(ds_config(zero_optimization=zero, optimizer=optimizer))


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


NVME = {"device": "nvme", "nvme_path": "/tmp"}


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
    ],
)
def test_what_the_engine_does_not_do_is_refused_by_name(installed, changes, setting):
    with pytest.raises(ConfigError, match=f"(?i){setting}"):
        read(ds_config(**changes))


@pytest.mark.parametrize("stage", [1, 2])
def test_below_stage_3_the_block_is_accepted_and_a_resident_share_refused(installed, stage):
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    assert read(ds_config(zero_optimization=zero)).deep_optimizer_states.enabled
    block = {"enabled": True, "policy": "ratio", "ratio": 0.5}
    with pytest.raises(ConfigError, match=r"deep_optimizer_states.ratio = 0.5: set it to 1; at st"):
        read(ds_config(zero_optimization=zero, deep_optimizer_states=block))


EARLY = {"enabled": True, "step_before_norm": True}
AHEAD = {"enabled": True, "prefetch_memory_bytes": "auto"}


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("block", "setting"),
    [(EARLY, "step_before_norm = true"), (AHEAD, r"prefetch_memory_bytes = 'auto': set it to 0")],
)
def test_work_in_backward_is_refused_below_stage_3(installed, stage, block, setting):
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    with pytest.raises(ConfigError, match=f"deep_optimizer_states.{setting}.* use stage 3"):
        read(ds_config(zero_optimization=zero, deep_optimizer_states=block))


def test_no_step_comes_before_a_norm_that_decides_anything(installed):
    with pytest.raises(ConfigError, match=r"step_before_norm = true and gradient_clipping = 1.0"):
        read(ds_config(gradient_clipping=1.0, deep_optimizer_states=EARLY))
    fp16 = {"fp16": {"enabled": True}, "bf16": {"enabled": False}, "gradient_clipping": 0}
    with pytest.raises(ConfigError, match="step_before_norm = true and fp16: an overflow"):
        read(ds_config(**fp16, deep_optimizer_states=EARLY))
    read(ds_config(gradient_clipping=0, deep_optimizer_states=EARLY))
    read(ds_config(gradient_clipping=1.0, deep_optimizer_states=AHEAD))


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


@pytest.mark.parametrize(
    "changes",
    [
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        {"bf16": {}, "fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
    ],
)
def test_masters_of_16_bits_are_taken(installed, changes):
    assert read(ds_config(**changes)).deep_optimizer_states.enabled


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


def configure(optimizer, settings, original, module=None, stage=3, forces_cpu_adam=True):
    config = SimpleNamespace(
        deep_optimizer_states=settings, zero_force_ds_cpu_optimizer=forces_cpu_adam
    )
    engine = SimpleNamespace(
        _config=config,
        module=module,
        zero_optimization_stage=lambda: stage,
        managed_gradient_accumulation=lambda: True,
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
    stock, settings, seen = (
        stage3.DeepSpeedZeroOptimizer_Stage3,
        Settings(enabled=True, stride=5),
        [],
    )

    def original(engine, optimizer):
        from deepspeed.runtime.superoffload.superoffload_stage3 import SuperOffloadOptimizer_Stage3

        seen.extend((stage3.DeepSpeedZeroOptimizer_Stage3, SuperOffloadOptimizer_Stage3))
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        configure(cpu_adam(), settings, original)
    ours, subclass = seen
    assert (ours.func.__name__, ours.keywords) == (
        "InterleavedZeroOptimizer",
        {"settings": settings, "is_managed": True},
    )
    assert subclass.__mro__[1] is stock
    assert stage3.DeepSpeedZeroOptimizer_Stage3 is stock


@pytest.mark.parametrize("is_given", [False, True])
def test_below_stage_3_ours_takes_the_place_of_the_name_that_the_engine_looks_up(is_given):
    from deepspeed.runtime import engine as module
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    stock, seen = module.DeepSpeedZeroOptimizer, []
    settings, engine = Settings(enabled=True), SimpleNamespace(module=None)
    zero = DeepSpeedZeroConfig(**({"sub_group_size": 77} if is_given else {}))
    engine._config = SimpleNamespace(deep_optimizer_states=settings, zero_config=zero)
    engine.zero_optimization_stage = lambda: 2
    made = _configure_zero_optimizer(
        lambda engine, optimizer: seen.append(module.DeepSpeedZeroOptimizer), engine, cpu_adam()
    )
    assert made is None
    assert (seen[0].func.__name__, seen[0].keywords) == (
        "InterleavedFlatOptimizer",
        {"settings": settings, "subgroup_numel": 77 if is_given else 0},
    )
    assert module.DeepSpeedZeroOptimizer is stock


def test_a_pipeline_is_refused_below_stage_3_and_left_to_deepspeed_at_stage_3():
    from deepspeed.pipe import PipelineModule

    pipeline, settings = object.__new__(PipelineModule), Settings(enabled=True)
    assert configure(cpu_adam(), settings, lambda *_: "stock's", pipeline) == "stock's"
    with pytest.raises(ConfigError, match="does not work with a PipelineModule"):
        configure(cpu_adam(), settings, lambda *_: "stock's", pipeline, stage=1)


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
    "make",
    [
        lambda: torch.optim.AdamW([torch.zeros(4)]),
        lambda: cpu_adam(OwnAdam),
    ],
    ids=["torch's", "a subclass"],
)
def test_an_optimizer_that_is_not_deepspeeds_cpu_adam_is_refused(make):
    with pytest.raises(ConfigError, match="works on DeepSpeedCPUAdam; the optimizer is"):
        configure(make(), Settings(enabled=True), lambda engine, optimizer: None)


def test_a_config_that_keeps_the_users_adam_is_told_which_key_to_take_out():
    adam = torch.optim.AdamW([torch.zeros(4)])
    with pytest.raises(ConfigError, match='take "zero_force_ds_cpu_optimizer": false out'):
        configure(adam, Settings(enabled=True), lambda *_: None, forces_cpu_adam=False)


def test_disabled_block_restricts_nothing(installed):
    read(ds_config(zero_optimization={"stage": 1}, deep_optimizer_states={"enabled": False}))


def test_a_changed_method_is_named(monkeypatch):
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    def unscale_and_clip_grads(self, sub_group_id, total_norm):
        """Another DeepSpeed's."""

    monkeypatch.setattr(
        DeepSpeedZeroOptimizer_Stage3, "unscale_and_clip_grads", unscale_and_clip_grads
    )
    refused = deepspeed_guard.check_deepspeed()
    assert "DeepSpeedZeroOptimizer_Stage3.unscale_and_clip_grads;" in refused[3]


def test_a_missing_method_is_named(monkeypatch):
    monkeypatch.setitem(deepspeed_guard.FINGERPRINTS, STAGE3, {"no_such_method": "0" * 12})
    assert "no_such_method" in deepspeed_guard.check_deepspeed()[3]


def test_no_two_fingerprints_are_equal():
    """A decorator that hides what it wraps would give all its methods one hash."""
    hashes = [h for methods in deepspeed_guard.FINGERPRINTS.values() for h in methods.values()]
    assert len(set(hashes)) == len(hashes)


def test_a_change_below_a_decorator_is_seen(monkeypatch):
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.utils import instrument_w_nvtx

    @instrument_w_nvtx
    def partition_grads(self, params_to_release, grad_partitions):
        """Another DeepSpeed's."""

    monkeypatch.setattr(DeepSpeedZeroOptimizer_Stage3, "partition_grads", partition_grads)
    assert "partition_grads" in deepspeed_guard.check_deepspeed()[3]
