"""The update phase of real DeepSpeed engines on the CPU, in one process, taking turns."""

from __future__ import annotations

import os
import time
from typing import Any

import deepspeed
import deepspeed.ops
import torch

import deep_optimizer_states
from benchmarks.host_passes import BETAS, LR, WEIGHT_DECAY
from benchmarks.timing import Times
from deep_optimizer_states.state_reader import read_state
from launch.hosts.ranks import free_port

_OURS: dict[str, Any] = {"enabled": True, "just_in_time_forward": False}
BLOCKS: dict[str, dict[str, Any]] = {
    "stock": {"enabled": False},
    "all-host": {**_OURS, "policy": "all-host"},
    "stride 2": {**_OURS, "policy": "stride", "stride": 2},
    "dynamic": {**_OURS, "policy": "dynamic"},
}
"""What is timed. Where the CPU is the device, "device" tiles are stepped by it too: the last two
show what the schedule costs, never what it gains."""
WARM_UP = 2
"""Turns that do not count: the first touch fresh pages."""


def engines(width: int, layers: int, repeats: int) -> dict[str, Any]:
    """Time ``engine.step()`` of stock's engine and of the plugin's, on the same gradients.

    Args:
        width: Of every layer, a square matrix without bias.
        layers: Matrices.
        repeats: Turns that count; in each, every engine does one iteration.
    """
    made = _make(width, layers)
    inputs = torch.ones(1, width, dtype=torch.bfloat16)
    taken: dict[str, list[float]] = {name: [] for name in made}
    names = list(made)
    for turn in range(WARM_UP + repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            engine = made[name]
            engine.backward(engine(inputs).float().pow(2).mean())
            begin = time.perf_counter()
            engine.step()
            if turn >= WARM_UP:
                taken[name].append(time.perf_counter() - begin)
    return summary({k: Times(tuple(t)) for k, t in taken.items()}, _equal(made), width**2 * layers)


def summary(times: dict[str, Times], equal: dict[str, bool], numel: int) -> dict[str, Any]:
    """Seconds per 1e9 parameters, how many times faster than stock, and which are equal to it."""
    return {
        "numel": numel,
        "equal": equal,
        "seconds_per_1e9": {k: t.scaled(1e9 / numel).as_json() for k, t in times.items()},
        "stock_over": {
            name: times["stock"].ratios_to(taken).as_json()
            for name, taken in times.items()
            if name != "stock"
        },
    }


def _make(width: int, layers: int) -> dict[str, Any]:
    # An extension that DeepSpeed would build for collectives of one machine; nothing here uses it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(free_port())
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    deep_optimizer_states.install()
    made = {}
    for name, block in BLOCKS.items():
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            *(torch.nn.Linear(width, width, bias=False) for _ in range(layers))
        )
        config = _ds_config(width, block)
        parameters = model.parameters()
        made[name] = deepspeed.initialize(model=model, model_parameters=parameters, config=config)[
            0
        ]
    return made


def _equal(made: dict[str, Any]) -> dict[str, bool]:
    """Whether weights, master weights and moments have the bits of stock's."""
    found = {name: _trained(engine) for name, engine in made.items()}
    stock = found.pop("stock")
    return {
        name: len(ours) == len(stock) and all(map(torch.equal, ours, stock))
        for name, ours in found.items()
    }


def _trained(engine: Any) -> list[torch.Tensor]:  # noqa: ANN401 - DeepSpeed's
    groups = read_state(engine)
    return [each for group in groups for part in vars(group).values() for each in part]


def _ds_config(width: int, block: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "sub_group_size": 2 * width * width,
            "reduce_bucket_size": width * width,
        },
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LR, "betas": list(BETAS), "weight_decay": WEIGHT_DECAY},
        },
        "deep_optimizer_states": block,
    }
