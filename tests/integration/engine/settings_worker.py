"""Settings and calls beyond those of ``equality_worker``; write what differs from stock as JSON.

Run as every rank of a job: ``settings_worker.py EXTENT OUT FOLDER``, the extent being ``few`` (one
policy for each setting, by turns) or ``all``. Not a test itself.
"""

import contextlib
import functools
import json
import os
import sys
import warnings
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
from deepspeed.utils import (
    safe_get_full_grad,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

sys.path.insert(0, str(Path(__file__).parent))
import equality_worker as equality
from equality_cases import WIDTH, Case, Net

from deep_optimizer_states.adapter import steppers
from deep_optimizer_states.core.device.emulated import Faults

POLICIES = {
    "all-host": {**equality.SMALL_TILES, "policy": "all-host"},
    "stride 2": equality.POLICIES["stride 2"],
    "dynamic": equality.POLICIES["dynamic"],
}
FP16 = {"bf16": {"enabled": False}, "fp16": {"enabled": True, "loss_scale": 2.0**8}}
AUTOCAST = {"bf16": {"enabled": False}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


class TiedNet(Net):
    """Two layers share a weight."""

    def __init__(self):
        super().__init__()
        self.layers[4].weight = self.layers[0].weight


class ExplodingNet(Net):
    """Its gradients are infinite whenever ``explodes`` is set; its loss never is."""

    explodes = False

    def forward(self, x):
        x = super().forward(x)
        if self.explodes:
            x.register_hook(lambda grad: grad * torch.inf)
        return x


def explode_twice(engine, micro_step):
    engine.module.explodes = micro_step in (4, 7)


def write_gathered(engine, micro_step):
    """Writes that the next update undoes, as in stock: forward alone sees them."""
    if micro_step in (2, 5):
        parameters = [engine.module.layers[3].weight, engine.module.layers[2].bias]
        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
            if engine.global_rank == 0:
                parameters[0].mul_(0.5)
                parameters[1].add_(1.0)


def set_rates(engine, micro_step):
    for group in engine.optimizer.param_groups:
        group["lr"] = torch.tensor(1e-3 * (micro_step + 1))
        group["weight_decay"] = 0.01 * micro_step
        group["betas"] = (0.9, 0.9 + 0.01 * (micro_step // 4))


def halve_local_state(engine, micro_step):
    if micro_step == 4:
        for parameter in engine.module.parameters():
            safe_set_local_fp32_param(parameter, safe_get_local_fp32_param(parameter) * 0.5)
            moment = safe_get_local_optimizer_state(parameter, "exp_avg")
            safe_set_local_optimizer_state(parameter, moment * 0.5, "exp_avg")


CASES = {
    "tied weights": Case(make=TiedNet),
    "static loss scale": Case(dtype=torch.float16, config=FP16),
    "prescale_gradients": Case(config={"prescale_gradients": True}, zero={"reduce_scatter": False}),
    "gradient_predivide_factor": Case(
        config={"gradient_predivide_factor": 2.0}, zero={"reduce_scatter": False}
    ),
    "communication_data_type": Case(config={"communication_data_type": "fp32"}),
    "every parameter persists": Case(zero={"stage3_param_persistence_threshold": 10**6}),
    "fp32_optimizer_states off": Case(
        config={"optimizer": {"type": "AdamW", "params": {"fp32_optimizer_states": False}}}
    ),
    "infinite gradients": Case(
        make=ExplodingNet, before=explode_twice, skips=lambda n: (2,) if n // 2 in (2, 3) else ()
    ),
    "GatheredParameters writes": Case(before=write_gathered),
    "rates set by hand": Case(before=set_rates),
    "safe_set_local_*": Case(before=halve_local_state),
}


def batches(engine, case, number):
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    for _ in range(number):
        yield tuple(
            torch.randn(4, WIDTH, generator=generator).to(engine.device, case.dtype)
            for _ in range(2)
        )


def backward(engine, batch):
    x, y = batch
    loss = ((engine(x) - y).float() ** 2).mean()
    engine.backward(loss)
    return loss.item()


def step_at_the_end_of_windows(engine, case, by_hand):
    """Windows of 1 to 3 micro-batches; DeepSpeed is told their end, or sees it in ``step()``."""
    losses, norms, left = [], [], batches(engine, case, 9)
    for length in (1, 2, 3, 2, 1):
        for number in range(length):
            if by_hand:
                engine.set_gradient_accumulation_boundary(number == length - 1)
            losses.append(backward(engine, next(left)))
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms


def read_gradients(engine, case):
    """Before and after steps; of parameters that took no part in the window too."""
    losses, seen = [], []

    def read():
        for parameter in engine.module.parameters():
            seen.append(safe_get_full_grad(parameter).flatten().tolist())

    for micro_step, batch in enumerate(batches(engine, case, 10)):
        engine.module.skipped = (2,) if micro_step // 2 in (2, 3) else ()
        losses.append(backward(engine, batch))
        if micro_step % 2:
            read()
        engine.step()
        if micro_step % 2:
            read()
    return losses, seen


def read_state(engine, case):
    """Right after ``step()``, which returns while the update runs on."""
    losses, seen = [], []
    for micro_step, batch in enumerate(batches(engine, case, 6)):
        losses.append(backward(engine, batch))
        engine.step()
        if micro_step % 2:
            seen += [state["exp_avg"].tolist() for state in engine.optimizer.state.values()]
    return losses, seen


def step_under_other_defaults(engine, case):
    """Of torch: a type, and a device on which no tensor has values."""
    losses = []
    for batch in batches(engine, case, 6):
        losses.append(backward(engine, batch))
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("meta")
        try:
            engine.step()
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
    return losses, []


LOOPS = {
    "managed_gradient_accumulation off": (
        functools.partial(step_at_the_end_of_windows, by_hand=False),
        Case(config={"managed_gradient_accumulation": False}),
    ),
    "boundaries set by hand": (
        functools.partial(step_at_the_end_of_windows, by_hand=True),
        Case(),
    ),
    "safe_get_full_grad": (read_gradients, Case()),
    "engine.optimizer.state": (read_state, Case()),
    "torch's other defaults": (step_under_other_defaults, Case()),
    # Last: DeepSpeed keeps both switched on for the rest of the process.
    "comms_logger": (equality.train, Case(config={"comms_logger": {"enabled": True}})),
    "torch_autocast in bfloat16": (
        equality.train,
        Case(dtype=torch.float32, config=AUTOCAST),
    ),
}


def run(case, block, loop=equality.train):
    steppers.faults_for_tests = Faults(jitter_s=0.0005) if block else None
    engine = equality.make_engine(case, block)
    try:
        return loop(engine, case), equality.state_of(engine)
    finally:
        engine.destroy()


def resumed(way, block, folder):
    """Weights alone from a checkpoint, then training on."""
    engine = equality.make_engine(Case(), block)
    equality.train(engine, Case(), steps=3)
    engine.save_checkpoint(folder, tag="step3")
    engine.destroy()
    if way == "zero_to_fp32":
        return ([], []), get_fp32_state_dict_from_zero_checkpoint(folder, tag="step3")
    engine = equality.make_engine(Case(), block)
    engine.load_checkpoint(folder, tag="step3", **way)
    try:
        return equality.train(engine, Case(), skip=3), equality.state_of(engine)
    finally:
        engine.destroy()


WAYS = {
    "zero_to_fp32": "zero_to_fp32",
    "load_optimizer_states=False": {"load_optimizer_states": False},
    "load_module_only": {"load_module_only": True, "load_optimizer_states": False},
}


def warned_of_the_scheduler(block):
    """Whether torch's scheduler takes ``step()`` for never called."""
    model = Net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            config=equality.ds_config(Case(), block),
        )
        equality.train(engine, Case(), steps=2)
        engine.destroy()
    return any("lr_scheduler.step()" in str(warning.message) for warning in caught)


def compare(report, extent, name, act):
    stock = act(None, "stock")
    for policy, block in equality.by_turns(POLICIES, len(report), extent).items():
        report[f"{name} | {policy}"] = equality.differences(act(block, policy), stock)


def compare_all(report, extent, folder):
    compare_one = functools.partial(compare, report, extent)
    for name, case in CASES.items():
        compare_one(name, lambda block, _, case=case: run(case, block))
    for name, way in WAYS.items():
        compare_one(
            name,
            lambda block, policy, name=name, way=way: resumed(way, block, folder / name / policy),
        )
    for policy, block in equality.by_turns(POLICIES, len(report), extent).items():
        found = warned_of_the_scheduler(block)
        report[f"torch's scheduler | {policy}"] = ["a warning"] if found else []
    for name, (loop, case) in LOOPS.items():
        compare_one(name, lambda block, _, case=case, loop=loop: run(case, block, loop))


def main():
    extent, out, folder = sys.argv[1], *map(Path, sys.argv[2:])
    equality.prepare()
    report = {}
    with contextlib.redirect_stdout(sys.stderr):
        compare_all(report, extent, folder)
    out.with_suffix(f".{os.environ['RANK']}.json").write_text(json.dumps(report))
    equality.leave()


if __name__ == "__main__":
    main()
