"""Negative controls: without a rule of the engine the result is not stock's, and with it it is."""

import functools
from unittest import mock

from engines import POLICIES, SMALL_TILES, STRIDE, differences, play, play_late, same, training
from late import late
from rows import Rows
from rows_table import CASES, FIRST_CASE
from seams import FlatHomes, LateScaled, UpdateLauncher, Wait

ROWS = Rows()
run = ROWS.run
ALL_HOST = {**SMALL_TILES, "policy": "all-host"}
CACHED = {**ALL_HOST, "device_memory_bytes": 10**6}
AT_STAGE_2 = f"ZeRO-2: {FIRST_CASE}"
LEFT_OUT = {
    FIRST_CASE: (
        (Wait.GRADS_FLUSHED, STRIDE, "grads"),
        (Wait.GRAD_HOME, STRIDE, "grads"),
        (Wait.PREFETCHED, STRIDE, "H2D"),
        (Wait.STEPPED, STRIDE, "GPU"),
        (Wait.WEIGHTS_READY, STRIDE, ""),
        (Wait.PREFETCHED, CACHED, "H2D"),
        (Wait.GRADS_FLUSHED, CACHED, "grads"),
        (Wait.WEIGHTS_READY, CACHED, ""),
        (Wait.HOME_WHOLE, CACHED, "D2H"),
    ),
    "offload_param": (
        (Wait.WEIGHTS_READY, STRIDE, ""),
        (Wait.STEPPED, POLICIES["ratio 0.5"], "GPU"),
        (Wait.PREFETCHED, STRIDE, "H2D"),
        (Wait.GRADS_FLUSHED, STRIDE, "grads"),
        (Wait.STEPPED, CACHED, "GPU"),
    ),
    AT_STAGE_2: (
        (Wait.PREFETCHED, STRIDE, "H2D"),
        (Wait.STEPPED, STRIDE, "GPU"),
        (Wait.SLOT_FREE, STRIDE, "D2H"),
        (Wait.STAGING_FREE, ALL_HOST, "weights"),
        (Wait.GRADS_FLUSHED, STRIDE, "grads"),
        (Wait.WEIGHTS_READY, STRIDE, ""),
        (Wait.PREFETCHED, CACHED, "H2D"),
        (Wait.GRADS_FLUSHED, CACHED, "grads"),
        (Wait.WEIGHTS_READY, CACHED, ""),
        (Wait.HOME_WHOLE, CACHED, "D2H"),
    ),
}
"""Feature -> a wait, a policy that needs it, and the lane that is as late as it may be then."""


def act_of(feature):
    """Training for as many steps as show that a wait is left out."""
    return training(CASES[feature].changed(steps=3))


@functools.cache
def stock(feature):
    return play(act_of(feature), None)


def differences_of(feature, block=STRIDE):
    return differences(play(act_of(feature), block), stock(feature))


def leave_out(_folder, feature, wait, block, lane):
    act = act_of(feature)
    assert differences(play_late(act, block, {wait}, lane), stock(feature)) != []
    same(play_late(act, block, (), lane), stock(feature))


for feature, waits in LEFT_OUT.items():
    for wait, block, lane in waits:
        given = {"feature": feature, "wait": wait, "block": block, "lane": lane}
        of = ", cached" if block is CACHED else ""
        ROWS.check(f"{wait.name} left out | {feature}{of}", **given)(leave_out)


@ROWS.check("GRAD_READ left out")
def overwritten_too_early(_folder):
    """A gradient is overwritten while the last update reads it, if micro-batches are not summed.

    It shows only if the weights of its parameter were not waited for.
    """
    act = act_of("no clipping, accumulation 1")
    kept = play_late(act, STRIDE, {Wait.WEIGHTS_READY})
    assert differences(play_late(act, STRIDE, {Wait.WEIGHTS_READY, Wait.GRAD_READ}), kept) != []


@ROWS.check("step() does not wait at stage 2", 2)
def without_waiting_in_step(_folder):
    """Updates are launched as at stage 3, where somebody else waits for each tile."""
    launch = UpdateLauncher.launch

    def launch_alone(self, order, grad_scale):
        launch(self, tuple(range(len(self._schedule.tiles))), grad_scale)

    expected = stock(AT_STAGE_2)
    with mock.patch.object(UpdateLauncher, "launch", launch_alone), late():
        found = differences_of(AT_STAGE_2)
    assert found != []
    assert expected is stock(AT_STAGE_2)


def own_tail(homes, subgroup, _tail):
    """As if every subgroup ended in elements that stock's kernel takes one by one."""
    return homes._slices[subgroup].numel - 5


def count_every_subgroup(homes, subgroup):
    state = homes._state_of(homes.group_of(subgroup))
    state["step"] += 1
    return state["step"]


writing = LateScaled.writing
LOOKED_AT, ODD = "ZeRO-2: gradients looked at", "ZeRO-2: sizes that nothing divides"
BROKEN = {
    "old gradients are scaled again": (
        LateScaled,
        "stale_grads_upcast",
        lambda _self: {},
        LOOKED_AT,
        STRIDE,
    ),
    "new gradients owe nothing": (
        LateScaled,
        "writing",
        lambda self, param_id=None: writing(self),
        LOOKED_AT,
        STRIDE,
    ),
    "the tail is the group's": (FlatHomes, "tail_start", own_tail, ODD, ALL_HOST),
    "steps are counted once": (FlatHomes, "count_step", count_every_subgroup, AT_STAGE_2, STRIDE),
}


def break_rule(_folder, rule):
    owner, method, wrong, feature, block = BROKEN[rule]
    with mock.patch.object(owner, method, wrong):
        assert differences_of(feature, block) != []


for rule in BROKEN:
    ROWS.check(f"at stage 2 {rule}", rule=rule)(break_rule)
