import copy
import subprocess
import sys

import pytest

from deep_optimizer_states.config import Settings, read_settings, translate_paper_keys
from deep_optimizer_states.errors import ConfigError

ALL_HOST = {"enabled": True, "policy": "all-host"}


def offload(**keys):
    return {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", **keys}}}


def test_a_block_is_read_and_none_means_stock():
    block = {"enabled": True, "policy": "stride", "stride": 5}
    assert read_settings({"deep_optimizer_states": block}) == Settings(**block)
    assert not read_settings({}).enabled


def test_defaults_are_the_documented_ones():
    block = {"policy": "auto", "ratio": 1.0, "just_in_time_forward": True}
    assert Settings(enabled=True) == Settings(enabled=True, tile_numel=2**25, **block)


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        ({"enbled": True}, 'did you mean "enabled"'),
        ({"machine": "h200x1"}, r'machine" = .h200x1.: leave it out; policy "auto"'),
        ({"enabled": True, "stride": 3}, '"stride" = 3 needs "policy" "stride"'),
        ({"enabled": True, "stride": 0}, r'"deep_optimizer_states.stride" = 0'),
        ({"enabled": True, "policy": "fast"}, "all-host"),
        ({"enabled": True, "policy": "ratio"}, 'needs "ratio" below 1'),
        ({"enabled": True, "ratio": 1.2}, r'"deep_optimizer_states.ratio" = 1.2'),
        ({"enabled": True, "ratio": -0.1}, r'"deep_optimizer_states.ratio" = -0.1'),
        ({"enabled": True, "tile_numel": 0}, r'"deep_optimizer_states.tile_numel" = 0'),
        ({"enabled": True, "tile_numel": 100}, r'"deep_optimizer_states.tile_numel" = 100'),
        ({"enabled": True, "host_memory_bytes": -1}, r"host_memory_bytes\" = -1: .*equal to 0"),
        ({"device_memory_bytes": -1}, r'device_memory_bytes" = -1: give a whole .* "auto"$'),
        ({"device_memory_bytes": "1GB"}, r'_states.device_memory_bytes" = .1GB.: give a whole'),
        ({"checkpoint_memory_bytes": 1.5}, r'_states.checkpoint_memory_bytes" = 1.5: give a whole'),
        (
            {"prefetch_memory_bytes": 9},
            r'prefetch_memory_bytes" = 9: leave it out; "device_memory_bytes" stands',
        ),
        (
            {"keep_grads_on_device": True},
            r'_device" = True: leave it out; "device_memory_bytes" st',
        ),
        ({"step_before_norm": "perhaps"}, r"step_before_norm"),
        (True, "give a table"),
    ],
)
def test_wrong_block_names_key_value_and_remedy(block, complaint):
    with pytest.raises(ConfigError, match=complaint):
        read_settings({"deep_optimizer_states": block})


@pytest.mark.parametrize(
    ("keys", "block"),
    [
        ((0, 0, 0), None),
        ((0, 0, 5), None),
        ((0, 1, 0), {"enabled": True, "policy": "all-host"}),
        ((1, 1, 2), {"enabled": True, "policy": "stride", "stride": 2}),
        ((1, 1, 1), {"enabled": True, "policy": "stride", "stride": 1}),
    ],
)
def test_papers_keys_become_the_block(keys, block):
    names = ("prefetch_optimizer", "part_grads_async", "prefetch_optimizer_gap")
    config = offload(**dict(zip(names, keys, strict=True)), pin_memory=True) | {"bf16": {}}
    untouched = copy.deepcopy(config)
    translated = translate_paper_keys(config)
    assert translated.pop("deep_optimizer_states", None) == block
    assert translated == offload(pin_memory=True) | {"bf16": {}}
    assert config == untouched


def test_papers_twinflow_ratio_becomes_the_resident_share():
    config = offload(prefetch_optimizer=0, part_grads_async=1, ratio=0.8)
    translated = translate_paper_keys(config)
    assert translated["deep_optimizer_states"] == {**ALL_HOST, "ratio": 0.8}
    assert "ratio" not in translated["zero_optimization"]["offload_optimizer"]
    vanilla = translate_paper_keys(offload(part_grads_async=0, ratio=0.8))
    assert vanilla == offload(ratio=0.8)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (offload(prefetch_optimizer=1, prefetch_optimizer_gap=0), "prefetch_optimizer_gap = 0"),
        (offload(prefetch_optimizer=1), "prefetch_optimizer_gap = None"),
        (offload(prefetch_optimizer=1, prefetch_optimizer_gap=True), "gap = True"),
        (offload(prefetch_optimizer=1, prefetch_optimizer_gap=2.0), r"gap = 2\.0"),
        (offload(prefetch_optimizer=1, prefetch_optimizer_gap="2"), "gap = '2'"),
        (offload(prefetch_optimizer=2, prefetch_optimizer_gap=2), "prefetch_optimizer = 2"),
        (offload(part_grads_async=3), "part_grads_async = 3"),
        (offload(part_grads_async=1) | {"deep_optimizer_states": {}}, "keep one of them"),
    ],
)
def test_wrong_paper_keys_are_refused(config, complaint):
    with pytest.raises(ConfigError, match=complaint):
        translate_paper_keys(config)


def test_config_without_offload_is_left_alone():
    for config in ({}, {"zero_optimization": {"stage": 1}}, {"zero_optimization": True}):
        assert translate_paper_keys(config) == config


def test_settings_are_named_by_the_package_and_imported_when_they_are_asked_for():
    code = "import sys, deep_optimizer_states as d; assert 'pydantic' not in sys.modules; "
    code += "assert d.Settings().policy; assert not hasattr(d, 'Setting')"
    subprocess.run([sys.executable, "-c", code], check=True)
