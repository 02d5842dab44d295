"""DeepSpeed's config, the state of an engine, and what differs from stock, for all frameworks."""

import dataclasses

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from deep_optimizer_states.config import BLOCK
from deep_optimizer_states.state_reader import MOMENTS, read_state

BLOCKS = {
    # Its checkpoints are those that stock goes on from.
    "stride-2": {"enabled": True, "policy": "stride", "stride": 2, "checkpoint": "background"},
    "all-host": {"enabled": True, "policy": "all-host"},
}
OURS, STOCK = "InterleavedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"
SEED = 11
ON_CPU = not torch.cuda.is_available()


@dataclasses.dataclass
class Result:
    """Losses, norms and state of one training run."""

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
    if getattr(engine.optimizer, "checkpoints", None) is not None:
        engine.optimizer.checkpoints.wait()  # the next to load may be stock
    state = state_by_parameter(engine) if stage == 3 else flat_state(engine)
    return Result(
        losses=losses,
        norms=[float(norm) for norm in norms if norm is not None],
        state={name: tensor.detach().cpu().clone() for name, tensor in state},
        optimizer=type(engine.optimizer).__name__,
        subgroups=len(engine.optimizer.fp32_partitioned_groups_flat) if stage == 3 else 0,
    )


def state_by_parameter(engine):
    """Read the state of ZeRO-3 through DeepSpeed's public functions."""
    for name, param in engine.module.named_parameters():
        yield f"master/{name}", safe_get_full_fp32_param(param)
        for moment in MOMENTS:
            yield f"{moment}/{name}", safe_get_full_optimizer_state(param, moment)
        with deepspeed.zero.GatheredParameters([param]):
            yield f"weights/{name}", param.data.clone()


def flat_state(engine):
    """Read the state of ZeRO-1 or 2, whose moments those functions of stock do not give."""
    [whole] = read_state(engine)
    half = len(whole.moments) // 2
    parts = {"weights": whole.weights, "master": whole.masters}
    parts |= dict(zip(MOMENTS, (whole.moments[:half], whole.moments[half:]), strict=True))
    for part, tensors in parts.items():
        for idx, tensor in enumerate(tensors):
            yield f"{part}/{idx}", tensor


def differences(ours, stock):
    """Names of what is not bitwise equal."""
    assert stock.losses
    assert stock.norms
    assert ours.state.keys() == stock.state.keys()
    names = ("losses", "norms")
    found = [name for name in names if getattr(ours, name) != getattr(stock, name)]
    return found + [
        key for key in stock.state if not torch.equal(ours.state[key], stock.state[key])
    ]


def compare(run, folder):
    """Report of one framework: training under each policy, resuming across engines.

    A resumed run is compared with stock's own resumed run: CPUAdam's bias corrections are products
    of as many factors as steps, and after loading a power, so no resume repeats the last bit.

    Args:
        run: ``run(block, save_to, resume_from)`` trains to the end, saves a checkpoint into the
            folder ``save_to`` on the way, or goes on from the one in ``resume_from``.
        folder: For the checkpoints.
    """
    # Ours first: in a fresh process nothing of stock's may have been needed.
    ours = {name: run(block, folder / name, None) for name, block in BLOCKS.items()}
    stock = run(None, folder / "stock", None)
    to_stock = run(None, None, folder / "stride-2")
    to_ours = run(BLOCKS["stride-2"], None, folder / "stock")
    stock_resumed = run(None, None, folder / "stock")
    assert stock.subgroups >= 3, f"{stock.subgroups} subgroups are too few"
    assert min(len(set(stock.losses)), len(set(stock.norms))) > 5, (stock.losses, stock.norms)
    assert 0 < len(stock_resumed.losses) < len(stock.losses), "nothing was resumed"
    assert {result.optimizer for result in (*ours.values(), to_ours)} == {OURS}
    assert {result.optimizer for result in (stock, stock_resumed, to_stock)} == {STOCK}
    return {
        **{f"train | {name}": differences(result, stock) for name, result in ours.items()},
        "resume | stride-2 to stock": differences(to_stock, stock_resumed),
        "resume | stock to stride-2": differences(to_ours, stock_resumed),
    }
