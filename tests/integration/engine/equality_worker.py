"""Train a small model under stock DeepSpeed and under each policy; write what differs as JSON.

Run as every rank of a job: ``equality_worker.py EXTENT OUT.json FOLDER``, where the extent is
``few``, ``many`` or ``all`` of the runs. Not a test itself.
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

import cpuinfo
import deepspeed
import deepspeed.ops
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import (
    numa,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)
from engine_states import differences, state_of
from torch.utils.checkpoint import checkpoint

import deep_optimizer_states
from deep_optimizer_states.cores import ANYWHERE
from deep_optimizer_states.device.base import Wait
from deep_optimizer_states.device.emulated import Faults
from deep_optimizer_states.zero3 import steppers

WIDTH = 37
STEPS = 5
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
MANY_POLICIES = {1: tuple(POLICIES), 2: ("stride 2", "ratio 0.5", "dynamic"), 4: ()}
"""What every feature is run under, by number of ranks, in the extent ``many``."""
FEW_POLICIES = MANY_POLICIES[2]
"""Tiles without and with a resident part, and shared while they run."""
FEW_RESUMES = ("stock", "stride 2", "ratio 0.5")
"""Between which checkpoints are exchanged on more than one rank, if not all is run."""


class Net(torch.nn.Module):
    """Residual layers; some may be skipped, frozen or recomputed."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.skipped = ()
        self.reentrant = reentrant

    def forward(self, x):
        for idx, layer in enumerate(self.layers):
            if idx in self.skipped:
                continue
            if self.reentrant is None:
                x = torch.tanh(layer(x)) + x
            else:
                x = (
                    x if x.requires_grad else x.requires_grad_()
                )  # or reentrant backward has no root
                x = checkpoint(self._block, layer, x, use_reentrant=self.reentrant)
        return x

    @staticmethod
    def _block(layer, x):
        return torch.tanh(layer(x)) + x


@dataclasses.dataclass(frozen=True)
class Case:
    """One feature under which a policy must equal stock.

    ``skips`` maps a micro-step to the layers left out of it; ``before`` is called with the engine
    before each micro-step; ``make`` builds the model.
    """

    dtype: torch.dtype = torch.bfloat16
    accumulation: int = 2
    config: dict = dataclasses.field(default_factory=dict)
    zero: dict = dataclasses.field(default_factory=dict)
    make: callable = Net
    groups: callable = None
    skips: callable = lambda micro_step: ()
    before: callable = lambda engine, micro_step: None
    own_optimizer: bool = False
    steps: int = STEPS
    most_ranks: int = 4


def two_groups(model):
    return [
        {"params": list(model.layers[:3].parameters()), "lr": 3e-3, "weight_decay": 0.0},
        {
            "params": list(model.layers[3:].parameters()),
            "lr": 1e-2,
            "weight_decay": 0.2,
            "betas": (0.8, 0.99),
        },
    ]


def frozen_net():
    model = Net()
    model.layers[1].weight.requires_grad_(False)
    model.layers[4].bias.requires_grad_(False)
    return model


def net_in_zero_init():
    with deepspeed.zero.Init(config_dict_or_path=ds_config(Case(), None)):
        return Net()


def evaluate_between(engine, micro_step):
    engine.eval()
    with torch.no_grad():
        engine(torch.ones(4, WIDTH, device=engine.device, dtype=torch.bfloat16))
    engine.train()


def freeze_midway(engine, micro_step):
    if micro_step == 4:
        engine.module.layers[2].weight.requires_grad_(False)


def read_state_between(engine, micro_step):
    for parameter in engine.module.parameters():
        safe_get_full_fp32_param(parameter)
        if micro_step >= 2:  # stock has no moments before its first step
            safe_get_full_optimizer_state(parameter, "exp_avg")


def save_16bit_between(engine, micro_step):
    """Weights as a user saves them, right after a step; losses alone would not show them."""
    if micro_step % 2 == 0:
        weights = engine._zero3_consolidated_16bit_state_dict()
        if engine.global_rank == 0:
            total = sum(tensor.double().sum().item() for tensor in weights.values())
            engine.seen = [*getattr(engine, "seen", []), total]


def offload_midway(engine, micro_step):
    if micro_step == 4:
        engine.offload_states(include=[OffloadStateTypeEnum.lp_params])
        engine.reload_states()


def throw_away_midway(engine, micro_step):
    """A bad batch: what its window has gathered so far is thrown away."""
    if micro_step in (5, 9):
        engine.optimizer.zero_grad()


def set_weights_midway(engine, micro_step):
    if micro_step == 4:
        weight = engine.module.layers[3].weight
        safe_set_full_fp32_param(weight, safe_get_full_fp32_param(weight) * 0.5)


FIRST_CASE = "bf16, clipping, accumulation 2"
FP16 = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1}
ADAM_L2 = {"type": "Adam", "params": {"adam_w_mode": False}}
SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": {"total_num_steps": 6, "warmup_num_steps": 3, "warmup_max_lr": 1e-2},
}
CASES = {
    "bf16, clipping, accumulation 2": Case(),
    "bf16, gradients summed in fp32": Case(config={"data_types": {"grad_accum_dtype": "fp32"}}),
    "fp32": Case(dtype=torch.float32, config={"bf16": {"enabled": False}}),
    "fp16, dynamic scale, overflows": Case(
        dtype=torch.float16, config={"bf16": {"enabled": False}, "fp16": FP16}, steps=12
    ),
    "fp16, unused after an overflow": Case(
        dtype=torch.float16,
        config={"bf16": {"enabled": False}, "fp16": FP16},
        skips=lambda n: (2, 3) if n // 2 % 2 else (),
        steps=12,
    ),
    "no clipping, accumulation 1": Case(accumulation=1, config={"gradient_clipping": 0.0}),
    "Adam with L2": Case(config={"optimizer": ADAM_L2}),
    "two parameter groups, own betas": Case(groups=two_groups),
    "learning-rate scheduler": Case(config={"scheduler": SCHEDULER}),
    "DeepSpeedCPUAdam passed in": Case(own_optimizer=True),
    "all-reduce instead of reduce-scatter": Case(zero={"reduce_scatter": False}),
    "contiguous_gradients off": Case(zero={"contiguous_gradients": False}),
    "overlap_comm": Case(zero={"overlap_comm": True}),
    "one subgroup": Case(zero={"sub_group_size": 1_000_000}),
    "checkpointing": Case(make=functools.partial(Net, reentrant=False)),
    "checkpointing, reentrant": Case(make=functools.partial(Net, reentrant=True)),
    "zero.Init": Case(make=net_in_zero_init),
    "frozen parameters": Case(make=frozen_net),
    "parameters frozen midway": Case(before=freeze_midway),
    "unused in every other window": Case(skips=lambda n: (2, 3) if n // 2 % 2 else ()),
    "first used late in a window": Case(skips=lambda n: (2,) if n == 0 else ()),
    "never used": Case(skips=lambda n: (2,)),
    # Micro-steps 1, 3, 5, ... end a window. Layer 2 is dropped twice and comes late after it once;
    # layer 4 is dropped before it was ever part of an update.
    "used early in a window alone": Case(
        skips=lambda n: {3: (2,), 4: (2,), 7: (2,), 1: (4,), 8: (2, 4), 9: (2, 4)}.get(n, ())
    ),
    "used early alone, fp16, overflows": Case(
        dtype=torch.float16,
        config={"bf16": {"enabled": False}, "fp16": FP16},
        # In windows that follow one without overflow: the older gradient, which stock goes by, is
        # infinite otherwise, and the weights are NaN.
        skips=lambda n: {9: (2,), 10: (2,), 15: (2,), 17: (4,)}.get(n, ()),
        steps=12,
    ),
    "windows thrown away by zero_grad()": Case(
        before=throw_away_midway, skips=lambda n: (2,) if n in (5, 9) else ()
    ),
    "windows that the caller ends": Case(
        config={"managed_gradient_accumulation": False},
        skips=lambda n: {3: (2,), 4: (2,), 7: (4,)}.get(n, ()),
    ),
    "eval between steps": Case(before=evaluate_between),
    "16-bit weights saved between steps": Case(before=save_16bit_between),
    "offload_states and back": Case(before=offload_midway),
    "safe_get_* between steps": Case(before=read_state_between),
    # Stock itself fails here on a parameter whose elements the ranks do not divide.
    "safe_set_full_fp32_param": Case(before=set_weights_midway, most_ranks=1),
}


def ds_config(case, block):
    world = int(os.environ["WORLD_SIZE"])
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "train_batch_size": 4 * case.accumulation * world,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "sub_group_size": 700,
            "reduce_bucket_size": 3000,
            "stage3_param_persistence_threshold": 50,
            **case.zero,
        },
        "bf16": {"enabled": True},
        "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {}},
    } | case.config
    adam = {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}
    if case.own_optimizer:
        del config["optimizer"]
    else:
        kind = config["optimizer"]
        config["optimizer"] = {**kind, "params": {**adam, **kind["params"]}}
    return config | ({"deep_optimizer_states": block} if block else {})


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
        x, y = (
            torch.randn(4, WIDTH, generator=generator).to(engine.device, case.dtype)
            for _ in range(2)
        )
        if micro_step < skip * case.accumulation:
            continue
        case.before(engine, micro_step)
        engine.module.skipped = case.skips(micro_step)
        loss = ((engine(x) - y).float() ** 2).mean()
        engine.backward(loss)
        if engine.managed_gradient_accumulation() or (micro_step + 1) % case.accumulation == 0:
            engine.step()
        losses.append(loss.item())
        if (micro_step + 1) % case.accumulation == 0:
            norms.append(float(engine.get_global_grad_norm() or 0.0))
    return losses, norms


def run(case, block, faults=None):
    steppers.faults_for_tests = faults
    engine = make_engine(case, block)
    try:
        if block is not None:  # or page-locked memory lies anywhere
            assert engine.optimizer._lanes.near is not ANYWHERE
        results = train(engine, case, case.steps)
        if "fp16" in case.config:
            assert 0 < engine.skipped_steps < case.steps, "no overflow, or nothing else"
        results = (*results, getattr(engine, "seen", []))
        return results, state_of(engine), type(engine.optimizer).__name__
    finally:
        engine.destroy()
        steppers.faults_for_tests = None


def policies_of(number, case_name, extent):
    """The policies that a case is run under, ``number`` being its place among the cases."""
    world = int(os.environ["WORLD_SIZE"])
    if world > CASES[case_name].most_ranks:
        return ()
    if case_name == FIRST_CASE or extent == "all":
        return tuple(POLICIES)
    if extent == "many":
        return MANY_POLICIES[world]
    # Every feature under the policies that differ most, and by turns under one of the others;
    # on more than one rank, where nothing but the sums and the shares is new, under one by turns.
    others = [name for name in POLICIES if name not in FEW_POLICIES]
    alone = (*FEW_POLICIES, others[number % len(others)])
    return alone if world == 1 else (FEW_POLICIES[number % len(FEW_POLICIES)],)


def compare_all(report, extent):
    for number, (case_name, case) in enumerate(CASES.items()):
        names = policies_of(number, case_name, extent)
        if not names:
            continue
        # Ours first: in a fresh process DeepSpeed must not need stock's optimizer to have run.
        ours = {name: run(case, POLICIES[name], Faults(jitter_s=0.0005)) for name in names}
        *stock, stock_class = run(case, None)
        assert stock_class == "DeepSpeedZeroOptimizer_Stage3"
        if "sub_group_size" not in case.zero:
            assert len({key.split("/")[1] for key in stock[1]}) >= 3, "too few subgroups"
        for policy, (*results, our_class) in ours.items():
            assert our_class == "InterleavedZeroOptimizer"
            report[f"{case_name} | {policy}"] = differences(results, stock)


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
        report[f"two engines at once | {name}"] = differences(mine, theirs)


def break_rules(report):
    """Negative controls: without a wait the result must not be stock's."""
    # Where micro-batches are not summed, every gradient goes to where the last update reads it.
    by_wait = dict.fromkeys(
        (Wait.GRADS_FLUSHED, Wait.GRAD_HOME, Wait.PREFETCHED, Wait.STEPPED, Wait.WEIGHTS_READY),
        CASES[FIRST_CASE],
    )
    by_wait[Wait.GRAD_READ] = CASES["no clipping, accumulation 1"]
    for wait, case in by_wait.items():
        # A gradient that is overwritten too early shows only if its parameter was not waited for.
        without = {wait, Wait.WEIGHTS_READY} if wait is Wait.GRAD_READ else {wait}
        faults = Faults(jitter_s=0.01, without=frozenset(without))
        *stock, _ = run(case, None)
        *ours, _ = run(case, POLICIES["stride 2"], faults)
        report[f"without | {wait.name}"] = differences(ours, stock)


def exchanges(names, extent):
    """``(saved by, loaded by)``: every pair, or each name with stock, itself and its neighbour."""
    if extent != "few":
        return [(saved, loaded) for saved in names for loaded in names]
    pairs = [("stock", "stock")]
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        pairs += [(name, "stock"), ("stock", name), (name, name), (name, following)]
    return list(dict.fromkeys(pairs))


def resume(report, folder, extent):
    """Save under one engine, load under another, go on: equal to stock doing the same."""
    case = CASES[FIRST_CASE]
    blocks = {"stock": None, **POLICIES}
    if os.environ["WORLD_SIZE"] != "1" and extent != "all":
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
        report[f"resume | {name}"] = differences(ours, stock)


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

    def check_once(lanes, host_adam, tail, decoupled, dtypes):
        if (decoupled, dtypes) not in seen:
            seen.add((decoupled, dtypes))
            check(lanes, host_adam, tail, decoupled, dtypes)

    steppers.check_device_adam = check_once


def make_engines_cheaper():
    """Ask once in this process what DeepSpeed asks for every engine, and leave what it frees."""
    # The CPU's name takes a process and a second, the NUMA nodes take a process three times.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
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


def prepare():
    """Make this process a rank that compares many small engines."""
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
    report = {}
    compare_all(report, extent)
    if os.environ["WORLD_SIZE"] == "1" and not torch.cuda.is_available():
        break_rules(report)
    two_engines_at_once(report)
    resume(report, folder, extent)
    out.with_suffix(f".{os.environ['RANK']}.json").write_text(json.dumps(report))
    leave()


if __name__ == "__main__":
    main()
