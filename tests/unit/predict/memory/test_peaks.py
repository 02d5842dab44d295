"""Arrays of every stage and their sums, held against figures counted by hand."""

import dataclasses

import pytest

from deep_optimizer_states.predict.machine import load_machine
from deep_optimizer_states.predict.memory import setting as setting_module
from deep_optimizer_states.predict.memory.architecture import architecture_of_shape
from deep_optimizer_states.predict.memory.arrays import Moment, arrays_of, layer_bytes
from deep_optimizer_states.predict.memory.offload import memory_of, setting_of_workload
from deep_optimizer_states.predict.memory.peaks import (
    CONTEXT_BYTES,
    CPU_PROCESS_BYTES,
    CUDA_PROCESS_BYTES,
    STEPPED_BYTES,
    WORKSPACE_BYTES,
    ZERO_BYTES,
    peaks_of,
)
from deep_optimizer_states.predict.memory.setting import Plugin, Setting, setting_of
from deep_optimizer_states.predict.model import ModelShape, load_model
from deep_optimizer_states.predict.workload import STOCK, Workload, WorkloadError, power_of_two

MODEL = architecture_of_shape(ModelShape("x", 1024, 2816, 12, 16, 16, 16, vocab_size=4096))
NUMEL = MODEL.numel


def of(stage=3, **fields):
    return Setting(MODEL, stage=stage, **fields)


def bytes_a_parameter(setting, phase):
    """On a CPU, without what no parameter takes."""
    peak = getattr(peaks_of(setting, has_gpu=False), phase)
    own = CPU_PROCESS_BYTES + (ZERO_BYTES if setting.stage else 0)
    own += 0 if phase == "load" else STEPPED_BYTES
    return (peak.host_bytes - own) / NUMEL


# Bytes a parameter, as DeepSpeed 0.19 holds them: weights 2, master weights 4, moments 8, and what
# the step or the end of backward adds. A bucket is as large as the model, which is small.
@pytest.mark.parametrize(
    ("fields", "train", "save"),
    [
        ({"stage": 0}, 14 + 2 + 4, 14),
        ({"stage": 0, "dtype": "fp32"}, 12 + 4 + 4, 12),
        ({"stage": 1}, 14 + 2 + 2 + 4, 14),
        ({"stage": 2}, 14 + 2 + 2 + 4, 14),
        ({"stage": 2, "dtype": "fp32"}, 16 + 4 + 4, 16),
        ({"stage": 2, "optimizer_at": "cpu"}, 20 + 2, 20),
        ({"stage": 3}, 16 + 2 + 2 + 4, 18),
        ({"stage": 3, "dtype": "fp32"}, 24 + 8, 24),
        ({"stage": 3, "optimizer_at": "cpu"}, 22 + 4, 22),
        ({"stage": 3, "optimizer_at": "cpu", "weights_at": "cpu"}, 22 + 4, 22),
    ],
)
def test_states_are_counted_byte_by_byte(fields, train, save):
    setting = of(**fields)
    assert bytes_a_parameter(setting, "train") == pytest.approx(train, abs=0.55)
    assert bytes_a_parameter(setting, "save") == pytest.approx(save, abs=0.25)


@pytest.mark.parametrize(
    ("fields", "load"),
    [
        ({"stage": 0}, 20),
        ({"stage": 0, "dtype": "fp32"}, 4),
        ({"stage": 2}, 10),
        ({"stage": 2, "optimizer_at": "cpu"}, 12),
        ({"stage": 3}, 10),
        ({"stage": 3, "optimizer_at": "cpu"}, 14),
    ],
)
def test_setting_up_takes_its_own_arrays(fields, load):
    assert bytes_a_parameter(of(**fields), "load") == pytest.approx(load, abs=0.25)


def test_a_gpu_splits_what_a_cpu_holds_together():
    setting = of(optimizer_at="cpu", bucket_numel=NUMEL)
    on_gpu, on_cpu = peaks_of(setting, True), peaks_of(setting, False)
    device = on_gpu.train.device_bytes - CONTEXT_BYTES - WORKSPACE_BYTES
    assert device == pytest.approx(8 * NUMEL, rel=0.1)  # weights, a bucket and its copies
    state = sum(a.num_bytes for a in on_gpu.train.arrays if a.on_host)
    # Both kinds of gradients are page-locked, which torch rounds up to powers of two.
    assert state == pytest.approx(12 * NUMEL + power_of_two(2 * NUMEL) + power_of_two(4 * NUMEL))
    assert sum(a.num_bytes for a in on_cpu.save.arrays if a.on_host) == pytest.approx(18 * NUMEL)
    assert on_cpu.train.device_bytes == 0


def test_a_gpu_holds_a_whole_bucket_and_a_cpu_what_is_written_to():
    for has_gpu, numel in ((True, 500_000_000), (False, NUMEL)):
        arrays = {array.name: array for array in arrays_of(of(), has_gpu)}
        assert arrays["bucket of gradients"].num_bytes == 2 * numel


@pytest.mark.parametrize(("stage", "shared"), [(0, 0), (1, 12), (2, 12), (3, 16)])
def test_ranks_share_the_state(stage, shared):
    one, four = (peaks_of(of(stage, dp=dp), True).save for dp in (1, 4))
    saved = one.device_bytes - four.device_bytes
    assert saved == pytest.approx(0.75 * shared * NUMEL, rel=0.01)


def test_smaller_buckets_and_subgroups_take_less():
    whole = peaks_of(of(), False).train.host_bytes
    subgroup = peaks_of(of(subgroup_numel=NUMEL // 4), False).train
    assert whole - subgroup.host_bytes > 1.9 * NUMEL
    assert subgroup.when is not Moment.STEP
    small = peaks_of(of(subgroup_numel=NUMEL // 4, bucket_numel=NUMEL // 8), False).train
    assert subgroup.host_bytes - small.host_bytes > 1.9 * NUMEL


def test_checkpointing_keeps_inputs_and_one_layer():
    kept = of(micro_batch=64)
    again = dataclasses.replace(kept, checkpointing=True)
    tokens = 64 * 16
    layers, one = layer_bytes(kept)
    assert layers == pytest.approx(12 * one)
    assert layer_bytes(again) == (2 * tokens * 1024 * 12, one)
    logits = [a for a in arrays_of(again, True) if a.name == "logits and their gradients"]
    assert [a.num_bytes for a in logits] == [6 * tokens * 4096]


def test_a_full_bucket_meets_the_activations_of_the_layers_left():
    setting = of(micro_batch=256, bucket_numel=NUMEL // 10, optimizer_at="cpu")
    arrays = {array.name: array for array in arrays_of(setting, True)}
    left = arrays["activations of the layers left"]
    assert left.num_bytes == pytest.approx(0.9 * layer_bytes(setting)[0], rel=0.01)
    assert left.when == {Moment.FULL}


def test_the_plugin_has_no_fp32_gradients_and_three_slots():
    stock = of(optimizer_at="cpu", subgroup_numel=NUMEL // 8)
    ours = dataclasses.replace(stock, plugin=Plugin("stride", tile_numel=2**20))
    host = [
        sum(a.num_bytes for a in arrays_of(each, False) if a.on_host and Moment.STEP in a.when)
        for each in (stock, ours)
    ]
    assert host[0] == pytest.approx(18 * NUMEL, rel=0.01)
    assert host[1] == pytest.approx(14 * NUMEL, rel=0.05)
    slots = next(a for a in arrays_of(ours, True) if a.name == "slots")
    assert slots.num_bytes == 3 * 14 * 2**20
    assert not slots.on_host


def test_weights_in_host_memory_are_page_locked_there_and_leave_the_device():
    ours = of(optimizer_at="cpu", subgroup_numel=NUMEL // 8, plugin=Plugin("stride", 2, 0.7, 2**20))
    offloaded = dataclasses.replace(ours, weights_at="cpu")
    named = [{a.name: a for a in arrays_of(each, True)} for each in (ours, offloaded)]
    weights = [arrays["weights"] for arrays in named]
    assert [array.on_host for array in weights] == [False, True]
    assert weights[1].num_bytes == power_of_two(2 * NUMEL) > weights[0].num_bytes
    assert "weights on their way to the device" not in named[1]
    assert named[1]["slots"].num_bytes == 3 * 16 * 2**20 + 2 * 2 * 2**20
    assert "gathered weights" in named[1]
    assert "gathered weights" not in named[0]


@pytest.mark.parametrize(
    ("blocks", "stock_bytes", "our_bytes", "slot_bytes"),
    [
        ({"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}, 10, 8, 8),
        ({"bf16_master_weights_and_grads": True}, 14, 12, 12),
        ({}, 18, 14, 14),
    ],
)
def test_16_bit_states_take_what_they_are(blocks, stock_bytes, our_bytes, slot_bytes):
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "sub_group_size": NUMEL // 8}
    config = {"bf16": {"enabled": True, **blocks}, "zero_optimization": zero}
    plugin = {"enabled": True, "policy": "stride", "tile_numel": 2**20}
    stock = setting_of(config, MODEL)
    ours = setting_of(config | {"deep_optimizer_states": plugin}, MODEL)
    host = [
        sum(a.num_bytes for a in arrays_of(each, False) if a.on_host and Moment.STEP in a.when)
        for each in (stock, ours)
    ]
    assert host[0] == pytest.approx(stock_bytes * NUMEL, rel=0.01)
    assert host[1] == pytest.approx(our_bytes * NUMEL, rel=0.05)
    slots = next(a for a in arrays_of(ours, True) if a.name == "slots")
    assert slots.num_bytes == 3 * slot_bytes * 2**20


def test_types_of_state_are_read_as_deepspeed_reads_them():
    narrow = {"optimizer": {"params": {"fp32_optimizer_states": False}}}
    masters = {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}
    for config, types in (
        ({"fp16": {"enabled": True}}, ("fp32", "fp32")),
        (narrow, ("fp32", "fp32")),  # moments as the master weights, which are fp32
        (masters, ("fp16", "fp32")),
        ({**masters, **narrow}, ("fp16", "fp16")),
    ):
        found = setting_of(config, MODEL)
        assert (found.masters, found.moments) == types


@pytest.mark.parametrize("stage", [1, 2])
def test_below_stage_3_the_plugin_saves_the_16_bit_copy_of_the_weights(stage):
    stock = of(stage, optimizer_at="cpu", subgroup_numel=NUMEL // 8)
    ours = dataclasses.replace(stock, plugin=Plugin("stride", tile_numel=2**20))
    host = [
        sum(a.num_bytes for a in arrays_of(each, False) if a.on_host and Moment.STEP in a.when)
        - next(a.num_bytes for a in arrays_of(each, False) if a.name == "gradient on its way")
        for each in (stock, ours)
    ]
    assert host[0] == pytest.approx(18 * NUMEL, rel=0.01)
    assert host[1] == pytest.approx(16 * NUMEL + 2 * 2 * 2**20, rel=0.001)
    slots = next(a for a in arrays_of(ours, True) if a.name == "slots")
    assert slots.num_bytes == 3 * 16 * 2**20


@pytest.mark.parametrize(("zero", "numel"), [({}, 2**20), ({"sub_group_size": 3e6}, 3e6)])
def test_below_stage_3_subgroups_are_tiles_unless_they_are_given(zero, numel):
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    block = {"enabled": True, "tile_numel": 2**20}
    config = {"zero_optimization": offload | zero, "deep_optimizer_states": block}
    assert setting_of(config, MODEL, 2).subgroups[0] == numel


def test_nvme_keeps_no_state_in_memory():
    cpu, disk = (
        peaks_of(of(optimizer_at=place, subgroup_numel=NUMEL // 100), True).train.host_bytes
        for place in ("cpu", "nvme")
    )
    assert cpu - disk > 12 * NUMEL


def test_a_configuration_says_what_a_setting_is():
    config = {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "reduce_bucket_size": 1e6,
            "sub_group_size": 1e7,
            "stage3_max_live_parameters": 1e8,
            "overlap_comm": False,
        },
        "deep_optimizer_states": {"enabled": True, "policy": "stride", "stride": 3},
    }
    got = setting_of(config, MODEL, 2, sequence=8)
    assert got == Setting(
        MODEL, 3, "bf16", 2, 2, 8, 3, optimizer_at="cpu", bucket_numel=10**6,
        subgroup_numel=10**7, live_numel=10**8, overlaps=False, plugin=Plugin("stride", 3),
    )  # fmt: skip
    assert setting_of({}, MODEL) == Setting(MODEL, 0, "fp32")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stage": 4}, "stage = 4: give 0, 1, 2 or 3"),
        ({"optimizer_at": "disk"}, "optimizer_at = 'disk'"),
        ({"dp": 0}, "dp = 0: give a whole number"),
    ],
)
def test_settings_that_cannot_be_are_refused(fields, message):
    with pytest.raises(WorkloadError, match=message):
        of(**fields)


def test_tiles_are_apart_as_the_engine_sets_them_apart():
    """The engine's own figure lies where torch is imported, which predictions never do."""
    from deep_optimizer_states.adapter.zero3 import gathers

    assert setting_module.MOST_APART == gathers.MOST_APART
    ours = of(optimizer_at="cpu", plugin=Plugin("all-device"))
    parts = [tile.numel for tile in ours.persistent]
    assert parts == [1024] * (2 * 12 + 1)  # the norms
    lengths = {tile.numel for tile in ours.schedule.tiles if tile.numel > 1024}
    assert max(lengths) < 2 * max(sum(MODEL.blocks[1]), 4096 * 1024)


@pytest.mark.parametrize("weights_on_host", [False, True])
@pytest.mark.parametrize("policy", ["all-host", "stride", "dynamic", "stock"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_performance_models_workloads_take_what_the_arrays_take(
    policy, accumulation, weights_on_host
):
    """Their update is summed apart, since the paper's software is among them: no sum may drift."""
    software = STOCK if policy == "stock" else None
    policy = "all-host" if software else policy
    workload = Workload(
        load_model("7B")[0],
        software,
        accumulation=accumulation,
        subgroup_numel=100_000_000,
        keeps_device_grads=False,
        weights_on_host=weights_on_host,
    )
    one = memory_of(workload, load_machine("h200x1"), policy)
    plugin = None if software else Plugin(policy, workload.stride)
    other = peaks_of(dataclasses.replace(setting_of_workload(workload), plugin=plugin), True).train
    assert one.device_bytes + CONTEXT_BYTES == pytest.approx(other.device_bytes, rel=1e-6)
    framework = ZERO_BYTES + STEPPED_BYTES
    assert one.host_bytes + framework == pytest.approx(other.host_bytes, rel=1e-3)
    assert one.page_locked_bytes == one.host_bytes - CUDA_PROCESS_BYTES
