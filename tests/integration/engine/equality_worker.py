"""Train a small model under stock DeepSpeed and under each policy; write what differs as JSON.

Run as every rank of a job: ``equality_worker.py OUT.json FOLDER``. Not a test itself.
"""

import contextlib
import dataclasses
import functools
import json
import os
import sys
from pathlib import Path

import cpuinfo
import deepspeed
import deepspeed.ops
import torch

import deep_optimizer_states
from deep_optimizer_states import zero3
from deep_optimizer_states.device.base import Wait
from deep_optimizer_states.device.emulated import Faults

WIDTH = 37
STEPS = 5
ENABLED = {"enabled": True}
POLICIES = {
    "all-host": {**ENABLED, "policy": "all-host"},
    "stride-1": {**ENABLED, "policy": "stride", "stride": 1},
    "stride-2": {**ENABLED, "policy": "stride", "stride": 2},
    "stride-3": {**ENABLED, "policy": "stride", "stride": 3},
    "all-device": {**ENABLED, "policy": "all-device"},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One setting under which every policy must equal stock."""

    dtype: torch.dtype = torch.bfloat16
    accumulation: int = 2
    groups: int = 1
    config: dict = dataclasses.field(default_factory=dict)
    zero: dict = dataclasses.field(default_factory=dict)


CASES = {
    "bf16-clip-accumulation": Case(),
    "bf16-fp32-accumulation": Case(config={"data_types": {"grad_accum_dtype": "fp32"}}),
    "fp32": Case(dtype=torch.float32, config={"bf16": {"enabled": False}}),
    "two-groups-l2": Case(
        groups=2, config={"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}
    ),
    "contiguous-all-reduce": Case(zero={"reduce_scatter": False, "contiguous_gradients": True}),
    "overlap": Case(zero={"overlap_comm": True}, accumulation=1),
}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


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
    config["optimizer"]["params"] = {
        "lr": 1e-2,
        "betas": [0.9, 0.95],
        "weight_decay": 0.1,
    } | config["optimizer"]["params"]
    return config | ({"deep_optimizer_states": block} if block else {})


def make_engine(case, block):
    torch.manual_seed(3)
    model = Net()
    parameters = model.parameters()
    if case.groups == 2:
        split = [model.layers[:3].parameters(), model.layers[3:].parameters()]
        parameters = [
            {"params": list(split[0]), "lr": 3e-3, "weight_decay": 0.0},
            {"params": list(split[1]), "lr": 1e-2, "weight_decay": 0.2},
        ]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, config=ds_config(case, block)
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
        loss = ((engine(x) - y).float() ** 2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if (micro_step + 1) % case.accumulation == 0:
            norms.append(float(engine.get_global_grad_norm()))
    return losses, norms


def state_of(engine):
    """Every tensor of the optimizer's state, padding cut off (stock leaves it uninitialised)."""
    optimizer = engine.optimizer
    result = {}
    for idx, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        state = optimizer.optimizer.state[master]
        tensors = {
            "master": master.data,
            "exp_avg": state["exp_avg"],
            "exp_avg_sq": state["exp_avg_sq"],
            "weights": optimizer.fp16_partitioned_groups_flat[idx],
        }
        partitions = optimizer.fp16_partitioned_groups[idx]
        for name, tensor in tensors.items():
            pieces = tensor.detach().clone().split([p.numel() for p in partitions])
            for number, (piece, pad) in enumerate(
                zip(pieces, optimizer.groups_padding[idx], strict=True)
            ):
                result[f"{name}/{idx}/{number}"] = piece[: piece.numel() - pad]
    return result


def differences(ours, stock):
    (losses, norms), state = ours
    (stock_losses, stock_norms), stock_state = stock
    found = []
    if losses != stock_losses:
        found.append("losses")
    if norms != stock_norms:
        found.append("gradient norms")
    assert state.keys() == stock_state.keys()
    found += [key for key in state if not torch.equal(state[key], stock_state[key])]
    return found


def run(case, block, faults=None):
    zero3.faults_for_tests = faults
    engine = make_engine(case, block)
    try:
        return train(engine, case), state_of(engine), type(engine.optimizer).__name__
    finally:
        engine.destroy()
        zero3.faults_for_tests = None


def compare_all(report):
    for case_name, case in CASES.items():
        # Ours first: in a fresh process DeepSpeed must not need stock's optimizer to have run.
        ours = {name: run(case, block, Faults(jitter_s=0.002)) for name, block in POLICIES.items()}
        *stock, stock_class = run(case, None)
        assert stock_class == "DeepSpeedZeroOptimizer_Stage3"
        assert len({key.split("/")[1] for key in stock[1]}) >= 3, "too few subgroups"
        for policy, (*results, our_class) in ours.items():
            assert our_class == "InterleavedZeroOptimizer"
            report[f"{case_name} | {policy}"] = differences(results, stock)


def break_rules(report):
    """Negative controls: without a wait the result must not be stock's."""
    case = CASES["bf16-clip-accumulation"]
    *stock, _ = run(case, None)
    for wait in (Wait.GRADS_FLUSHED, Wait.GRAD_HOME, Wait.PREFETCHED, Wait.STEPPED):
        faults = Faults(jitter_s=0.01, without=frozenset({wait}))
        *ours, _ = run(case, POLICIES["stride-2"], faults)
        report[f"without | {wait.name}"] = differences(ours, stock)


def resume(report, folder):
    """Save under one engine, load under another, go on: equal to stock doing the same."""
    case = CASES["bf16-clip-accumulation"]
    blocks = {"stock": None, "stride-2": POLICIES["stride-2"]}
    for name, block in blocks.items():
        engine = make_engine(case, block)
        train(engine, case, steps=3)
        with contextlib.redirect_stdout(sys.stderr):
            engine.save_checkpoint(folder / name)
        engine.destroy()
    results = {}
    for saved in blocks:
        for name, block in blocks.items():
            engine = make_engine(case, block)
            engine.load_checkpoint(folder / saved)
            results[f"{saved} to {name}"] = (train(engine, case, skip=3), state_of(engine))
            engine.destroy()
    stock = results.pop("stock to stock")
    for name, ours in results.items():
        report[f"resume | {name}"] = differences(ours, stock)


def main():
    out, folder = map(Path, sys.argv[1:])
    # Every DeepSpeedCPUAdam asks for the CPU's name, which starts a process and takes a second.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    deep_optimizer_states.install()
    report = {}
    compare_all(report)
    if os.environ["WORLD_SIZE"] == "1" and not torch.cuda.is_available():
        break_rules(report)
    resume(report, folder)
    out.with_suffix(f".{os.environ['RANK']}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
