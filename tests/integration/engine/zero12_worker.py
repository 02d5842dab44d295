"""Break, interrupt, save, load and refuse at ZeRO-1 and ZeRO-2; write what was seen as JSON.

Run as every rank of a job: ``zero12_worker.py OUT.json FOLDER``. Not a test itself.
"""

import contextlib
import dataclasses
import json
import os
import sys
import threading
from pathlib import Path
from unittest import mock

import equality_worker as equality
import safety_worker as safety
import torch
from cases_zero12 import CASES, of_stage, tiny_net
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import safe_get_full_optimizer_state
from equality_cases import WIDTH, two_groups

from deep_optimizer_states.adapter import homes, steppers
from deep_optimizer_states.adapter.update import UpdatePhase
from deep_optimizer_states.adapter.zero12 import FlatHomes, LateScaled
from deep_optimizer_states.core.device.base import Wait
from deep_optimizer_states.core.device.emulated import EmulatedDevice
from deep_optimizer_states.core.kernels.host import HostAdam, Tail
from deep_optimizer_states.state_reader import read_state

CASE = CASES["ZeRO-2: bf16, clipping, accumulation 2"]
UNUSED = CASES["ZeRO-2: gradients looked at"]
ODD = of_stage(2, make=tiny_net)
STRIDE = equality.POLICIES["stride 2"]
ALL_HOST = equality.SMALL_TILES | {"policy": "all-host"}


def different(case, block=STRIDE):
    *stock, _ = equality.run(case, None)
    *ours, _ = equality.run(case, block)
    return equality.differences(ours, stock)


def without_waiting_in_step():
    """Updates are launched as at stage 3, where somebody else waits for each tile."""
    launch = UpdatePhase.launch

    def launch_alone(self, order, grad_scale):
        launch(self, tuple(range(len(self._schedule.tiles))), grad_scale)

    with mock.patch.object(UpdatePhase, "launch", launch_alone), equality.late():
        return different(CASE)


def controls():
    """Negative controls: without a rule the result must not be stock's."""
    lanes = {Wait.PREFETCHED: "H2D", Wait.STEPPED: "GPU", Wait.SLOT_FREE: "D2H"}
    lanes |= {Wait.STAGING_FREE: "weights"}
    *stock, _ = equality.run(CASE, None)
    found = {}
    for wait, lane in lanes.items():
        block = ALL_HOST if wait is Wait.STAGING_FREE else STRIDE
        for name, without in ((wait.name, {wait}), (f"{wait.name}, kept", ())):
            *ours, _ = equality.run_late(CASE, block, without, lane)
            found[name] = equality.differences(ours, stock)
    with mock.patch.object(LateScaled, "settle"):
        found["old gradients are scaled again"] = different(UNUSED)
    writing = LateScaled.writing
    with mock.patch.object(LateScaled, "writing", lambda self, param_id=None: writing(self)):
        found["new gradients owe nothing"] = different(UNUSED)
    with mock.patch.object(FlatHomes, "tail_start", own_tail):
        found["the tail is the group's"] = different(ODD, block=ALL_HOST)
    with mock.patch.object(FlatHomes, "count_step", count_every_subgroup):
        found["steps are counted once"] = different(CASE)
    return found


def own_tail(self, subgroup, tail: Tail):
    """As if every subgroup ended in elements that stock's kernel takes one by one."""
    return self._runs[subgroup].numel - 5


def count_every_subgroup(self, subgroup):
    state = self._state_of(self.group_of(subgroup))
    state["step"] += 1
    return state["step"]


CALLS = {
    "step": lambda engine, folder: equality.train(engine, CASE, 1, 3),
    "forward": lambda engine, folder: engine(torch.ones(4, WIDTH).bfloat16()),
    "save": lambda engine, folder: engine.save_checkpoint(folder, "poisoned"),
    "state_dict": lambda engine, folder: engine.optimizer.state_dict(),
    "masters": lambda engine, folder: engine.optimizer.single_partition_of_fp32_groups,
    "moments": lambda engine, folder: engine.optimizer.state,
    "reader": lambda engine, folder: read_state(engine),
    "offload": lambda engine, folder: engine.offload_states(
        include=[OffloadStateTypeEnum.lp_params]
    ),
    "weights alone": lambda engine, folder: (
        engine.load_checkpoint(folder, "good", load_module_only=True)[0]
        and engine.save_checkpoint(folder, "poisoned")
    ),
}
"""What must raise the failure of an update until a checkpoint is loaded."""


def after_loading(folder, tag, steps, skip):
    """What stock has that loads a checkpoint and goes on."""
    engine = equality.make_engine(CASE, None)
    assert engine.load_checkpoint(folder, tag)[0]
    results = equality.train(engine, CASE, steps, skip), equality.state_of(engine)
    engine.destroy()
    return results


def goes_on_as_stock(engine, folder, tag, steps, skip):
    results = equality.train(engine, CASE, steps, skip), equality.state_of(engine)
    return equality.differences(results, after_loading(folder, tag, steps, skip))


def failure(fault, folder):
    """Fails in the third update; whoever goes on must hear of it until a checkpoint is loaded."""
    engine = equality.make_engine(CASE, STRIDE | {"verify_every": int(fault == "wrong bit")})
    equality.train(engine, CASE, 2, 0)
    engine.save_checkpoint(folder, "good")
    with safety.broken(fault):
        found = {"failing step": safety.answer(lambda: equality.train(engine, CASE, 1, 2))}
    for name, call in CALLS.items():
        found[name] = [safety.answer(lambda call=call: call(engine, folder)) for _ in range(2)]
    found["latest"] = (folder / "latest").read_text()
    found["loaded"] = safety.answer(lambda: engine.load_checkpoint(folder)[0] is not None)
    found["differences"] = goes_on_as_stock(engine, folder, "good", 3, 2)
    found["destroy"] = safety.answer(engine.destroy)
    return found


def failures(folder):
    steppers.HostAdam = safety.BreakableAdam
    steppers.EmulatedDevice = safety.BreakableDevice
    try:
        return {
            fault: failure(fault, folder / fault.replace(" ", "-"))
            for fault in ("CPU lane", "GPU lane", "wrong bit")
        }
    finally:
        steppers.HostAdam, steppers.EmulatedDevice = HostAdam, EmulatedDevice


def held_engine():
    steppers.HostAdam = safety.BreakableAdam
    engine = equality.make_engine(CASE, STRIDE)
    steppers.HostAdam = HostAdam
    return engine


def interrupted_once(folder):
    """Ctrl-C in the middle of a step: it comes when the step is whole."""
    engine = held_engine()
    equality.train(engine, CASE, 1, 0)
    safety.BreakableAdam.may_go_on.clear()
    with safety.when_waiting(lambda: (safety.interrupt(), safety.go_on())):
        found = {"step": safety.answer(lambda: equality.train(engine, CASE, 1, 1))}
    found["steps"] = engine.global_steps
    engine.save_checkpoint(folder, "two")
    found["differences"] = goes_on_as_stock(engine, folder, "two", 1, 2)
    engine.destroy()
    return found


def interrupted_twice(folder):
    """A second Ctrl-C is let through: the half step is neither saved nor trained on."""
    engine = held_engine()
    equality.train(engine, CASE, 1, 0)
    engine.save_checkpoint(folder, "one")
    safety.BreakableAdam.may_go_on.clear()

    def interrupt_twice():
        safety.interrupt(after=safety.interrupt())

    with safety.when_waiting(interrupt_twice):
        found = {"step": safety.answer(lambda: equality.train(engine, CASE, 1, 1))}
    found["in flight"] = engine.optimizer.background.is_running
    with safety.when_waiting(safety.go_on):
        found["save"] = safety.answer(lambda: engine.save_checkpoint(folder, "poisoned"))
    found["hidden"] = engine.optimizer._done is not None
    found["loaded"] = safety.answer(lambda: engine.load_checkpoint(folder)[0] is not None)
    found["differences"] = goes_on_as_stock(engine, folder, "one", 2, 1)
    engine.destroy()
    return found


def loading_cut_short(folder):
    engine = equality.make_engine(CASE, STRIDE)
    equality.train(engine, CASE, 2, 0)
    engine.save_checkpoint(folder, "good")
    with mock.patch.object(homes.StateHomes, "return_home", side_effect=ZeroDivisionError("cut")):
        found = {"load": safety.answer(lambda: engine.load_checkpoint(folder, "good"))}
    found["save"] = safety.answer(lambda: engine.save_checkpoint(folder, "poisoned"))
    found["again"] = safety.answer(lambda: engine.load_checkpoint(folder, "good")[0] is not None)
    at_home = [home["exp_avg"].data_ptr() for home in engine.optimizer._homes._moments]
    states = engine.optimizer.state
    masters = engine.optimizer.single_partition_of_fp32_groups
    found["at home"] = [states[m]["exp_avg"].data_ptr() for m in masters] == at_home
    found["differences"] = goes_on_as_stock(engine, folder, "good", 2, 2)
    engine.destroy()
    return found


def exchange(stage, folder, **zero):
    """Save under one engine, load under another, go on; also a checkpoint before the first step."""
    case = of_stage(stage, zero=zero)
    blocks = {"stock": None, "ours": STRIDE}
    for name, block in blocks.items():
        engine = equality.make_engine(case, block)
        engine.save_checkpoint(folder / name, "new")
        equality.train(engine, case, steps=3)
        engine.save_checkpoint(folder / name, "step3")
        engine.destroy()
    found = {}
    for tag, skip in (("new", 0), ("step3", 3)):
        results = {}
        for saved in blocks:
            for name, block in blocks.items():
                engine = equality.make_engine(case, block)
                equality.train(engine, case, steps=1)  # whose moments must not survive
                engine.load_checkpoint(folder / saved, tag)
                trained = equality.train(engine, case, steps=2, skip=skip)
                results[saved, name] = (trained, equality.state_of(engine))
                engine.destroy()
        stock = results.pop(("stock", "stock"))
        found[tag] = {" to ".join(k): equality.differences(r, stock) for k, r in results.items()}
    return found


def universal(folder):
    """Universal checkpoints of both, loaded by both; moments are looked at through parameters."""
    blocks = {"stock": None, "ours": STRIDE}
    for name, block in blocks.items():
        engine = equality.make_engine(CASE, block)
        equality.train(engine, CASE, steps=3)
        engine.save_checkpoint(folder / name, "step3")
        engine.destroy()
    if os.environ["RANK"] == "0":
        convert(folder, blocks)
    torch.distributed.barrier()
    case = dataclasses.replace(CASE, config={"checkpoint": {"load_universal": True}})
    results = {}
    for saved in blocks:
        for name, block in blocks.items():
            engine = equality.make_engine(case, block)
            equality.train(engine, CASE, steps=1)  # whose views of moments must not be left
            engine.load_checkpoint(folder / saved, "step3_universal")
            trained = equality.train(engine, case, steps=2, skip=3)
            state = equality.state_of(engine)
            for param_name, param in engine.module.named_parameters():
                state[f"exp_avg of {param_name}"] = safe_get_full_optimizer_state(param, "exp_avg")
            results[saved, name] = (trained, state)
            engine.destroy()
    stock = results.pop(("stock", "stock"))
    return {" to ".join(k): equality.differences(r, stock) for k, r in results.items()}


def convert(folder, names):
    for name in names:
        words = ["--input_folder", folder / name / "step3"]
        words += ["--output_folder", folder / name / "step3_universal"]
        words += ["--num_extract_workers", 1, "--num_merge_workers", 1, "--inject_missing_state"]
        with mock.patch.object(sys, "argv", ["ds_to_universal", *map(str, words)]):
            ds_to_universal.main(ds_to_universal.parse_arguments())


def readers():
    """What ``read_state`` gives of both engines, before and after the first step."""
    found = {}
    for name, block in (("stock", None), ("ours", STRIDE)):
        engine = equality.make_engine(CASE, block)
        (before,) = read_state(engine)
        equality.train(engine, CASE, 2, 0)
        (after,) = read_state(engine)
        found[name] = [
            [[tensor.float().tolist() for tensor in kind] for kind in vars(state).values()]
            for state in (before, after)
        ]
        engine.destroy()
    return {"equal": found["ours"] == found["stock"], "moments": len(found["ours"][1][2])}


def moments_by_parameter():
    """What DeepSpeed's accessor says of parameters of two groups, and what the optimizer has."""
    case, found = of_stage(2, groups=two_groups), {}
    for name, block in (("stock", None), ("ours", STRIDE)):
        engine = equality.make_engine(case, block)
        equality.train(engine, case, 2)
        optimizer = engine.optimizer
        of_groups = [
            optimizer.optimizer.state[m] for m in optimizer.single_partition_of_fp32_groups
        ]
        found[name] = {
            "accessor": [
                [safety.answer(lambda p=p: moment_of(p)) for p in group["params"]]
                for group in two_groups(engine.module)
            ],
            "groups": [state["exp_avg"].tolist() for state in of_groups],
        }
        engine.destroy()
    return found


def moment_of(param):
    return safe_get_full_optimizer_state(param, "exp_avg").flatten().tolist()


def host_bytes(block):
    """Host memory of optimizer state and gradients, in bytes a parameter."""
    engine = equality.make_engine(CASE, block)
    equality.train(engine, CASE, 2, 0)
    optimizer, total = engine.optimizer, 0
    for master in optimizer.single_partition_of_fp32_groups:
        state = optimizer.optimizer.state[master]
        total += sum(t.nbytes for t in (master, master.grad, state["exp_avg"], state["exp_avg_sq"]))
    total += sum(buffer.nbytes for buffer in optimizer.param_buffer_of_bit16_for_cpu_offload_groups)
    numel = sum(optimizer.partition_size)
    engine.destroy()
    return total / numel


def locks_pages(**offload):
    """Whether lanes lock host memory; what stock's constructor locks, which nobody would free."""
    case = of_stage(2, zero={"offload_optimizer": {"device": "cpu", **offload}})
    with mock.patch.object(type(get_accelerator()), "pin_memory") as pin_memory:
        engine = equality.make_engine(case, STRIDE)
    optimizer = engine.optimizer
    found = [optimizer._lanes.locks_pages, optimizer.cpu_offload_pin_memory, pin_memory.call_count]
    engine.destroy()
    return found


def refusals():
    def mixed():
        model = tiny_net()
        model.layers[1].to(torch.bfloat16)
        return model

    def hooked():
        engine = equality.make_engine(CASE, STRIDE)
        engine.basic_optimizer.register_step_post_hook(lambda *_: None)
        try:
            equality.train(engine, CASE, 1, 0)
        finally:
            with contextlib.suppress(Exception):
                engine.destroy()

    def of_two_types(model):
        return [{"params": list(model.layers[i].parameters())} for i in (0, 1)]

    types = of_stage(2, make=mixed, groups=of_two_types, config={"bf16": {"enabled": False}})
    small = STRIDE | {"host_memory_bytes": 1000}
    return {
        "types": safety.answer(lambda: equality.make_engine(types, STRIDE)),
        "hook": safety.answer(hooked),
        "memory": safety.answer(lambda: equality.make_engine(CASE, small)),
    }


def main():
    out, folder = map(Path, sys.argv[1:])
    equality.prepare()
    report = {
        "exchange": {str(stage): exchange(stage, folder / str(stage)) for stage in (1, 2)},
        "universal": universal(folder / "universal"),
    }
    if os.environ["WORLD_SIZE"] == "2":
        report["not waited for"] = without_waiting_in_step()  # but by the next forward
    if os.environ["WORLD_SIZE"] == "1":
        report |= {
            "controls": controls(),
            "failures": failures(folder),
            "once": interrupted_once(folder / "once"),
            "twice": interrupted_twice(folder / "twice"),
            "loading cut short": loading_cut_short(folder / "short"),
            "reader": readers(),
            "moments by parameter": moments_by_parameter(),
            "host bytes": [host_bytes(STRIDE), host_bytes(None)],
            "locks pages": [locks_pages(), locks_pages(pin_memory=False)],
            "refusals": refusals(),
        }
    names = [t.name for t in threading.enumerate() if t.name.startswith("deep_optimizer_states")]
    report["threads"] = names
    out.with_suffix(f".{os.environ['RANK']}.json").write_text(json.dumps(report))
    equality.leave()


if __name__ == "__main__":
    main()
