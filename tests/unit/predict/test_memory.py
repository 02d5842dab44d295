"""Arrays of every stage and their sums, held against figures counted by hand."""

import pytest

from deep_optimizer_states.predict import memory as module
from deep_optimizer_states.predict.memory import (
    CPU_PROCESS_BYTES,
    STEPPED_BYTES,
    ZERO_BYTES,
    Moment,
    arrays_of,
    peaks_of,
)
from deep_optimizer_states.predict.model import CountedModel, Model
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


# What stock and this package hold on the host in the step, and a slot of the device, in bytes a
# parameter: stock keeps fp32 gradients, and below stage 3 a 16-bit copy of the weights.
@pytest.mark.parametrize(
    ("stage", "blocks", "stock_bytes", "our_bytes", "slot_bytes"),
    [
        (3, {}, 18, 14, 14),
        (3, {"bf16_master_weights_and_grads": True}, 14, 12, 12),
        (3, {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}, 10, 8, 8),
        (2, {}, 18, 14, 14),
        (1, {}, 18, 14, 14),
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


def test_what_is_not_page_locked_is_not_rounded_up():
    """DeepSpeed 0.19 at stage 2: master weights, gradients and 16-bit weights are page-locked."""
    locked, plain = (
        peaks_of(of(2, **OFFLOADED, locks_state=locks), True).save.host_bytes
        for locks in (True, False)
    )
    process = module.CUDA_PROCESS_BYTES + ZERO_BYTES + STEPPED_BYTES
    assert (plain - process) / NUMEL == pytest.approx(4 + 8 + 4 + 2, abs=0.2)
    rounded = 2 * module.power_of_two(4 * NUMEL) + module.power_of_two(2 * NUMEL)
    assert locked - process == pytest.approx(8 * NUMEL + rounded, rel=0.01)
    config = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert workload_of_json(config, MODEL).locks_state  # DeepSpeed's default
    config["zero_optimization"]["offload_optimizer"]["pin_memory"] = False
    assert not workload_of_json(config, MODEL).locks_state


def test_sums_of_gradients_are_on_the_host_where_stock_keeps_them():
    for stage, is_there in ((1, False), (2, True)):
        found = arrays(of(stage, **OFFLOADED, accumulation=2))
        assert ("sum of gradients" in found) is is_there
    each = sum(module.power_of_two(2 * numel) for numel in MODEL.tensors())
    assert found["sum of gradients"].num_bytes == pytest.approx(each)


@pytest.mark.parametrize(
    ("stage", "dtype", "checkpoint", "own", "shared"),
    [
        (2, "bf16", "", 2, 0),
        (2, "bf16", "bf16", 2, 0),  # the pages of the file are the model
        (2, "bf16", "fp32", 2 + 4, 0),
        (0, "fp32", "bf16", 4 + 2, 0),
        (3, "bf16", "fp32", 0, 4),
        (3, "bf16", "bf16", 0, 2),
    ],
)
def test_a_checkpoint_is_there_while_it_is_read(stage, dtype, checkpoint, own, shared):
    """At stages 0 to 2 by every rank, at stage 3 by one of a node."""
    tensors = MODEL.blocks()
    model = CountedModel(
        "x", 1024, 0, 12, 0, 0, own_blocks=tensors, own_kept=MODEL.kept_of(), checkpoint=checkpoint
    )
    workload = Workload(model, stage=stage, dtype=dtype, dp=4, **DEEPSPEEDS)
    read = [array for array in arrays_of(workload, True) if Moment.READ in array.when]
    found = [
        sum(array.num_bytes for array in read if array.on_host and array.is_shared is is_shared)
        for is_shared in (False, True)
    ]
    assert [num_bytes / NUMEL for num_bytes in found] == pytest.approx([own, shared])
    peak = peaks_of(workload, True).load
    if own + shared > 2:
        assert peak.node_bytes(4) == pytest.approx(
            4 * (peak.host_bytes - shared * NUMEL) + shared * NUMEL
        )
        assert peak.host_bytes > (own + shared) * NUMEL


def test_nvme_keeps_no_state_in_memory():
    cpu, disk = (
        peaks_of(of(optimizer_at=place, subgroup_numel=NUMEL // 100), True).train.host_bytes
        for place in ("cpu", "nvme")
    )
    assert cpu - disk > 12 * NUMEL


def test_tiles_are_apart_as_the_engine_sets_them_apart():
    ours = of(software=None, policy="all-device", **OFFLOADED)
    largest = max(sum(MODEL.blocks()[1]), 4096 * 1024)
    assert arrays(ours)["slots"].num_bytes < 3 * 14 * 2 * largest  # a whole layer at most
    assert ours.schedule.slot_numel > 2 * largest
