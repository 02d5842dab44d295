"""Train a small model under stock DeepSpeed and under each policy; write what differs as JSON.

Run as every rank of a job: ``equality_worker.py EXTENT OUT.json FOLDER``, where the extent is
``once``, ``few``, ``many`` or ``all`` of the runs. Not a test itself.
"""

import contextlib
import dataclasses
import functools
import gc
import json
import os
import sys
import types
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.utils import numa
from engine_states import differences, state_of
from equality_cases import FIRST_CASE, STEPS, all_cases, columns_of, ds_config
from packaging.version import Version

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
from late import late

import deep_optimizer_states
from deep_optimizer_states.adapter import steppers
from deep_optimizer_states.core.device.base import Wait
from deep_optimizer_states.core.device.emulated import Faults
from deep_optimizer_states.core.host import ANYWHERE
from deep_optimizer_states.errors import UnsupportedDeepSpeedError

CASES = all_cases()
# No update is repeated: one that is, is waited for, and the next forward would race with none.
SMALL_TILES = {"enabled": True, "tile_numel": 256, "verify_every": 0}
POLICIES = {
    "all-host": {"enabled": True, "policy": "all-host", "just_in_time_forward": False},
    "stride 1": {"enabled": True, "policy": "stride", "stride": 1},
    "stride 2": {**SMALL_TILES, "policy": "stride", "stride": 2},
    "stride 3": {"enabled": True, "policy": "stride", "stride": 3},
    "all-device": {**SMALL_TILES, "policy": "all-device"},
    "ratio 0.5": {**SMALL_TILES, "policy": "ratio", "ratio": 0.5},
    "stride 2, ratio 0.7": {"enabled": True, "policy": "stride", "stride": 2, "ratio": 0.7},
    "dynamic": {**SMALL_TILES, "policy": "dynamic"},
}
PREFETCHED, BEFORE_NORM = "dynamic, prefetched", "stride 2, before the norm"
IN_BACKWARD = {
    # The third step would settle which gradients stay on the device, and nothing comes before it.
    PREFETCHED: {
        **POLICIES["dynamic"],
        "prefetch_memory_bytes": 50_000,
        "keep_grads_on_device": False,
    },
    BEFORE_NORM: {
        **POLICIES["stride 2"],
        "step_before_norm": True,
        "prefetch_memory_bytes": 20_000,
        "keep_grads_on_device": False,
    },
}
"""Ways of ZeRO-3 to work during backward; the second is without clipping, on both sides."""
MANY_POLICIES = {1: tuple(POLICIES), 2: ("stride 2", "ratio 0.5", "dynamic"), 4: ()}
"""What every feature is run under, by number of ranks, in the extent ``many``."""
CLASSES = {
    "1": ("DeepSpeedZeroOptimizer", "InterleavedFlatOptimizer"),
    "2": ("DeepSpeedZeroOptimizer", "InterleavedFlatOptimizer"),
    "3": ("DeepSpeedZeroOptimizer_Stage3", "InterleavedZeroOptimizer"),
}
"""Stock's optimizer of a stage, and ours."""
FEW_RESUMES = ("stock", "stride 2", "ratio 0.5")
"""Between which checkpoints are exchanged on more than one rank, if not all is run."""


def make_engine(case, block):
    torch.manual_seed(3)
    model = case.make()
    parameters = case.groups(model) if case.groups else model.parameters()
    optimizer = DeepSpeedCPUAdam(parameters, lr=2e-3) if case.own_optimizer else None
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=None if optimizer else parameters,
        config=ds_config(case, block),
    )
    return engine


def train(engine, case, steps=STEPS, skip=0):
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    losses, norms = [], []
    for micro_step in range((skip + steps) * case.accumulation):
        batch = case.batch(generator)
        if micro_step < skip * case.accumulation:
            continue
        case.before(engine, micro_step)
        engine.module.skipped = case.skips(micro_step)
        loss = case.loss(engine, [_to_engine(tensor, engine, case) for tensor in batch])
        engine.backward(loss)
        if is_managed(engine) or (micro_step + 1) % case.accumulation == 0:
            engine.step()
        losses.append(loss.item())
        if (micro_step + 1) % case.accumulation == 0:
            norms.append(float(engine.get_global_grad_norm() or 0.0))
    return losses, norms


def is_managed(engine):
    """Whether DeepSpeed knows when a window ends; before 0.19 it always does."""
    return getattr(engine, "managed_gradient_accumulation", lambda: True)()


def _to_engine(tensor, engine, case):
    """A tensor of a batch on the engine's device, numbers in the type of the case."""
    return tensor.to(engine.device, case.dtype if tensor.is_floating_point() else None)


def run(case, block, faults=None):
    steppers.faults_for_tests = faults
    engine = make_engine(case, block)
    try:
        if block is not None:  # or page-locked memory lies anywhere
            assert engine.optimizer._lanes.near is not ANYWHERE
            assert engine.optimizer._homes.num_subgroups >= 3 or not case.is_cut
        results = train(engine, case, case.steps)
        if case.config.get("fp16", {}).get("enabled"):
            assert 0 < engine.skipped_steps < case.steps, "no overflow, or nothing else"
        results = (*results, getattr(engine, "seen", []))
        return results, state_of(engine), type(engine.optimizer).__name__
    finally:
        engine.destroy()
        steppers.faults_for_tests = None


def run_late(case, block, without, lane=""):
    """Run it with waits left out: updates, and one lane, are as late as the waits that are kept.

    Args:
        case: What is trained.
        block: Of the policy.
        without: The waits.
        lane: Its name; no lane is late without one.
    """
    with late(lane):
        return run(case, block, Faults(without=frozenset(without)))


def policies_of(number, case_name, extent):
    """The policies that a case is run under, ``number`` being its place among the cases."""
    world = world_size()
    case = CASES[case_name]
    if world > case.most_ranks:
        return ()
    if case.few and extent != "all" and world > 2:
        return ()
    names = case.policies or tuple(POLICIES)
    if extent == "all" or (case_name == FIRST_CASE and extent != "once"):
        return names
    if extent == "many":
        if not case.policies:
            return MANY_POLICIES[world]
        return (names * 2)[number % len(names) :][: case.few or len(names)]
    # In the extent ``few`` one rank and two take every other case, each of them all policies.
    if extent == "few" and case.most_ranks > 1 and world != 1 + number % 2:
        return ()
    return (names[number // 2 % len(names)],)


def ways_in_backward(case_name, extent):
    """Those of ``IN_BACKWARD`` that a case is run in: all, or for short of the first case."""
    case = CASES[case_name]
    is_run = extent == "all" or (case_name == FIRST_CASE and extent != "once")
    if not is_run or columns_of(case)["stage"] != "3" or case.most_ranks < world_size():
        return ()
    if not case.config.get("managed_gradient_accumulation", True):
        return ()  # refused: no backward knows whether the window ends
    is_scaled = "fp16" in case.config
    return (PREFETCHED,) if is_scaled else tuple(IN_BACKWARD)


def by_turns(policies, number, extent):
    """Return all policies, or in the extent ``few`` the one whose turn it is."""
    name = [*policies][number % len(policies)]
    return policies if extent == "all" else {name: policies[name]}


def world_size():
    return int(os.environ["WORLD_SIZE"])


def compare_before_norm(report, case_name, case):
    unclipped = dataclasses.replace(case, config={**case.config, "gradient_clipping": 0})
    block, faults = IN_BACKWARD[BEFORE_NORM], Faults(jitter_s=0.0005)
    *ours, our_class = run(unclipped, block, faults)
    *stock, stock_class = run(unclipped, None)
    assert (stock_class, our_class) == CLASSES["3"]
    report["comparisons"][f"{case_name} | {BEFORE_NORM}"] = differences(ours, stock)


def compare_all(report, extent):
    for number, (case_name, case) in enumerate(CASES.items()):
        names = policies_of(number, case_name, extent)
        if not names:
            continue
        if not case.is_in_this_release:
            report["left_out"][case_name] = len(names)
            continue
        ways = ways_in_backward(case_name, extent)
        # Ours first: in a fresh process DeepSpeed must not need stock's optimizer to have run.
        try:
            blocks = {name: POLICIES[name] for name in names}
            blocks |= {PREFETCHED: IN_BACKWARD[PREFETCHED]} if ways else {}
            jitter = Faults(jitter_s=0.0005)
            ours = {name: run(case, block, jitter) for name, block in blocks.items()}
        except UnsupportedDeepSpeedError as error:  # on every rank alike
            report["refused"][case_name] = str(error)
            continue
        *stock, stock_class = run(case, None)
        expected = CLASSES[columns_of(case)["stage"]]
        for policy, (*results, our_class) in ours.items():
            assert (stock_class, our_class) == expected
            report["comparisons"][f"{case_name} | {policy}"] = differences(results, stock)
        if BEFORE_NORM in ways:
            compare_before_norm(report, case_name, case)
        report["columns"][case_name] = columns_of(case)


def two_engines_at_once(report):
    """Two engines of one process, a step of one between the steps of the other."""
    case = CASES[FIRST_CASE]

    def both(blocks):
        engines = [make_engine(case, block) for block in blocks]
        losses = [[], []]
        for step in range(STEPS):
            for engine, seen in zip(engines, losses, strict=True):
                seen += train(engine, case, steps=1, skip=step)[0]
        results = [((seen, []), state_of(e)) for e, seen in zip(engines, losses, strict=True)]
        for engine in engines:
            engine.destroy()
        return results

    ours = both([POLICIES["stride 2"], POLICIES["dynamic"]])
    stock = both([None, None])
    for name, mine, theirs in zip(("stride 2", "dynamic"), ours, stock, strict=True):
        report["comparisons"][f"two engines at once | {name}"] = differences(mine, theirs)
    report["columns"]["two engines at once"] = columns_of(case)


def break_rules(report):
    """Negative controls: without a wait the result must not be stock's."""
    lanes = {Wait.GRADS_FLUSHED: "grads", Wait.GRAD_HOME: "grads", Wait.PREFETCHED: "H2D"}
    lanes |= {Wait.STEPPED: "GPU", Wait.WEIGHTS_READY: ""}
    block, case = POLICIES["stride 2"], CASES[FIRST_CASE]
    *stock, _ = run(case, None)
    for wait, lane in lanes.items():
        *ours, _ = run_late(case, block, {wait}, lane)
        report["controls"][wait.name] = differences(ours, stock)
        *ours, _ = run_late(case, block, (), lane)
        report["kept"][wait.name] = differences(ours, stock)
    # Where micro-batches are not summed, every gradient goes to where the last update reads it. One
    # that is overwritten too early shows only if its parameter was not waited for.
    case = CASES["no clipping, accumulation 1"]
    *kept, _ = run_late(case, block, {Wait.WEIGHTS_READY})
    *ours, _ = run_late(case, block, {Wait.WEIGHTS_READY, Wait.GRAD_READ})
    report["controls"][Wait.GRAD_READ.name] = differences(ours, kept)


def exchanges(names, extent):
    """``(saved by, loaded by)``: every pair, or a ring through all names."""
    if extent in ("many", "all"):
        return [(saved, loaded) for saved in names for loaded in names]
    return [("stock", "stock"), *zip(names, [*names[1:], names[0]], strict=True)]


def resume(report, folder, extent):
    """Save under one engine, load under another, go on: equal to stock doing the same."""
    case = CASES[FIRST_CASE]
    blocks = {"stock": None, **POLICIES}
    if extent == "once" or (os.environ["WORLD_SIZE"] != "1" and extent != "all"):
        blocks = {name: blocks[name] for name in FEW_RESUMES}
    for name, block in blocks.items():
        engine = make_engine(case, block)
        train(engine, case, steps=3)
        with contextlib.redirect_stdout(sys.stderr):
            engine.save_checkpoint(folder / name)
        engine.destroy()
    results = {}
    for saved, name in exchanges([*blocks], extent):
        engine = make_engine(case, blocks[name])
        engine.load_checkpoint(folder / saved)
        results[f"{saved} to {name}"] = (train(engine, case, skip=3), state_of(engine))
        engine.destroy()
    stock = results.pop("stock to stock")
    for name, ours in results.items():
        report["comparisons"][f"resume | {name}"] = differences(ours, stock)


def leave():
    """End this rank. A rank of gloo now and then aborts while the interpreter is torn down, after
    all work is done and under stock as well, so that teardown is skipped."""
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def check_each_type_once():
    """The device's self-check takes a third of the time of an engine as small as these."""
    check, seen = steppers.check_device_adam, set()

    def check_once(lanes, host_adam, tail, *types):
        if types not in seen:
            seen.add(types)
            check(lanes, host_adam, tail, *types)

    steppers.check_device_adam = check_once


def make_engines_cheaper():
    """Ask once in this process what DeepSpeed asks for every engine, and leave what it frees."""
    # To learn the NUMA nodes takes a process three times.
    numa.get_numa_cores = functools.cache(numa.get_numa_cores)
    # For every engine all objects that there are would be looked through for garbage.
    zero_utils.gc = types.SimpleNamespace(collect=lambda: 0)
    gc.freeze()
    leave_out_muon()


def leave_out_muon():
    """DeepSpeed imports torch's compiler for Muon, which no engine of these tests is made with."""
    muon = types.ModuleType("muon_optimizer")
    muon.MuonWithAuxAdam = type("MuonWithAuxAdam", (), {})
    sys.modules["deepspeed.runtime.zero.muon.muon_optimizer"] = muon


def wait_for_every_gather():
    """Mend what DeepSpeed before 0.19.8 does wrong on gloo, in stock and ours alike.

    It waits for the last of several gathers, which end one by one there: with ranks that are late,
    two runs of stock itself differ.
    """
    if torch.cuda.is_available() or Version(deepspeed.__version__) >= Version("0.19.8"):
        return
    for name in ("all_gather", "all_gather_into_tensor"):
        setattr(dist, name, _waited_for(getattr(dist, name)))


def _waited_for(gather):
    def gather_and_wait(*args, **kwargs):
        handle = gather(*args, **kwargs)
        if handle is not None:
            handle.wait()
        return handle

    return gather_and_wait


def prepare():
    """Make this process a rank that compares many small engines."""
    wait_for_every_gather()
    make_engines_cheaper()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    if not torch.cuda.is_available():
        # DeepSpeed's CPU accelerator says no to fp16, which torch computes on a CPU all the same.
        type(get_accelerator()).is_fp16_supported = lambda self: True
    deep_optimizer_states.install()
    check_each_type_once()


def main():
    extent, out, folder = sys.argv[1], *map(Path, sys.argv[2:])
    prepare()
    parts = ("comparisons", "controls", "kept", "columns", "left_out", "refused")
    report = {"deepspeed": deepspeed.__version__, **{name: {} for name in parts}}
    compare_all(report, extent)
    is_alone = os.environ["WORLD_SIZE"] == "1" and not torch.cuda.is_available()
    if is_alone and extent != "once":
        break_rules(report)
    two_engines_at_once(report)
    resume(report, folder, extent)
    out.with_suffix(f".{os.environ['RANK']}.json").write_text(json.dumps(report))
    leave()


if __name__ == "__main__":
    main()
