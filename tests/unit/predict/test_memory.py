"""Arrays of every stage and their sums, held against figures counted by hand."""

import dataclasses

import pytest

from deep_optimizer_states.predict import memory as module
from deep_optimizer_states.predict.memory import (
    CONTEXT_BYTES,
    CPU_PROCESS_BYTES,
    STEPPED_BYTES,
    WORKSPACE_BYTES,
    ZERO_BYTES,
    Moment,
    arrays_of,
    layer_bytes,
    peaks_of,
    power_of_two,
)
from deep_optimizer_states.predict.model import Model
from deep_optimizer_states.predict.workload import STOCK, Workload, workload_of_json

MODEL = Model("x", 1024, 2816, 12, 16, 16, 16, vocab_size=4096)
NUMEL = MODEL.numel
DEEPSPEEDS = {
    "software": STOCK,
    "optimizer_at": "none",
    "subgroup_numel": 10**9,
    "activation_checkpointing": False,
    "materialized_attention": False,
}
OFFLOADED = {"optimizer_at": "cpu"}


def of(stage=3, **fields):
    return Workload(MODEL, stage=stage, **{**DEEPSPEEDS, **fields})


def arrays(workload, has_gpu=True):
    return {array.name: array for array in arrays_of(workload, has_gpu)}


def bytes_a_parameter(workload, phase):
    """On a CPU, without what no parameter takes."""
    peak = getattr(peaks_of(workload, has_gpu=False), phase)
    own = CPU_PROCESS_BYTES + (ZERO_BYTES if workload.stage else 0)
    own += 0 if phase == "load" else STEPPED_BYTES
    return (peak.host_bytes - own) / NUMEL


# Bytes a parameter, as DeepSpeed 0.19 holds them: weights 2, master weights 4, moments 8, and what
# setting up, the step or the end of backward adds. A bucket is as large as the model, a small one.
@pytest.mark.parametrize(
    ("fields", "load", "train", "save"),
    [
        ({"stage": 0}, 20, 14 + 2 + 4, 14),
        ({"stage": 0, "dtype": "fp32"}, 4, 12 + 4 + 4, 12),
        ({"stage": 1}, None, 14 + 2 + 2 + 4, 14),
        ({"stage": 2}, 10, 14 + 2 + 2 + 4, 14),
        ({"stage": 2, "dtype": "fp32"}, None, 16 + 4 + 4, 16),
        ({"stage": 2, **OFFLOADED}, 12, 20 + 2, 20),
        ({"stage": 3}, 10, 16 + 2 + 2 + 4, 18),
        ({"stage": 3, "dtype": "fp32"}, None, 24 + 8, 24),
        ({"stage": 3, **OFFLOADED}, 14, 22 + 4, 22),
        ({"stage": 3, **OFFLOADED, "weights_at": "cpu"}, None, 22 + 4, 22),
    ],
)
def test_states_are_counted_byte_by_byte(fields, load, train, save):
    workload = of(**fields)
    if load is not None:
        assert bytes_a_parameter(workload, "load") == pytest.approx(load, abs=0.25)
    assert bytes_a_parameter(workload, "train") == pytest.approx(train, abs=0.55)
    assert bytes_a_parameter(workload, "save") == pytest.approx(save, abs=0.25)


def test_a_gpu_splits_what_a_cpu_holds_together():
    workload = of(**OFFLOADED, bucket_numel=NUMEL)
    on_gpu, on_cpu = peaks_of(workload, True), peaks_of(workload, False)
    device = on_gpu.train.device_bytes - CONTEXT_BYTES - WORKSPACE_BYTES
    assert device == pytest.approx(8 * NUMEL, rel=0.1)  # weights, a bucket and its copies
    state = sum(a.num_bytes for a in on_gpu.train.arrays if a.on_host)
    # Both kinds of gradients are page-locked, which torch rounds up to powers of two.
    assert state == pytest.approx(12 * NUMEL + power_of_two(2 * NUMEL) + power_of_two(4 * NUMEL))
    assert sum(a.num_bytes for a in on_cpu.save.arrays if a.on_host) == pytest.approx(18 * NUMEL)
    assert on_cpu.train.device_bytes == 0
    for has_gpu, numel in ((True, 500_000_000), (False, NUMEL)):  # a CPU's is what is written to
        assert arrays(of(), has_gpu)["bucket of gradients"].num_bytes == 2 * numel


def test_checkpointing_keeps_inputs_and_one_layer():
    kept = of(micro_batch_size=64)
    again = dataclasses.replace(kept, activation_checkpointing=True)
    tokens = 64 * 16
    layers, one = layer_bytes(kept)
    assert layers == pytest.approx(12 * one)
    assert layer_bytes(again) == (2 * tokens * 1024 * 12, one)
    assert arrays(again)["logits and their gradients"].num_bytes == 6 * tokens * 4096


def test_a_full_bucket_meets_the_activations_of_the_layers_left():
    workload = of(micro_batch_size=256, bucket_numel=NUMEL // 10, **OFFLOADED)
    left = arrays(workload)["activations of the layers left"]
    assert left.num_bytes == pytest.approx(0.9 * layer_bytes(workload)[0], rel=0.01)
    assert left.when == {Moment.FULL}


# What stock and this package hold on the host in the step, and a slot of the device, in bytes a
# parameter: stock keeps fp32 gradients at stage 3, and a 16-bit copy of the weights below it.
@pytest.mark.parametrize(
    ("stage", "blocks", "stock_bytes", "our_bytes", "slot_bytes"),
    [
        (3, {}, 18, 14, 14),
        (3, {"bf16_master_weights_and_grads": True}, 14, 12, 12),
        (3, {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}, 10, 8, 8),
        (2, {}, 18, 16, 16),
        (1, {}, 18, 16, 16),
    ],
)
def test_states_take_what_they_are(stage, blocks, stock_bytes, our_bytes, slot_bytes):
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}, "sub_group_size": NUMEL // 8}
    config = {"bf16": {"enabled": True, **blocks}, "zero_optimization": zero}
    plugin = {"enabled": True, "policy": "stride", "tile_numel": 2**20}
    own = config | {"deep_optimizer_states": plugin}
    stock, ours = (workload_of_json(each, MODEL, dp=1) for each in (config, own))
    host = [
        sum(
            array.num_bytes
            for name, array in arrays(each, False).items()
            if array.on_host and Moment.STEP in array.when and name != "gradient on its way"
        )
        for each in (stock, ours)
    ]
    assert host[0] == pytest.approx(stock_bytes * NUMEL, rel=0.01)
    assert host[1] == pytest.approx(our_bytes * NUMEL, rel=0.05)
    slots = arrays(ours)["slots"]
    assert (slots.num_bytes, slots.on_host) == (3 * slot_bytes * 2**20, False)


def test_weights_in_host_memory_are_page_locked_there_and_leave_the_device():
    ours = of(
        software=None, subgroup_numel=NUMEL // 8, policy="stride", offload_ratio=0.7,
        tile_numel=2**20, **OFFLOADED,
    )  # fmt: skip
    named = [arrays(each) for each in (ours, dataclasses.replace(ours, weights_at="cpu"))]
    weights = [found["weights"] for found in named]
    assert [array.on_host for array in weights] == [False, True]
    assert weights[1].num_bytes == power_of_two(2 * NUMEL) > weights[0].num_bytes
    assert "weights on their way to the device" not in named[1]
    assert named[1]["slots"].num_bytes == 3 * 16 * 2**20 + 2 * 2 * 2**20
    assert ["gathered weights" in found for found in named] == [False, True]


def test_tiles_are_apart_as_the_engine_sets_them_apart():
    """The engine's own figure lies where torch is imported, which predictions never do."""
    from deep_optimizer_states.adapter.zero3 import gathers

    assert module.MOST_APART == gathers.MOST_APART
    ours = of(software=None, policy="all-device", **OFFLOADED)
    largest = max(sum(MODEL.blocks()[1]), 4096 * 1024)
    assert arrays(ours)["slots"].num_bytes < 3 * 14 * 2 * largest  # a whole layer at most
    assert ours.schedule.slot_numel > 2 * largest
