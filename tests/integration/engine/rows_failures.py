"""Updates that fail, waits and loads that are cut short: nothing wrong is saved or trained on."""

import contextlib
import functools
import itertools
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import safe_get_full_grad
from engines import POLICIES, STRIDE, WIDTH, Trial, answer, broken, go_on, lanes_left, play, same
from rows import Rows
from rows_table import CASES, FIRST_CASE
from seams import (
    StateHomes,
    UpdateWorker,
    flushes,
    hooks,
    inside,
    install,
    own_stream,
    read_state,
    uninstall,
)
from signals import interrupt, names_of, once_within, when_within

ROWS = Rows()
run = ROWS.run
STAGE_3, STAGE_2 = CASES[FIRST_CASE], CASES[f"ZeRO-2: {FIRST_CASE}"]
NONE_PERSISTENT = STAGE_3.changed(zero={"stage3_param_persistence_threshold": 0})


def masters_of(engine):
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return optimizer.fp32_partitioned_groups_flat
    return optimizer.single_partition_of_fp32_groups


def consolidated_weights(engine, _folder):
    return engine._zero3_consolidated_16bit_state_dict()


CALLS = {
    "forward": lambda engine, folder: engine(torch.ones(4, WIDTH).bfloat16()),
    "save": lambda engine, folder: engine.save_checkpoint(folder, "poisoned"),
    "state_dict": lambda engine, folder: engine.optimizer.state_dict(),
    "masters": lambda engine, folder: masters_of(engine),
    "moments": lambda engine, folder: engine.optimizer.state,
    "offload": lambda engine, folder: engine.offload_states(
        include=[OffloadStateTypeEnum.lp_params]
    ),
    "weights alone": lambda engine, folder: (
        engine.load_checkpoint(folder, "good", load_module_only=True)[0]
        and engine.save_checkpoint(folder, "poisoned")
    ),
}
CALLS_AT_3 = {**CALLS, "weights": consolidated_weights}
CALLS_AT_2 = {**CALLS, "reader": lambda engine, folder: read_state(engine)}
# Stock refuses to move weights that are in host memory, so that this call never comes to us.
CALLS_ON_HOST = {name: call for name, call in CALLS_AT_3.items() if name != "offload"}
"""Calls that must raise the failure of an update until a checkpoint is loaded."""


def fail_and_load(folder, case, fault, block, calls):
    """Fails in the third update; whoever goes on must hear of it until a checkpoint is loaded."""
    words = "went wrong" if fault == "wrong bit" else "out of luck"
    with Trial({**block, "verify_every": int(fault == "wrong bit")}) as trial:
        engine = trial.open(case)
        trial.train(engine, 2)
        engine.save_checkpoint(folder, "good")

        def step(_engine=None, _folder=None):
            trial.train(engine, 1)
            return engine.optimizer.state

        with broken(fault):
            said = {"failing step": answer(step)}
        assert fault == "wrong bit" or ", step of tile" in said["failing step"]
        for name, call in {"step": step, **calls}.items():
            for time in ("", ", again"):
                said[name + time] = answer(functools.partial(call, engine, folder))
        for name, text in said.items():
            assert text.startswith("UpdateError"), (name, text)
            assert words in text, (name, text)
            assert "load_checkpoint" in text or name == "failing step", (name, text)
        missing = answer(lambda: engine.load_checkpoint(folder / "missing"))
        assert missing == "no error: (None, None)"
        assert (folder / "latest").read_text() == "good"
        assert engine.load_checkpoint(folder)[0] is not None
        see_as_stock(trial, engine, case, folder, "good", skip=2, steps=3)
        engine.save_checkpoint(folder, "after")
        assert (folder / "latest").read_text() == "after"
        trial.end(engine)


WAITED_FOR = {**STRIDE, "just_in_time_forward": False}
ON_HOST = CASES["offload_param"]
for fault, where, case, block, calls in (
    ("CPU lane", "just in time", STAGE_3, STRIDE, CALLS_AT_3),
    ("CPU lane", "waited for", STAGE_3, WAITED_FOR, CALLS_AT_3),
    ("GPU lane", "just in time", STAGE_3, STRIDE, CALLS_AT_3),
    ("wrong bit", "waited for", STAGE_3, WAITED_FOR, CALLS_AT_3),
    ("CPU lane", "stage 2", STAGE_2, STRIDE, CALLS_AT_2),
    ("GPU lane", "stage 2", STAGE_2, STRIDE, CALLS_AT_2),
    ("wrong bit", "stage 2", STAGE_2, STRIDE, CALLS_AT_2),
    ("CPU lane", "offload_param", ON_HOST, STRIDE, CALLS_ON_HOST),
    ("GPU lane", "offload_param", ON_HOST, POLICIES["ratio 0.5"], CALLS_ON_HOST),
):
    given = {"case": case, "fault": fault, "block": block, "calls": calls}
    ROWS.check(f"{fault} fails, {where}", **given)(fail_and_load)


@ROWS.check("a failure that nobody was told of")
def destroyed_with_a_failure(_folder):
    """Whoever never looked is told by destroy(), once; every thread ends."""
    with Trial(STRIDE) as trial:
        engine = in_flight(trial, NONE_PERSISTENT, steps=0)
        with broken("CPU lane"):
            hold_a_step(trial, engine)
            with released_when_waiting(trial, engine):
                first = answer(engine.destroy)
        assert "out of luck" in first
        assert answer(engine.destroy) == "no error: None"
        trial.end(engine)
    assert lanes_left() == []


def when_waiting(action):
    """Do ``action`` on another thread once this one waits for the update."""
    return when_within("wait_for_end", action)


@contextlib.contextmanager
def released_when_waiting(trial, engine):
    """Let the update go on once this thread waits for it; at the end if it was not waited for."""
    with when_waiting(lambda: trial.release(engine)):
        yield
    trial.release(engine)


def in_flight(trial, case, steps=1):
    """An engine after so many steps and one that is over, so that the next one can be held."""
    engine = trial.open(case)
    trial.train(engine, 1)
    engine.optimizer.background.wait()
    if steps:
        hold_a_step(trial, engine)
    return engine


def hold_a_step(trial, engine):
    """Its update lasts until it is released; step() waits for no persistent parameter."""
    trial.hold(engine)
    trial.train(engine, 1)


def see_as_stock(trial, engine, case, folder, tag, skip, steps=1):  # noqa: PLR0913
    """Train on, and compare with stock that loads a checkpoint and does the same."""
    trial.forget()
    trial.train(engine, steps, skip)
    trial.see_state(engine)
    same(trial, go_on(case, None, folder, tag, steps, skip))


@ROWS.check("Ctrl-C while state is waited for")
def interrupted_wait(folder):
    """Then a checkpoint: nothing of the update is missing."""
    case = NONE_PERSISTENT
    with Trial(STRIDE) as trial:
        engine = in_flight(trial, case)
        for call in (engine.optimizer.state_dict, lambda: engine.optimizer.state):
            with when_waiting(interrupt):
                assert answer(call) == "KeyboardInterrupt: "
        with released_when_waiting(trial, engine):
            engine.save_checkpoint(folder, "two")
        see_as_stock(trial, engine, case, folder, "two", skip=2)
        trial.end(engine)

    def trained_without_a_break(trial):
        engine = trial.open(STAGE_3)
        trial.train(engine, 2)
        trial.forget()
        trial.train(engine, 1)

    same(trial, play(trained_without_a_break, None))


@ROWS.check("Ctrl-C while state is waited for, then a load")
def interrupted_then_loaded(folder):
    """The old update does not write over what is loaded."""
    with Trial(STRIDE) as trial:
        engine = trial.open(NONE_PERSISTENT)
        trial.train(engine, 1)
        engine.save_checkpoint(folder, "one")  # its update is over
        hold_a_step(trial, engine)
        with when_waiting(interrupt):
            assert answer(lambda: engine.optimizer.state) == "KeyboardInterrupt: "
        with released_when_waiting(trial, engine):
            engine.load_checkpoint(folder, "one")
        engine.optimizer.background.prepare(lambda: None)  # behind whatever is on its thread
        see_as_stock(trial, engine, NONE_PERSISTENT, folder, "one", skip=1, steps=2)
        trial.end(engine)


@ROWS.check("Ctrl-C in a step", case=NONE_PERSISTENT, block={"just_in_time_forward": False})
@ROWS.check("Ctrl-C in a step at stage 2", case=STAGE_2, block={"just_in_time_forward": False})
def interrupted_step(folder, case, block):
    """It comes when the step is whole."""
    with Trial({**STRIDE, **block}) as trial:
        engine = in_flight(trial, case, steps=0)
        trial.hold(engine)
        with when_waiting(lambda: (interrupt(), trial.release(engine))):
            assert answer(lambda: trial.train(engine, 1)) == "KeyboardInterrupt: "
        assert engine.global_steps == 2
        engine.save_checkpoint(folder, "two")
        see_as_stock(trial, engine, case, folder, "two", skip=2)
        trial.end(engine)


@ROWS.check("a second Ctrl-C in a step at stage 2")
def interrupted_twice(folder):
    """It is let through: the half step is neither saved nor trained on."""
    with Trial(WAITED_FOR) as trial:
        engine = in_flight(trial, STAGE_2, steps=0)
        engine.save_checkpoint(folder, "one")
        trial.hold(engine)
        with when_waiting(lambda: interrupt(after=interrupt())):
            assert answer(lambda: trial.train(engine, 1)) == "KeyboardInterrupt: "
        assert engine.optimizer.background.is_running
        with released_when_waiting(trial, engine):
            said = answer(lambda: engine.save_checkpoint(folder, "poisoned"))
        assert "engine.step() was cut short by KeyboardInterrupt()" in said
        assert inside(engine, "done") is None
        assert engine.load_checkpoint(folder)[0] is not None
        see_as_stock(trial, engine, STAGE_2, folder, "one", skip=1, steps=2)
        trial.end(engine)


@ROWS.check("a checkpoint that ends in the middle", case=STAGE_3)
@ROWS.check("a checkpoint that ends in the middle, at stage 2", case=STAGE_2)
def loading_cut_short(folder, case):
    """State that is half loaded is neither trained on nor saved."""
    with Trial(STRIDE) as trial:
        engine = trial.open(case)
        trial.train(engine, 2)
        engine.save_checkpoint(folder, "good")
        with mock.patch.object(StateHomes, "return_home", side_effect=ZeroDivisionError("cut")):
            said = answer(lambda: engine.load_checkpoint(folder, "good"))
        assert said == "ZeroDivisionError: cut"
        said = answer(lambda: engine.save_checkpoint(folder, "poisoned"))
        assert "loading a checkpoint was cut short by ZeroDivisionError" in said
        assert engine.load_checkpoint(folder, "good")[0] is not None
        states = engine.optimizer.state
        at_home = [home["exp_avg"].data_ptr() for home in inside(engine, "homes")._moments]
        found = [states[master]["exp_avg"].data_ptr() for master in masters_of(engine)]
        assert found == at_home
        see_as_stock(trial, engine, case, folder, "good", skip=2)
        trial.end(engine)


def raise_in_backward(engine, loss):
    """Backward fails in the middle, in a hook of the user's."""

    def fail(_gradient):
        raise ZeroDivisionError("the user's own")

    def hook(_module, _inputs, output):
        output.register_hook(fail)

    handle = engine.module.layers[2].register_forward_hook(hook)
    said = answer(lambda: engine.backward(loss()))
    handle.remove()
    assert said == "ZeroDivisionError: the user's own"


def fail_a_flush(engine, loss, is_heard_in_backward, look=None):
    """A gradient's way home fails, and the next gradient hears of it, or whoever looks at one."""
    may_fail = threading.Event()
    engine.optimizer.background.wait()  # the update in flight has flushes of its own
    look = look or (lambda: safe_get_full_grad(engine.module.layers[0].weight))

    def fail(_targets, _sources):
        assert may_fail.wait(60)
        raise ZeroDivisionError

    with mock.patch.object(flushes, "copy_all", fail):
        if is_heard_in_backward:
            may_fail.set()
            said = answer(lambda: engine.backward(loss()))
        else:
            engine.backward(loss())
            may_fail.set()
            said = answer(look)
    assert said.startswith("UpdateError: lane grads, gradient flush of "), said


for stage, micro_batches in itertools.product((1, 2, 3), (0, 1)):

    @ROWS.check(
        f"the user's own error in backward at stage {stage}, after {micro_batches} micro-batches",
        stage=stage,
        micro_batches=micro_batches,
    )
    def fail_in_backward(folder, stage, micro_batches):
        """A load makes it good, as a new engine would, in which DeepSpeed's own is no reference."""
        case = STAGE_3.changed(zero={"stage": stage})
        with Trial(STRIDE) as trial:
            engine = trial.open(case)
            trial.train(engine, 2)
            engine.save_checkpoint(folder, "two")
            for _ in range(micro_batches):
                trial.micro_step(engine, ends_window=False)
            raise_in_backward(engine, lambda: trial.loss(engine))
            for call in (lambda: trial.loss(engine), engine.optimizer.step):
                said = answer(call)
                assert said.startswith("UpdateError: the backward before was cut short"), said
            assert engine.load_checkpoint(folder, "two")[0] is not None
            see_as_stock(trial, engine, case, folder, "two", skip=2, steps=2)
            trial.end(engine)


for stage in (1, 2, 3):

    @ROWS.check(
        f"a batch given up after the user's own error in backward at stage {stage}", stage=stage
    )
    def give_a_batch_up(_folder, stage):
        """As if it had never come."""
        case = STAGE_3.changed(zero={"stage": stage}, accumulation=1)

        def act(trial, fails):
            engine = trial.open(case)
            trial.train(engine, 2)
            if fails:
                raise_in_backward(engine, lambda: trial.loss(engine))
                engine.optimizer.zero_grad()
            trial.forget()
            trial.train(engine, 2, skip=3)

        same(
            play(functools.partial(act, fails=True), STRIDE),
            play(functools.partial(act, fails=False), None),
        )


for stage, is_heard_in_backward, gives_up in (
    *itertools.product((3,), (True, False), (True, False)),
    (2, True, False),
    (2, False, True),
):

    @ROWS.check(
        "a gradient's flush that fails, heard of "
        + ("in backward" if is_heard_in_backward else "by a look at gradients")
        + (", and the batch is given up" if gives_up else ", and a checkpoint is loaded")
        + (", stage 2" if stage == 2 else ""),
        first_case=STAGE_2 if stage == 2 else STAGE_3,
        is_heard_in_backward=is_heard_in_backward,
        gives_up=gives_up,
    )
    def go_on_after_a_flush(folder, first_case, is_heard_in_backward, gives_up):
        """The lane works again; with buckets of one gradient each waits for its flush."""
        numel = 1 if is_heard_in_backward else 10**5
        zero = {**first_case.zero, "reduce_bucket_size": numel}
        case = first_case.changed(zero=zero, accumulation=1)

        def act(trial, fails):
            engine = trial.open(case)
            trial.train(engine, 2)
            engine.save_checkpoint(folder / f"{fails}", "two")
            if fails:
                fail_a_flush(engine, lambda: trial.loss(engine), is_heard_in_backward)
            if gives_up:
                engine.optimizer.zero_grad()
            else:
                assert engine.load_checkpoint(folder / f"{fails}", "two")[0] is not None
            trial.forget()
            trial.train(engine, 2, skip=3)

        same(
            play(functools.partial(act, fails=True), STRIDE),
            play(functools.partial(act, fails=False), None),
        )


for stage, is_heard_in_backward, gives_up in itertools.product(
    (2, 3), (True, False), (True, False)
):

    @ROWS.check(
        "a gradient's flush that fails, then a look at state on the device and "
        + ("a batch given up, " if gives_up else "a load, ")
        + ("heard of in backward, " if is_heard_in_backward else "")
        + f"stage {stage}",
        stage=stage,
        is_heard_in_backward=is_heard_in_backward,
        gives_up=gives_up,
    )
    def go_on_after_a_look(folder, stage, is_heard_in_backward, gives_up):
        """The look needs the gradient that has not arrived; nothing else fails with it."""
        numel = 1 if is_heard_in_backward else 10**5
        zero = {"stage": stage, "reduce_bucket_size": numel}
        case = STAGE_3.changed(zero=zero, accumulation=1)
        block = {**STRIDE, "policy": "all-host", "device_memory_bytes": 10**9}

        def act(trial, fails):
            engine = trial.open(case)
            trial.train(engine, 2)
            if not gives_up:
                engine.save_checkpoint(folder / f"{fails}", "two")
            trial.train(engine, 1)
            if fails:
                look = (lambda: engine.optimizer.state,)
                fail_a_flush(engine, lambda: trial.loss(engine), is_heard_in_backward, *look)
                said = answer(*look)
                assert said.startswith("UpdateError: lane grads, gradient flush of "), said
            if gives_up:
                engine.optimizer.zero_grad()
            else:
                assert engine.load_checkpoint(folder / f"{fails}", "two")[0] is not None
            trial.forget()
            trial.train(engine, 2, skip=4)

        same(
            play(functools.partial(act, fails=True), block),
            play(functools.partial(act, fails=False), None),
        )


# Checkpoints that a signal handler saves.


class PreemptedError(Exception):
    """Ends training once the checkpoint is there."""


def signal_once_launched(engine):
    """The update of the next step has begun, and ``engine.step()`` is not over."""
    launch = engine.optimizer._optimizer_step

    def launch_and_signal(subgroup):
        launch(subgroup)
        signal.raise_signal(signal.SIGALRM)

    engine.optimizer._optimizer_step = launch_and_signal


@ROWS.check("saved by a handler while forward waits for the update", within="before_gather")
@ROWS.check("saved by a handler within a step", within="step")
def saved_by_a_handler(folder, within):
    """Whole, or refused: in a step the engine's counters still say that the step is to come."""
    case, errors = NONE_PERSISTENT.changed(accumulation=1), []
    with Trial(STRIDE) as trial:
        engine = trial.open(case)

        def save(_number, frame):
            assert within in names_of(frame)
            trial.release(engine)
            try:
                engine.save_checkpoint(folder, f"step{engine.global_steps}")
            except Exception as error:  # noqa: BLE001 - the answer is what it says
                errors.append(error)
            raise PreemptedError

        before = signal.signal(signal.SIGALRM, save)
        trial.train(engine, 1)
        trial.hold(engine)
        trial.train(engine, 1)
        if within == "step":
            trial.release(engine)
            signal_once_launched(engine)
        else:
            once_within("before_gather", lambda: interrupt(signal.SIGALRM))
        said = answer(lambda: trial.train(engine, 1))
        signal.signal(signal.SIGALRM, before)
        assert said.startswith("PreemptedError"), said
        with contextlib.suppress(Exception):
            trial.end(engine)
    if errors:
        assert within == "step", errors
        return
    steps = int((folder / "latest").read_text().removeprefix("step"))

    def load(trial):
        trial.open(case).load_checkpoint(folder)

    def train(trial):
        trial.train(trial.open(case), steps)
        trial.forget()

    same(play(load, None), play(train, None))


# What is held in memory and waited for.


@ROWS.check("state stays on the device, all-host", policy="all-host")
@ROWS.check("state stays on the device, stride 2", policy="stride 2")
@ROWS.check("state stays on the device, dynamic", policy="dynamic")
def state_on_the_device(_folder, policy):
    """State and gradients are read there, and not in host memory; looking brings them home."""

    def act(trial):
        engine = trial.open(STAGE_3)
        trial.train(engine, 3)
        if trial.block:
            engine.optimizer.background.wait()
            cache, tiles = inside(engine, "cache"), inside(engine, "schedule").tiles
            kept = [number for number in cache.tiles if cache.place(number).keeps_grad]
            assert len(kept) == len(cache.tiles) > len(tiles) // 3
            for number in kept:
                home = cache._home_of(number)
                for tensor in (*home.state, home.grad):
                    tensor.fill_(torch.nan)
        trial.train(engine, 2)

    block = {**POLICIES[policy], "tile_numel": 256, "device_memory_bytes": 10**9}
    same(play(act, block), play(act, None))


class Asynchronous:
    """The accelerator, as gathers see one whose work goes on behind the caller's back."""

    def resolves_data_dependency(self):
        return False

    def current_stream(self):
        return SimpleNamespace(synchronize=lambda: None)

    def __getattr__(self, name):
        return getattr(get_accelerator(), name)


@contextlib.contextmanager
def updates_end_when_waited_for():
    """All tiles of an update are stepped at once, but it is in flight until it is waited for."""
    launch, wait_for_end = UpdateWorker.launch, UpdateWorker.wait_for_end

    def launch_and_last(self, update, run):
        self.is_asked_for = threading.Event()
        launch(self, update, lambda: (run(), self.is_asked_for.wait()))

    def ask(self):
        if self.is_running:
            self.is_asked_for.set()
        wait_for_end(self)

    with (
        mock.patch.object(UpdateWorker, "launch", launch_and_last),
        mock.patch.object(UpdateWorker, "wait_for_end", ask),
    ):
        yield


@ROWS.check("nothing waits for the whole device while tiles are in flight", 2)
def synchronisations(_folder):
    """Beside it what stock does: its timer in every step, its gather after it."""
    assert who_waits({}) == set()
    assert {"start", "stop"} <= who_waits({"synchronized": True})
    with mock.patch.object(own_stream, "own_stream_alone", every_stream):
        assert any("allgather" in name for name in who_waits({}))


@contextlib.contextmanager
def every_stream():
    yield


def who_waits(timer):
    """Return the functions that synchronise the device while an update is in flight."""
    found, engines = set(), []

    def synchronize(self, device_index=None):
        if any(engine.optimizer.background.is_running for engine in engines):
            ours = (__file__, hooks.__file__, own_stream.__file__)
            stack = traceback.extract_stack()
            found.add([frame.name for frame in stack if frame.filename not in ours][-1])

    uninstall()
    # Below what takes the accelerator's place.
    with mock.patch.object(type(get_accelerator()), "synchronize", synchronize):
        install()
        with Trial(STRIDE) as trial:
            engine = trial.open(STAGE_3.changed(config={"timers": {"throughput": timer}}))
            trial.train(engine, 3)
            engines.append(engine)
            with (
                mock.patch.object(partition_parameters, "get_accelerator", Asynchronous),
                updates_end_when_waited_for(),
            ):
                trial.train(engine, 3)
                engine.optimizer.background.wait_for_end()
            trial.end(engine)
        uninstall()
    install()
    return found


def functions_of_deepspeed():
    """Every function, class and property of DeepSpeed's modules and classes, by where it is."""
    places = {name: module for name, module in sys.modules.items() if is_deepspeeds(name)}
    for name, module in list(places.items()):
        classes = {key: one for key, one in vars(module).items() if isinstance(one, type)}
        own = {key: one for key, one in classes.items() if is_deepspeeds(one.__module__)}
        places |= {f"{name}.{key}": one for key, one in own.items()}
    places["the accelerator"] = get_accelerator()
    return {
        (place, key): one
        for place, owner in places.items()
        for key, one in vars(owner).items()
        if callable(one) or isinstance(one, (property, classmethod, staticmethod))
    }


def is_deepspeeds(module):
    return module.partition(".")[0] == "deepspeed"


def is_ours(function):
    """Return whether it is a function of this package, whatever it says to be."""
    code = getattr(getattr(function, "func", function), "__code__", None)
    return code is not None and "/deep_optimizer_states/" in code.co_filename


def nothing_is_ours():
    found = functions_of_deepspeed()
    assert [place for place, one in found.items() if is_ours(one)] == []
    return found


GO_ON = {
    "stage 3": (NONE_PERSISTENT, STRIDE),
    "stage 3, updated in backward": (
        NONE_PERSISTENT.changed(config={"gradient_clipping": 0.0}),
        {**STRIDE, "step_before_norm": True},
    ),
    "stage 2": (STAGE_2, STRIDE),
}


@ROWS.check("after uninstall nothing is wrapped, and engines go on with the bits of stock")
def after_uninstall(folder):
    def act(trial, name, case):
        engine = trial.open(case)
        trial.train(engine, 3)
        if trial.block:
            engine.save_checkpoint(folder, name)
        trial.hold(engine)
        trial.train(engine, 1)
        if trial.block:
            trial.let_go(engine)
            uninstall()
            after = nothing_is_ours()
            other = [place for place, one in before.items() if after.get(place) is not one]
            assert not other, (name, other)
        trial.train(engine, 2)

    DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(1))])  # torch wraps the class's step() once
    for name, (case, block) in GO_ON.items():
        uninstall()
        before = nothing_is_ours()
        install()
        try:
            assert any(map(is_ours, functions_of_deepspeed().values())), name
            training = functools.partial(act, name=name, case=case)
            same(play(training, {**block, "checkpoint": "background"}), play(training, None))
        finally:
            install()


@ROWS.check("nothing of ours runs between a backward that is whole and its caller", case=STAGE_3)
@ROWS.check("nothing of ours runs after a backward that is whole, stage 2", case=STAGE_2)
def nothing_after_backward(_folder, case):
    """An error there, such as Ctrl-C, would have a micro-batch repeated that counts already."""
    stock, calls = hooks.originals[deepspeed.DeepSpeedEngine, "backward"].__code__, []
    ours = str(Path(hooks.__file__).parents[1])

    def note(frame, event, _):
        if event == "return" and frame.f_code is stock:
            calls.clear()
        elif event == "call" and frame.f_code.co_filename.startswith(ours):
            calls.append(frame.f_code.co_name)

    with Trial(STRIDE) as trial:
        engine = trial.open(case)
        loss = trial.loss(engine)
        sys.setprofile(note)
        try:
            engine.backward(loss)
        finally:
            sys.setprofile(None)
        assert calls == []
        trial.end(engine)
