"""Where 16-bit weights are written with ``offload_param``, and what failures and checkpoints do.

Run as the only rank: ``offload_param_worker.py OUT.json FOLDER``. Not a test itself.
"""

import contextlib
import json
import sys
from pathlib import Path

import equality_worker as equality
import safety_worker as safety
import torch
from cases_offload_param import CASES
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

from deep_optimizer_states.adapter import steppers
from deep_optimizer_states.core.device.base import Wait

CASE = CASES["offload_param"]
ON_DEVICE = equality.CASES[equality.FIRST_CASE]
POLICIES = equality.POLICIES


def homes(policy):
    """Whether every weight is still where stock keeps it, and what the last update did."""
    engine = equality.make_engine(CASE, POLICIES[policy])
    stock, (memory,) = engine.optimizer, engine.optimizer.param_groups_fp16_flat_cpu_memory
    before = memory.clone()
    equality.train(engine, CASE, 3)
    stock.background.wait()
    storage = memory.untyped_storage().data_ptr()
    kept = [*stock.fp16_partitioned_groups_flat]
    kept += [param.ds_tensor for group in stock.fp16_groups for param in group]
    found = {
        "plan": str(stock._update.executor.last_plan),
        "at home": all(tensor.untyped_storage().data_ptr() == storage for tensor in kept),
        "changed": not torch.equal(before, memory),
        "staging": stock._schedule.staging_numel,
    }
    engine.destroy()
    return found


def controls():
    """What differs from stock when a wait is left out, and what its lane is late for."""
    *stock, _ = equality.run(CASE, None)
    found = {}
    for wait, (policy, lane) in {
        Wait.WEIGHTS_READY: ("stride 2", ""),
        Wait.STEPPED: ("ratio 0.5", "GPU"),
        Wait.PREFETCHED: ("stride 2", "H2D"),
        Wait.GRADS_FLUSHED: ("stride 2", "grads"),
    }.items():
        for name, without in ((wait.name, {wait}), (f"{wait.name}, kept", ())):
            *ours, _ = equality.run_late(CASE, POLICIES[policy], without, lane)
            found[name] = equality.differences(ours, stock)
    return found


def failures(folder):
    """A lane that fails in the third update: nothing is trained on until a checkpoint is loaded."""
    safety.CASE, steppers.HostAdam = CASE, safety.BreakableAdam
    stock_device, steppers.EmulatedDevice = steppers.EmulatedDevice, safety.BreakableDevice
    # Stock refuses to move weights that are in host memory, so that this call never comes to us.
    del safety.CALLS["offload"]
    try:
        return {
            f"{fault}, {policy}": safety.failure(
                fault, POLICIES[policy], folder / f"{fault} {policy}"
            )
            for fault, policy in (("CPU lane", "stride 2"), ("GPU lane", "ratio 0.5"))
        }
    finally:
        steppers.HostAdam, steppers.EmulatedDevice = equality_adam, stock_device


equality_adam = steppers.HostAdam


def resumes(folder):
    """Checkpoints go both ways, between engines and between homes of the weights."""
    ways = {
        "stock": (CASE, None),
        "stride 2": (CASE, POLICIES["stride 2"]),
        "ratio 0.5": (CASE, POLICIES["ratio 0.5"]),
        "stock, on the device": (ON_DEVICE, None),
        "stride 2, on the device": (ON_DEVICE, POLICIES["stride 2"]),
    }
    for name, (case, block) in ways.items():
        engine = equality.make_engine(case, block)
        equality.train(engine, case, 2)
        with contextlib.redirect_stdout(sys.stderr):
            engine.save_checkpoint(folder / name)
        engine.destroy()

    def load(saved, name):
        case, block = ways[name]
        engine = equality.make_engine(case, block)
        engine.load_checkpoint(folder / saved)
        results = equality.train(engine, case, skip=2, steps=2), equality.state_of(engine)
        engine.destroy()
        return results

    expected = load("stock", "stock")
    pairs = [("stock", name) for name in ways][1:] + [(name, "stock") for name in ways][1:]
    pairs += [("stride 2", "ratio 0.5"), ("stride 2", "stride 2, on the device")]
    return {
        f"{saved} to {name}": equality.differences(load(saved, name), expected)
        for saved, name in pairs
    }


def moves():
    """What moving weights that are in host memory already answers, under stock and under ours."""
    found = {}
    for name, block in (("stock", None), ("ours", POLICIES["stride 2"])):
        engine = equality.make_engine(CASE, block)
        equality.train(engine, CASE, 1)
        found[name] = safety.answer(
            lambda engine=engine: engine.offload_states(include=[OffloadStateTypeEnum.lp_params])
        )
        engine.destroy()
    return found


def main():
    out, folder = Path(sys.argv[1]), Path(sys.argv[2])
    equality.prepare()
    report = {
        "homes": {name: homes(name) for name in ("all-host", "stride 2", "ratio 0.5", "dynamic")},
        "controls": controls(),
        "moves": moves(),
        "resumes": resumes(folder),
        "failures": failures(folder),
    }
    out.write_text(json.dumps(report))
    equality.leave()


if __name__ == "__main__":
    main()
