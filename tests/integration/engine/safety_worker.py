"""Break updates, interrupt waits, and write down what the next calls do, as JSON.

Run as the only rank: ``safety_worker.py OUT.json FOLDER``. Not a test itself.
"""

import contextlib
import dataclasses
import json
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import equality_worker as equality
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from equality_cases import WIDTH
from late_adam import updates_end_when_waited_for
from signals import interrupt, when_within

from deep_optimizer_states.adapter import homes, steppers
from deep_optimizer_states.adapter.own_stream import own_stream_alone
from deep_optimizer_states.adapter.zero3 import gathers
from deep_optimizer_states.core.device.emulated import EmulatedDevice
from deep_optimizer_states.core.kernels.host import HostAdam

CASE = equality.CASES[equality.FIRST_CASE]
NONE_PERSISTENT = dataclasses.replace(CASE, zero={"stage3_param_persistence_threshold": 0})
STRIDE = equality.POLICIES["stride 2"]


class BreakableAdam(HostAdam):
    """Fails when it is told to, and steps nothing while it is held."""

    is_broken = False
    may_go_on = threading.Event()

    def step(self, tensors, *args, **kwargs):
        assert BreakableAdam.may_go_on.wait(3600)
        if BreakableAdam.is_broken:
            raise RuntimeError("the CPU lane is out of luck")
        super().step(tensors, *args, **kwargs)


BreakableAdam.may_go_on.set()


class BreakableDevice(EmulatedDevice):
    """Fails, or makes NaN of a number that it stepped, when it is told to."""

    fault = ""

    def adam(self, tensors, *args, **kwargs):
        if BreakableDevice.fault == "failure":
            raise RuntimeError("the GPU lane is out of luck")
        super().adam(tensors, *args, **kwargs)
        if BreakableDevice.fault == "wrong bit":
            tensors.master[0] = torch.nan


@contextlib.contextmanager
def broken(fault):
    BreakableAdam.is_broken = fault == "CPU lane"
    BreakableDevice.fault = {"GPU lane": "failure", "wrong bit": "wrong bit"}.get(fault, "")
    try:
        yield
    finally:
        BreakableAdam.is_broken, BreakableDevice.fault = False, ""


def answer(action):
    try:
        return f"no error: {action()}"
    except BaseException as error:  # noqa: BLE001 - the answer is what it says
        return f"{type(error).__name__}: {error}"


def train(engine, steps, skip):
    return equality.train(engine, CASE, steps, skip)


def state_dicts(engine):
    return {key: tensor.cpu().tolist() for key, tensor in equality.state_of(engine).items()}


def stock_after(folder, tag, steps, skip):
    """What stock has that loads a checkpoint and goes on."""
    engine = equality.make_engine(CASE, None)
    assert engine.load_checkpoint(folder, tag)[0]
    results = train(engine, steps, skip), equality.state_of(engine)
    engine.destroy()
    return results


def differences_to_stock(results, folder, tag, steps, skip):
    return equality.differences(results, stock_after(folder, tag, steps, skip))


CALLS = {
    "step": lambda engine, folder: train(engine, 1, 3),
    "forward": lambda engine, folder: engine(torch.ones(4, WIDTH).bfloat16()),
    "save": lambda engine, folder: engine.save_checkpoint(folder, "poisoned"),
    "state_dict": lambda engine, folder: engine.optimizer.state_dict(),
    "masters": lambda engine, folder: engine.optimizer.fp32_partitioned_groups_flat,
    "moments": lambda engine, folder: engine.optimizer.state,
    "weights": lambda engine, folder: engine._zero3_consolidated_16bit_state_dict(),
    "offload": lambda engine, folder: engine.offload_states(
        include=[OffloadStateTypeEnum.lp_params]
    ),
    "missing": lambda engine, folder: engine.load_checkpoint(folder / "missing"),
    "weights alone": lambda engine, folder: (
        engine.load_checkpoint(folder, "good", load_module_only=True)[0]
        and engine.save_checkpoint(folder, "poisoned")
    ),
}
"""What must raise the failure, all but the last two of which say so themselves."""


def failure(fault, block, folder):
    """Fails in the third update; whoever goes on must hear of it until a checkpoint is loaded."""
    engine = equality.make_engine(CASE, block)
    train(engine, 2, 0)
    engine.save_checkpoint(folder, "good")
    with broken(fault):
        found = {"failing step": answer(lambda: (train(engine, 1, 2), engine.optimizer.state))}
    for name, call in CALLS.items():
        found[name] = [answer(lambda call=call: call(engine, folder)) for _ in range(2)]
    found["latest"] = (folder / "latest").read_text()
    found["loaded"] = answer(lambda: engine.load_checkpoint(folder)[0] is not None)
    results = train(engine, 3, 2), equality.state_of(engine)
    found["differences"] = differences_to_stock(results, folder, "good", 3, 2)
    engine.save_checkpoint(folder, "after")
    found["saved after"] = (folder / "latest").read_text()
    found["destroy"] = answer(engine.destroy)
    return found


def failures(folder):
    steppers.HostAdam, stock_device = BreakableAdam, steppers.EmulatedDevice
    steppers.EmulatedDevice = BreakableDevice
    report = {}
    try:
        for fault in ("CPU lane", "GPU lane", "wrong bit"):
            for name, jit in (("just in time", True), ("waited for", False)):
                block = {**STRIDE, "just_in_time_forward": jit}
                block["verify_every"] = 1 if fault == "wrong bit" else 0
                label = f"{fault}, {name}"
                report[label] = failure(fault, block, folder / label.replace(" ", "-"))
    finally:
        steppers.HostAdam, steppers.EmulatedDevice = HostAdam, stock_device
    return report


def destroyed_with_a_failure():
    """Whoever never looked is told by destroy(), once."""
    engine = held_engine()
    train(engine, 1, 0)
    engine.optimizer.background.wait()
    BreakableAdam.may_go_on.clear()
    with broken("CPU lane"):
        train(engine, 1, 1)
        with when_waiting(go_on):
            found = [answer(engine.destroy), answer(engine.destroy)]
    threads = [t.name for t in threading.enumerate() if t.name.startswith("deep_optimizer_states")]
    return {"answers": found, "threads": threads}


@contextlib.contextmanager
def when_waiting(action):
    """Do ``action`` on another thread once this one waits for the update.

    What is to go on does so at the end of this as well, if it was not waited for.
    """
    try:
        with when_within("wait_for_end", action):
            yield
    finally:
        if action is go_on:
            go_on()


def go_on():
    BreakableAdam.may_go_on.set()


def held_engine(block=STRIDE):
    """Its updates last until :func:`go_on`; step() does not wait for persistent parameters."""
    steppers.HostAdam = BreakableAdam
    engine = equality.make_engine(NONE_PERSISTENT, block)
    steppers.HostAdam = HostAdam
    return engine


def interrupted_wait(folder):
    """Ctrl-C while state is waited for, then a checkpoint: nothing of the update is missing."""
    engine = held_engine()
    train(engine, 1, 0)
    engine.optimizer.background.wait()
    BreakableAdam.may_go_on.clear()
    train(engine, 1, 1)
    found = {}
    for name, call in (("state_dict", engine.optimizer.state_dict), ("finish", state(engine))):
        with when_waiting(interrupt):
            found[name] = answer(call)
    with when_waiting(go_on):
        engine.save_checkpoint(folder, "two")
    results = train(engine, 1, 2), equality.state_of(engine)
    engine.destroy()
    stock = equality.make_engine(CASE, None)
    results_of_stock = [train(stock, 2, 0), train(stock, 1, 2)][1], equality.state_of(stock)
    stock.destroy()
    found["differences"] = equality.differences(results, results_of_stock)
    found["differences of what was saved"] = differences_to_stock(results, folder, "two", 1, 2)
    return found


def state(engine):
    return lambda: engine.optimizer.state


def interrupted_then_loaded(folder):
    """Ctrl-C while state is waited for, then a load: the old update does not write over it."""
    engine = held_engine()
    train(engine, 1, 0)
    engine.save_checkpoint(folder, "one")  # its update is over
    BreakableAdam.may_go_on.clear()
    train(engine, 1, 1)
    with when_waiting(interrupt):
        found = {"wait": answer(state(engine))}
    with when_waiting(go_on):
        engine.load_checkpoint(folder, "one")
    engine.optimizer.background.prepare(lambda: None)  # behind whatever is on its thread
    results = train(engine, 2, 1), equality.state_of(engine)
    engine.destroy()
    return found | {"differences": differences_to_stock(results, folder, "one", 2, 1)}


def interrupted_step(folder):
    """Ctrl-C in the middle of a step that waits for its update: the step is whole."""
    engine = held_engine({**STRIDE, "just_in_time_forward": False})
    train(engine, 1, 0)
    BreakableAdam.may_go_on.clear()

    def interrupt_and_go_on():
        interrupt()
        go_on()

    with when_waiting(interrupt_and_go_on):
        found = {"step": answer(lambda: train(engine, 1, 1))}
    found["steps"] = engine.global_steps
    engine.save_checkpoint(folder, "two")
    results = train(engine, 1, 2), equality.state_of(engine)
    engine.destroy()
    return found | {"differences": differences_to_stock(results, folder, "two", 1, 2)}


def loading_cut_short(folder):
    """A checkpoint that ends in the middle: what is half loaded is neither trained on nor saved."""
    engine = equality.make_engine(CASE, STRIDE)
    train(engine, 2, 0)
    engine.save_checkpoint(folder, "good")
    stock_return = homes.StateHomes.return_home
    homes.StateHomes.return_home = lambda self: 1 / 0
    found = {"load": answer(lambda: engine.load_checkpoint(folder, "good"))}
    homes.StateHomes.return_home = stock_return
    found["save"] = answer(lambda: engine.save_checkpoint(folder, "poisoned"))
    found["again"] = answer(lambda: engine.load_checkpoint(folder, "good")[0] is not None)
    at_home = [home["exp_avg"].data_ptr() for home in engine.optimizer._homes._moments]
    states = engine.optimizer.state
    masters = engine.optimizer.fp32_partitioned_groups_flat
    found["at home"] = [states[m]["exp_avg"].data_ptr() for m in masters] == at_home
    results = train(engine, 2, 2), equality.state_of(engine)
    engine.destroy()
    return found | {"differences": differences_to_stock(results, folder, "good", 2, 2)}


def gradients_on_the_device():
    """Gradients that stay on the device are read there, and not in host memory."""
    found = {}
    stock = equality.run(CASE, None)[:2]
    for name in ("stride 2", "all-device", "dynamic"):
        engine = equality.make_engine(CASE, equality.POLICIES[name])
        results = train(engine, 3, 0)
        gradients = engine.optimizer._gradients
        kept = [*gradients._on_device, *gradients._copies]
        if name != "dynamic":  # whose CPU lane may step any of them
            for subgroup in kept:
                gradients.host_grads(subgroup).fill_(torch.nan)
        more = train(engine, 2, 3)
        results = results[0] + more[0], results[1] + more[1], []
        state = equality.state_of(engine)
        found[name] = {
            "kept": len(kept),
            "movable": len(engine.optimizer._schedule.slot_subgroups),
            "differences": equality.differences((results, state), stock),
        }
        engine.destroy()
    found["no room"] = without_room()
    return found


def without_room():
    stock_bytes = EmulatedDevice.spare_bytes
    EmulatedDevice.spare_bytes = lambda self: 6000  # for some subgroups of 1,400 elements
    try:
        engine = equality.make_engine(CASE, equality.POLICIES["all-device"])
        train(engine, 3, 0)
        kept = len(engine.optimizer._gradients._on_device)
        engine.destroy()
    finally:
        EmulatedDevice.spare_bytes = stock_bytes
    return kept


class Asynchronous:
    """The accelerator, as gathers see one whose work goes on behind the caller's back."""

    def resolves_data_dependency(self):
        return False

    def current_stream(self):
        return SimpleNamespace(synchronize=lambda: None)

    def __getattr__(self, name):
        return getattr(get_accelerator(), name)


def synchronisations(block, timer, is_broken=False):
    """Who waits for the whole device while an update is in flight, by the caller's name."""
    if is_broken:
        gathers.own_stream_alone = contextlib.nullcontext
    case = dataclasses.replace(CASE, config={"timers": {"throughput": timer}})
    engine, accelerator = equality.make_engine(case, block), type(get_accelerator())
    before, counted = accelerator.synchronize, []

    def synchronize(self, device_index=None):
        if engine.optimizer.background.is_running:
            counted.append(sys._getframe(1).f_code.co_name)

    train(engine, 3, 0)
    accelerator.synchronize = synchronize
    partition_parameters.get_accelerator = Asynchronous
    try:
        with updates_end_when_waited_for():
            train(engine, 3, 3)
            engine.optimizer.background.wait_for_end()
    finally:
        accelerator.synchronize = before
        gathers.own_stream_alone = own_stream_alone
        partition_parameters.get_accelerator = get_accelerator
    engine.destroy()
    return sorted(set(counted))


def main():
    out, folder = map(Path, sys.argv[1:])
    equality.prepare()
    if os.environ["WORLD_SIZE"] != "1":
        report = {
            "ours": synchronisations(STRIDE, {}),
            "stock timer": synchronisations(STRIDE, {"synchronized": True}),
            "stock gather": synchronisations(STRIDE, {}, is_broken=True),
        }
        out.with_suffix(f".{os.environ['RANK']}.json").write_text(json.dumps(report))
        equality.leave()
    report = {
        "failures": failures(folder),
        "destroy": destroyed_with_a_failure(),
        "interrupted wait": interrupted_wait(folder / "wait"),
        "interrupted, then loaded": interrupted_then_loaded(folder / "loaded"),
        "interrupted step": interrupted_step(folder / "step"),
        "loading cut short": loading_cut_short(folder / "short"),
        "gradients on the device": gradients_on_the_device(),
    }
    out.write_text(json.dumps(report))
    equality.leave()


if __name__ == "__main__":
    main()
