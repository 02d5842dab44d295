"""What the workers of the frameworks share: DeepSpeed's config, the state of an engine, the report.

Every worker has the shape ``worker.py OUT FOLDER``, runs as every rank of a job, and writes what
differs from stock to ``OUT.RANK.json``.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from deep_optimizer_states.config import BLOCK
from deep_optimizer_states.state_reader import MOMENTS, read_state

BLOCKS = {
    "stride-2": {"enabled": True, "policy": "stride", "stride": 2},
    "all-host": {"enabled": True, "policy": "all-host"},
}
OURS, STOCK = "InterleavedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"
SEED = 11
ON_CPU = not torch.cuda.is_available()


@dataclasses.dataclass
class Result:
    """What one training run leaves behind."""

    losses: list
    norms: list
    state: dict
    optimizer: str
    subgroups: int


def ds_config(block, **more):
    """ZeRO-3 offload cut into several subgroups; ``block`` None leaves stock DeepSpeed."""
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "sub_group_size": 700,
            "reduce_bucket_size": 4000,
            "stage3_param_persistence_threshold": 100,
        },
    }
    return config | more | ({BLOCK: block} if block else {})


def result_of(engine, losses, norms):
    """The result of a run on ``engine``."""
    stage = engine.zero_optimization_stage()
    return Result(
        losses=losses,
        norms=[float(norm) for norm in norms if norm is not None],
        state=state_by_parameter(engine) if stage == 3 else flat_state(engine),
        optimizer=type(engine.optimizer).__name__,
        subgroups=len(engine.optimizer.fp32_partitioned_groups_flat) if stage == 3 else 0,
    )


def state_by_parameter(engine):
    """What ZeRO-3 has trained, read through DeepSpeed's public functions."""
    state = {}
    for name, param in engine.module.named_parameters():
        state[f"master/{name}"] = safe_get_full_fp32_param(param)
        for moment in MOMENTS:
            state[f"{moment}/{name}"] = safe_get_full_optimizer_state(param, moment)
        with deepspeed.zero.GatheredParameters([param]):
            state[f"weights/{name}"] = param.data
            state = {key: tensor.detach().cpu().clone() for key, tensor in state.items()}
    return state


def flat_state(engine):
    """What ZeRO-1 or 2 has trained, whose moments those functions of stock do not give."""
    [whole] = read_state(engine)
    half = len(whole.moments) // 2
    parts = {"weights": whole.weights, "master": whole.masters}
    parts |= dict(zip(MOMENTS, (whole.moments[:half], whole.moments[half:]), strict=True))
    return {
        f"{part}/{idx}": tensor.detach().cpu().clone()
        for part, tensors in parts.items()
        for idx, tensor in enumerate(tensors)
    }


def differences(ours, stock):
    """Names of what is not bitwise equal."""
    found = []
    for name in ("losses", "norms"):
        assert getattr(stock, name), f"no {name} were seen"
        if getattr(ours, name) != getattr(stock, name):
            found.append(name)
    assert ours.state.keys() == stock.state.keys()
    return found + [
        key for key in stock.state if not torch.equal(ours.state[key], stock.state[key])
    ]


def compare(run):
    """Report of one framework: training under each policy, resuming across engines.

    A resumed run is held against stock's own resumed run: CPUAdam's bias corrections are products
    of as many factors as steps, and after loading a power, so no resume repeats the last bit.

    Args:
        run: ``run(block, save_to, resume_from)`` trains to the end, saves a checkpoint into the
            folder ``save_to`` on the way, or goes on from the one in ``resume_from``.
    """
    out, folder = map(Path, sys.argv[1:])
    # Ours first: in a fresh process nothing of stock's may have been needed.
    ours = {name: run(block, folder / name, None) for name, block in BLOCKS.items()}
    stock = run(None, folder / "stock", None)
    resumed = {
        "stride-2 to stock": run(None, None, folder / "stride-2"),
        "stock to stride-2": run(BLOCKS["stride-2"], None, folder / "stock"),
    }
    stock_resumed = run(None, None, folder / "stock")
    check_that_it_shows_something(ours, stock, resumed, stock_resumed)
    report = {f"train | {name}": differences(result, stock) for name, result in ours.items()}
    for name, result in resumed.items():
        report[f"resume | {name}"] = differences(result, stock_resumed)
    out.with_suffix(f".{os.environ['RANK']}.json").write_text(json.dumps(report))
    torch.distributed.barrier()
    # Without the end of the interpreter, in which some jobs of several ranks abort, stock or not.
    os._exit(0)


def check_that_it_shows_something(ours, stock, resumed, stock_resumed):
    assert stock.subgroups >= 3, f"{stock.subgroups} subgroups are too few"
    assert min(len(set(stock.losses)), len(set(stock.norms))) > 5, (stock.losses, stock.norms)
    assert 0 < len(stock_resumed.losses) < len(stock.losses), "nothing was resumed"
    assert {result.optimizer for result in ours.values()} == {OURS}
    assert [stock.optimizer, stock_resumed.optimizer] == [STOCK, STOCK]
    assert [resumed["stride-2 to stock"].optimizer, resumed["stock to stride-2"].optimizer] == [
        STOCK,
        OURS,
    ]


def make_quick():
    """Leave out what only costs time: an op that gloo does without."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
