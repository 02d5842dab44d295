"""State that stays on the device comes, is looked at, written and given back: in stock's bits."""

import contextlib
import functools
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)
from engines import SMALL_TILES, STRIDE, WIDTH, Trial, answer, differences, moving, play, same
from limited_device import LimitedDevice, Memory
from rows import Rows
from rows_failures import updates_end_when_waited_for
from rows_table import CASES, FIRST_CASE, UNUSED_BY_TURNS, evaluate_between, keep
from seams import (
    HEADROOM,
    HostRoom,
    LateScaled,
    Sample,
    TileCache,
    cache,
    inside,
    launcher,
    zero12,
)

ROWS, MORE = Rows(), Rows()
"""The second are of the extent ``all``: what the first show at another stage, or by another way."""
UNCLIPPED = {"gradient_clipping": 0}
CASE = {
    stage: CASES[name + FIRST_CASE].changed(config=UNCLIPPED)
    for stage, name in {1: "ZeRO-1: ", 2: "ZeRO-2: ", 3: ""}.items()
}
LIMIT = 60_000
STAYS = {**STRIDE, "policy": "all-host", "device_memory_bytes": LIMIT}
ALL_STAYS = {**STAYS, "device_memory_bytes": 10**9}
AUTO = {**STAYS, "device_memory_bytes": "auto"}
LIMIT_S = 60
BEFORE = 3
"""Steps before those that are looked at: some state stays from the first on."""


def run(report, extent, folder):
    with (
        # What is sent is then a matter of memory, and not of time.
        mock.patch.object(cache, "MOST_UNDER_WAY", 1000),
        mock.patch.object(cache, "LOOK_S", 0.0),
    ):
        (MORE if extent == "all" else ROWS).run(report, extent, folder)


def cache_of(engine):
    return inside(engine, "launcher").cache


def train_on(trial, engine, steps, between=None):
    """Train whole windows, with something done between the last backward and each step."""
    for _ in range(steps):
        for _ in range(engine.gradient_accumulation_steps() - 1):
            trial.backward(engine)
            engine.step()
        trial.backward(engine)
        if between:
            between(engine)
        trial.step(engine)
    trial.see("what was seen", getattr(engine, "seen", []))


@functools.cache
def stock(stage, between, steps):
    """What stock does, with what does no more to it than to look, or to write what is written."""
    with Trial(None) as trial:
        engine = trial.open(CASE[stage])
        trial.train(engine, BEFORE)
        train_on(trial, engine, steps, between)
    return trial


def stay(block=STAYS, between=None, steps=6, memory=None, stage=3, in_stock=...):
    """Train on, and compare with stock; return the tiles on the device before each step.

    Args:
        block: The plugin's.
        between: What is done between the last backward and each step.
        steps: How many are looked at.
        memory: Of the device.
        stage: ZeRO's.
        in_stock: What is done in stock, if that is something else.
    """
    held = []
    with Trial(block, memory=memory) as trial:
        engine = trial.open(CASE[stage])
        trial.train(engine, BEFORE)
        cache = cache_of(engine)

        def watch(engine):
            held.append(len(cache.tiles))
            if between:
                between(engine)
                held.append(len(cache.tiles))
            assert memory is not None or cache.taken_bytes <= block["device_memory_bytes"]

        train_on(trial, engine, steps, watch)
    same(trial, stock(stage, between if in_stock is ... else in_stock, steps))
    return held


# Looks and writes between backward and step().


def masters_of(engine):
    of_stage = "fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"
    names = [name for name in of_stage if hasattr(engine.optimizer, name)]
    return getattr(engine.optimizer, names[0])


def write_masters(engine):
    for master in masters_of(engine):
        master.data.mul_(1.5)


def set_masters(engine):
    weight = engine.module.layers[3].weight
    safe_set_full_fp32_param(weight, torch.full_like(weight, 0.01, dtype=torch.float32))


def set_gradients(engine):
    weight = engine.module.layers[2].weight
    safe_set_full_grad(weight, torch.full_like(weight, 0.01, dtype=torch.float32))


def evaluate(engine):
    evaluate_between(engine, 0)


def look_at_masters(engine):
    keep(engine, safe_get_full_fp32_param(engine.module.layers[3].weight))


def look_at_everything(engine):
    for parameter in engine.module.parameters():
        keep(engine, safe_get_full_fp32_param(parameter))
        keep(engine, safe_get_full_optimizer_state(parameter, "exp_avg_sq"))
        keep(engine, safe_get_full_grad(parameter))


def read_state_dict(engine):
    """By hand, which no checkpoint's own preparation precedes."""
    found = engine.optimizer.state_dict()
    states = found["base_optimizer_state"]
    states = states["state"].values() if isinstance(states, dict) else states
    for state in states:
        keep(engine, state["exp_avg"])
    for master in found["single_partition_of_fp32_groups"]:
        keep(engine, master)


WRITES = (write_masters, set_masters, set_gradients)


def repeated(_folder, stage):
    """By state from before the update; what comes ahead arrives once that was looked at."""
    is_looked_at, fetch = threading.Event(), TileCache._fetch

    def fetch_late(cache, tile, place):
        cache.device.h2d.submit("what holds it up", lambda: is_looked_at.wait(LIMIT_S))
        fetch(cache, tile, place)

    def look(work):
        found = Sample(work)
        is_looked_at.set()
        return found

    def act(trial):
        engine = trial.open(CASE[stage])
        for _ in range(BEFORE):
            is_looked_at.clear()
            trial.train(engine, 1)
            write_masters(engine)  # all goes home, and comes again while backward runs

    held_up = mock.patch.object(TileCache, "_fetch", fetch_late)
    with held_up, mock.patch.object(launcher, "Sample", look):
        ours = play(act, {**ALL_STAYS, "verify_every": 1})
    assert is_looked_at.is_set()
    same(ours, play(act, None))


for stage in (2, 3):
    name = f"an update is repeated while its state is still on its way, stage {stage}"
    ROWS.check(name, stage=stage)(repeated)


@ROWS.check("state that stays goes home where it may be written", between=write_masters)
@ROWS.check("state that stays is there after an evaluation", between=evaluate)
@ROWS.check("state that stays is there after a look at it", between=look_at_masters)
@ROWS.check("it goes home where it may be written, stage 2", between=write_masters, stage=2)
@MORE.check("it goes home where one parameter is set, stage 1", between=set_masters, stage=1)
@MORE.check("it is there after an evaluation, stage 2", between=evaluate, stage=2)
@ROWS.check("it is there after a look at all of it, stage 2", between=look_at_everything, stage=2)
@ROWS.check("it is there after state_dict(), stage 2", between=read_state_dict, stage=2)
def looked_at_or_written(_folder, between, stage=3):
    held = stay(between=between, stage=stage)
    assert all(held[::2])
    assert all(held[1::2]) == (between not in WRITES)


def on_another_thread(call):
    def run(*args):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.no_grad()(call), *args).result(LIMIT_S)

    return run


@ROWS.check("backward runs on another thread, as beside a GPU", stage=3)
@ROWS.check("backward runs on another thread, as beside a GPU, stage 2", stage=2)
def backward_elsewhere(_folder, stage):
    name = "process_gradients" if stage == 2 else "reduce_ready_partitions_and_remove_grads"
    with Trial(ALL_STAYS) as trial:
        engine = trial.open(CASE[stage])
        setattr(engine.optimizer, name, on_another_thread(getattr(engine.optimizer, name)))
        trial.train(engine, BEFORE)
        assert cache_of(engine).tiles
        train_on(trial, engine, 6)
    same(trial, stock(stage, None, 6))


@MORE.check("gradients that are set where state stays, stage 2")
def gradients_set(_folder):
    assert all(stay(ALL_STAYS, set_gradients, stage=2))


# What host memory lacks.


def little_host_memory(share, stage=3):
    """Return the bytes that are ``share`` of what state and gradients of a rank need."""
    needed, check = [], HostRoom.check

    def note(room, host_numel, buffer_bytes, remedy):
        needed.append((host_numel * room.state_bytes + buffer_bytes) * room.num_ranks)
        check(room, host_numel, buffer_bytes, remedy)

    with mock.patch.object(HostRoom, "check", note), Trial(STRIDE) as trial:
        trial.end(trial.open(CASE[stage]))
    return int(share * needed[0] / HEADROOM)


LACKING = {**SMALL_TILES, "policy": "dynamic"}


@ROWS.check("what host memory lacks lives on the device", 1, 2, share=0.6)
@ROWS.check("what host memory lacks lives on the device, as much as can", share=0.55)
def lacking(_folder, share):
    block = {**LACKING, "host_memory_bytes": little_host_memory(share)}
    with Trial(block, memory=Memory(10**8)) as trial:
        engine = trial.open(CASE[3])
        schedule, chosen = inside(engine, "launcher")._schedule, engine.optimizer.chosen_policies
        assert schedule.resident_tiles
        assert set(schedule.resident_tiles) < {*range(len(schedule.tiles))}
        assert "host memory lacks room, so the device holds " in chosen[0].why
        trial.train(engine, BEFORE)
        train_on(trial, engine, 6)
    same(trial, stock(3, None, 6))


@ROWS.check("all state fits: none of it lives on the device for good")
def nothing_lacks(_folder):
    block = {**LACKING, "host_memory_bytes": little_host_memory(1.01)}
    with Trial(block, memory=Memory(10**8)) as trial:
        engine = trial.open(CASE[3])
        assert not inside(engine, "launcher")._schedule.resident_tiles
        trial.end(engine)


BELOW_1 = '"deep_optimizer_states.ratio" below 1'
for name, share, words, changed in (
    ("no device memory may be taken", 0.6, BELOW_1, {"device_memory_bytes": 0}),
    ("all of it is asked for in host memory", 0.6, BELOW_1, {"ratio": 1.0}),
    ("the policy fixes where state lives", 0.6, BELOW_1, {"policy": "all-host"}),
    ("the device has no room", 0.6, "more device memory: it", {"device_memory_bytes": 1000}),
    ("nor for master weights", 0.2, "more host memory: master weights", {}),
):

    @ROWS.check(f"less host memory is refused: {name}", share=share, words=words, changed=changed)
    def lacking_is_refused(_folder, share, words, changed):
        block = {**LACKING, "host_memory_bytes": little_host_memory(share), **changed}
        with Trial(block, memory=Memory(10**8)) as trial:
            said = answer(functools.partial(trial.open, CASE[3]))
        assert said.startswith("HostMemoryError"), said
        assert words in said, said


@ROWS.check("less host memory is refused: stage 2")
def lacking_at_stage_2(_folder):
    block = {**LACKING, "host_memory_bytes": little_host_memory(0.6, stage=2)}
    with Trial(block, memory=Memory(10**8)) as trial:
        said = answer(functools.partial(trial.open, CASE[2]))
    assert "ZeRO stage 3, where the device can hold a share of it" in said, said


# How much stays.


@ROWS.check("state stays as far as a number of bytes goes")
@MORE.check("state stays as far as a number of bytes goes, stage 2", stage=2)
def as_far_as_a_number_goes(_folder, stage=3):
    # 60,000 bytes take tiles of 256 elements, and some smaller ones; of 14 or 16 bytes an element.
    (held,) = set(stay(stage=stage))
    assert held >= 14
    if stage == 3:
        assert set(stay({**STAYS, "device_memory_bytes": 1})) == {0}


@ROWS.check("auto takes what is left over, and no more")
@MORE.check("auto takes what is left over, and no more, stage 2", stage=2)
def auto_takes_what_is_left(_folder, stage=3):
    """Others take half of the memory in each forward, and more in one of them."""
    memory = Memory(300_000)

    def change(_engine):
        memory.take_others(230_000 - memory.others_bytes)
        memory.take_others(-memory.others_bytes)

    held = stay(AUTO, change, 8, memory, stage, in_stock=None)
    assert max(held) > 0
    assert memory.peak_bytes <= 300_000


class Hungry:
    """Takes device memory in a forward, as a longer batch does."""

    def __init__(self, memory):
        self.memory, self.notes = memory, []

    def forward(self, engine, *wanted):
        """Take so much after each of the last layers."""
        layers = engine.module.layers[-len(wanted) :]
        hooks = [
            layer.register_forward_hook(lambda *_, more=more: self.memory.take_others(more))
            for layer, more in zip(layers, wanted, strict=True)
        ]
        try:
            engine(torch.ones(4, WIDTH).bfloat16())
        except torch.OutOfMemoryError as error:
            self.notes += getattr(error, "__notes__", [""])
        finally:
            for hook in hooks:
                hook.remove()
            self.memory.take_others(-self.memory.others_bytes)


@ROWS.check("a forward that runs out of memory gets it the next time, and is told so")
@ROWS.check("a forward that runs out of memory gets it the next time, stage 2", stage=2)
def the_next_attempt_has_it(_folder, stage=3):
    memory = Memory(10**7)
    hungry = Hungry(memory)

    def attempt(engine):
        with torch.no_grad():
            for _ in range(2):
                hungry.forward(engine, memory.total_bytes - 20_000)

    block = {**STAYS, "device_memory_bytes": 10**6}
    held = stay(block, attempt, 1, memory, stage, in_stock=None)
    assert held[0] > 0
    assert held[1] == 0
    assert len(hungry.notes) == 1, hungry.notes
    assert "deep_optimizer_states.device_memory_bytes" in hungry.notes[0]


def a_longer_batch(stage):
    """Return the notes of allocations that failed, and what stayed, where layers take ever more."""
    memory = Memory(300_000)
    hungry, held = Hungry(memory), []
    with Trial(AUTO, memory=memory) as trial:
        engine = trial.open(CASE[stage])
        trial.train(engine, 8)
        cache = cache_of(engine)
        held.append(cache.taken_bytes)
        with torch.no_grad():  # until the margin is touched, then what half of the state takes
            hungry.forward(engine, memory.free_bytes - 20_000, 0, 10_000 + cache.taken_bytes // 2)
        held.append(cache.taken_bytes)
        trial.end(engine)
    return hungry.notes, held


@MORE.check("a layer finds the memory that a look before it gave back, stage 1", stage=1)
@ROWS.check("a layer finds the memory that a look before it gave back, stage 2", stage=2)
def given_back_in_time(_folder, stage):
    notes, (before, after) = a_longer_batch(stage)
    assert notes == []
    assert 0 < after <= before // 2


@ROWS.check("left out: the looks before each layer's forward, stage 2")
def without_looks(_folder):
    with mock.patch.object(zero12, "LooksInForward"):
        notes, (_, after) = a_longer_batch(2)
    assert len(notes) == 1
    assert after == 0


@contextlib.contextmanager
def refused_now_and_then():
    """Refuse a piece of device memory now and then; yields the pieces refused."""
    allocate, pieces, refused = LimitedDevice.empty_device, itertools.count(1), []

    def empty_device(device, numel, dtype):
        number = next(pieces)
        if number > 200 and number % 23 == 0:
            refused.append(number)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return allocate(device, numel, dtype)

    with mock.patch.object(LimitedDevice, "empty_device", empty_device):
        yield refused


@ROWS.check("memory that cannot be had is not missed")
@MORE.check("memory that cannot be had is not missed, stage 2", stage=2)
def refused(_folder, stage=3):
    block = {**STAYS, "device_memory_bytes": 10**6}
    with refused_now_and_then() as refused:
        held = stay(block, write_masters, 6, Memory(10**6), stage)
    assert refused
    assert max(held) > 0


@ROWS.check("state comes and goes every few steps", 1, 2, policy="dynamic")
@ROWS.check("state comes and goes every few steps, all-host", policy="all-host")
@ROWS.check("state comes and goes every few steps, stage 2", 1, 2, policy="dynamic", stage=2)
@ROWS.check("state comes and goes every few steps, stage 1", 1, 2, policy="all-host", stage=1)
def moved(_folder, policy, stage=3):
    with moving(37):
        held = stay({**STAYS, "policy": policy}, steps=8, stage=stage)
    assert len(set(held)) > 2, held


@ROWS.check("state is not sent ahead before the last update has brought it home")
@MORE.check("state is not sent ahead before the last update has ended, stage 2", stage=2)
def late_flushes(_folder, stage=3):
    """The update goes on until it is waited for, which the next backward does not do."""
    engines, early, send_ahead = [], [], TileCache.send_ahead

    def watch(cache, order, is_given):
        background, update = engines[0].optimizer.background, inside(engines[0], "launcher")
        early.append(background.is_running and not update.is_begun)
        send_ahead(cache, order, is_given)

    def act(trial):
        engines[:] = [trial.open(CASE[stage].changed(accumulation=1))]
        trial.train(engines[0], 8)

    with mock.patch.object(TileCache, "send_ahead", watch), updates_end_when_waited_for():
        same(play(act, ALL_STAYS), play(act, None))
    assert not any(early)


# Negative controls of stages 1 and 2: what brings state home, or gradients, left out must show.


def settle_only_to_write(optimizer):
    optimizer._wait()


upcast = LateScaled.stale_grads_upcast


def upcast_what_is_at_home(gradients):
    with mock.patch.object(LateScaled, "bring_home"):
        return upcast(gradients)


def kept_nowhere_else(gradients, part, source):
    """As if every gradient went home."""
    part.of(gradients._grads[part.master]).copy_(source)


CLIPPED_UNUSED = CASE[2].changed(config={}, **UNUSED_BY_TURNS)
CONTROLS = {
    "state at home, before a look": (
        (zero12.InterleavedFlatOptimizer, "_settle_to_read", settle_only_to_write),
        look_at_masters,
    ),
    "state at home, before state_dict()": (
        (zero12.InterleavedFlatOptimizer, "_settle", settle_only_to_write),
        read_state_dict,
    ),
    "state at home, before a write": (
        (zero12.InterleavedFlatOptimizer, "_settle", settle_only_to_write),
        set_masters,
    ),
    "gradients at home, before a look": (
        (LateScaled, "bring_home", lambda *_: None),
        set_gradients,
    ),
    "gradients at home, before they are multiplied": (
        (LateScaled, "stale_grads_upcast", upcast_what_is_at_home),
        None,
    ),
    "old gradients multiplied": ((LateScaled, "stale_grads_upcast", lambda _self: {}), None),
    "gradients written where they are kept": ((LateScaled, "write", kept_nowhere_else), None),
}


def train_clipped(trial, between):
    def before(engine, micro_step):
        if between and micro_step % 2 == 0 and micro_step > 4:
            between(engine)

    trial.train(trial.open(CLIPPED_UNUSED), 5, before=before)


@functools.cache
def clipped(between):
    """What stock does, and the plugin."""
    act = functools.partial(train_clipped, between=between)
    expected = play(act, None)
    same(play(act, ALL_STAYS), expected)
    return act, expected


def left_out(_folder, patch, between):
    act, expected = clipped(between)
    with mock.patch.object(*patch):
        assert differences(play(act, ALL_STAYS), expected) != []


for name, (patch, between) in CONTROLS.items():
    rows = MORE if between is set_masters else ROWS
    rows.check(f"left out: {name}", patch=patch, between=between)(left_out)
