"""Interruptions, forks and engines that nobody destroys; see test_lifecycle.py.

``lifecycle_worker.py compare OUT.json`` writes what differs from stock, and what is left behind;
``lifecycle_worker.py leave OUT.json`` ends with an update in flight, in every way, and writes the
statuses. Not a test itself.
"""

import copy
import dataclasses
import functools
import gc
import importlib
import itertools
import json
import os
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent))
import equality_worker as equality
from equality_cases import WIDTH, Case, Net
from late_adam import LateAdam
from signals import interrupt, names_of, once_within

import deep_optimizer_states
from deep_optimizer_states.adapter import steppers
from deep_optimizer_states.adapter.zero3.optimizer import InterleavedZeroOptimizer
from deep_optimizer_states.core.device.emulated import Faults
from deep_optimizer_states.core.kernels.host import HostAdam as make_host_adam

BLOCK = equality.POLICIES["stride 2"]
DISTURBED_STEPS = (2, 4)
NUM_ENGINES = 6
WAYS_TO_END = (
    "at the end",
    "after backward",
    "an error",
    "SystemExit from a handler",
    "SIGTERM",
)


class DisturbedNet(Net):
    """Raises ``error`` once, before the layer ``fails_at``; 6 is after all of them."""

    fails_at, error = None, None

    def forward(self, x):
        for number, layer in enumerate([*self.layers, None]):
            if self.fails_at == number:
                self.fails_at = None
                raise self.error
            if layer is not None:
                x = torch.tanh(layer(x)) + x
        return x


CASE = Case(accumulation=1, make=DisturbedNet)
LATE_CASE = dataclasses.replace(CASE, zero={"stage3_param_persistence_threshold": 0})


def train(engine, disturb):
    """Six iterations, and what ``disturb`` saw; those whose forward is interrupted are left out."""
    generator = torch.Generator().manual_seed(0)
    losses, norms, seen = [], [], []
    for step in range(6):
        x, y = (torch.randn(4, WIDTH, generator=generator).bfloat16() for _ in range(2))
        if step in DISTURBED_STEPS:
            disturb(engine, seen)
        try:
            loss = ((engine(x) - y).float() ** 2).mean()
        except (ValueError, KeyboardInterrupt) as error:
            seen.append(type(error).__name__)
            continue
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms, seen


def fail_at(layer, error, engine, seen):
    engine.module.fails_at, engine.module.error = layer, error


def interrupt_a_wait(engine, seen):
    """As Ctrl-C does while forward waits for the update; stock, which never waits, gets it too."""
    if not isinstance(engine.optimizer, InterleavedZeroOptimizer):
        fail_at(0, KeyboardInterrupt(), engine, seen)
        return

    def end_the_wait(_number, frame):
        assert "before_gather" in names_of(frame), "nothing was waited for"
        LateAdam.is_held = False
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, end_the_wait)
    LateAdam.is_held = True
    once_within("before_gather", lambda: interrupt(signal.SIGALRM))


def load_data_in_forks(_engine, seen):
    dataset = [torch.full((3,), float(number)) for number in range(4)]
    loader = DataLoader(dataset, num_workers=2, multiprocessing_context="fork")
    seen += [batch.tolist() for batch in loader]


def fork_a_child_that_ends_as_python_does(_engine, seen):
    child = os.fork()
    if child == 0:
        threading._shutdown()  # joins the threads of pools, none of which the child has
        os._exit(5)
    seen.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def change_threads(_engine, seen):
    seen.append(torch.get_num_threads())
    torch.set_num_threads(3 - torch.get_num_threads())


def copy_module(engine, seen):
    seen.append([p.tolist() for p in copy.deepcopy(engine.module).parameters()])


DISTURBANCES = {
    "an error before the first layer": functools.partial(fail_at, 0, ValueError()),
    "an error before the fourth layer": functools.partial(fail_at, 3, ValueError()),
    "an error after the last layer": functools.partial(fail_at, 6, ValueError()),
    "Ctrl-C in a layer": functools.partial(fail_at, 3, KeyboardInterrupt()),
    "Ctrl-C in a wait": interrupt_a_wait,
    "DataLoader workers": load_data_in_forks,
    "a fork": fork_a_child_that_ends_as_python_does,
    "set_num_threads": change_threads,
    "deepcopy of the module": copy_module,
}


def make_engine(block, jitter_s=0.0, is_late=False):
    steppers.faults_for_tests = Faults(jitter_s=jitter_s) if block else None
    steppers.HostAdam = LateAdam if is_late and block else make_host_adam
    return equality.make_engine(LATE_CASE if is_late else CASE, block)


def run(block, disturb):
    torch.set_num_threads(1)
    # A wait that is to be interrupted must last.
    engine = make_engine(block, 0.002, is_late=disturb is interrupt_a_wait)
    try:
        return train(engine, disturb), equality.state_of(engine)
    finally:
        engine.destroy()


def compare(report):
    for name, disturb in DISTURBANCES.items():
        stock = run(None, disturb)
        assert len(stock[0][2]) >= len(DISTURBED_STEPS), name
        report[name] = equality.differences(run(BLOCK, disturb), stock)


def count_what_is_left(block, destroys):
    """Make, use and drop engines; what each leaves behind, from the second on."""
    counts, made = [], []
    for _ in range(NUM_ENGINES):
        engine = make_engine(block)
        equality.train(engine, CASE, steps=1)
        made.append(weakref.ref(engine.optimizer))
        if destroys:
            engine.destroy()
        del engine
        gc.collect()
        alive = sum(optimizer() is not None for optimizer in made)
        counts.append((threading.active_count(), len(list(Path("/proc/self/fd").iterdir())), alive))
    first, last = counts[1], counts[-1]
    per_engine = [(b - a) / (len(counts) - 2) for a, b in zip(first, last, strict=True)]
    return dict(zip(("threads", "files", "optimizers"), per_engine, strict=True))


def leave(how):
    engine = make_engine(BLOCK, is_late=True)
    equality.train(engine, CASE, steps=1)
    assert engine.optimizer.state, "this waits for the first update"
    first = engine.optimizer._update.executor.last_plan
    equality.train(engine, CASE, steps=1, skip=1)
    assert engine.optimizer._update.executor.last_plan is first, "no update is in flight"
    if how == "after backward":
        engine.backward(engine(torch.ones(4, WIDTH).bfloat16()).float().sum())
    if how == "an error":
        raise RuntimeError("the user's own")
    if how == "SystemExit from a handler":

        def end(_number, _frame):
            sys.exit(3)

        signal.signal(signal.SIGTERM, end)
        once_within("before_gather", lambda: interrupt(signal.SIGTERM))
        for step in itertools.count(2):
            equality.train(engine, CASE, steps=1, skip=step)
    if how == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)


def end_in_each_way(out):
    """Fork a process for each way to end; in it, the way, and in the parent None once all ended.

    What is imported is all that they share: no thread runs yet and no engine is there.
    """
    equality.leave_out_muon()
    importlib.import_module("torch._dynamo")  # which the first engine would import
    statuses = {}
    for how in WAYS_TO_END:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            return how
        statuses[how] = status_of(child)
    out.write_text(json.dumps(statuses))
    return None


def status_of(child):
    """As ``subprocess`` gives it; "hangs" if it has not ended long after it should have."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"


def start():
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    deep_optimizer_states.install()


def main():
    mode, out = sys.argv[1], Path(sys.argv[2])
    if mode == "leave":
        how = end_in_each_way(out)
        if how is not None:
            start()
            leave(how)
        return
    equality.make_engines_cheaper()
    start()
    report = {"differences": {}}
    compare(report["differences"])
    report["destroyed"] = count_what_is_left(BLOCK, destroys=True)
    report["dropped"] = count_what_is_left(BLOCK, destroys=False)
    report["stock, dropped"] = count_what_is_left(None, destroys=False)
    out.write_text(json.dumps(report))
    equality.leave()


if __name__ == "__main__":
    main()
