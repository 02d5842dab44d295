"""Train a toy model under stock DeepSpeed and under several policies, and say what differs.

Run as the only rank of a job, on the CPU; see ``release_check``.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.nn import Linear, Module, ModuleList

_WIDTH = 37
_NUM_UPDATES = 12  # products and powers of betas have parted by then
_LEFT_OUT = {9: 2, 12: 3, 13: 3, 14: 1, 21: 2}
"""Micro-batch -> a layer left out of it. Windows of two end with odd ones."""

_SMALL_TILES = {"enabled": True, "tile_numel": 256, "verify_every": 0}
_POLICIES = {
    "stride 2": {**_SMALL_TILES, "policy": "stride", "stride": 2},
    "ratio 0.5": {**_SMALL_TILES, "policy": "ratio", "ratio": 0.5},
    "dynamic": {**_SMALL_TILES, "policy": "dynamic"},
}


@dataclass(frozen=True)
class _Case:
    dtype: torch.dtype
    accumulation: int
    policies: tuple[str, ...]
    config: dict[str, Any] = field(default_factory=dict)


_FP16 = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1}
_CASES = {
    "bf16": _Case(torch.bfloat16, 2, tuple(_POLICIES), {"bf16": {"enabled": True}}),
    "fp16 with overflows": _Case(torch.float16, 1, ("stride 2",), {"fp16": _FP16}),
}


class _Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = ModuleList(Linear(_WIDTH, _WIDTH) for _ in range(6))

    def forward(self, x: Tensor, left_out: int | None) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != left_out:
                x = torch.tanh(layer(x)) + x
        return x


@dataclass(frozen=True)
class _Result:
    optimizer: str
    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]


def main(out: str) -> None:
    """Write what differs as JSON, a list of sentences; empty where nothing does.

    Args:
        out: Path of the file.
    """
    import deep_optimizer_states

    # DeepSpeed asks for the CPU's name for every engine, which takes a process and a second.
    cpuinfo: Any = importlib.import_module("cpuinfo")
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    # One rank needs no op for shared memory, which takes a minute to compile.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # One rank meets nobody, so that it needs no port.
    store = torch.distributed.HashStore()  # type: ignore[attr-defined, unused-ignore]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend="gloo")
    # DeepSpeed's CPU accelerator says no to fp16, which torch computes on a CPU all the same.
    type(get_accelerator()).is_fp16_supported = lambda _: True
    deep_optimizer_states.install(allow_unverified=True)
    found: list[str] = []
    for name, case in _CASES.items():
        stock = _train(case, None)
        for policy in case.policies:
            different = differences(_train(case, _POLICIES[policy]), stock)
            if different:
                found.append(f"{name}, policy {policy}: {', '.join(different)}")
    Path(out).write_text(json.dumps(found), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo now and then aborts while the interpreter is torn down


def differences(ours: _Result, stock: _Result) -> list[str]:
    """What of our training is not stock's, in words."""
    if ours.optimizer != "InterleavedZeroOptimizer":
        return [f"the optimizer is {ours.optimizer}"]
    found = [name for name in ("losses", "norms") if getattr(ours, name) != getattr(stock, name)]
    keys = sorted(ours.state.keys() | stock.state.keys())
    tensors = [key for key in keys if not _are_equal(ours.state.get(key), stock.state.get(key))]
    if tensors:
        found.append(f"{tensors[0]} ({len(tensors)} of {len(keys)} tensors)")
    return found


def _are_equal(ours: Tensor | None, stock: Tensor | None) -> bool:
    return ours is not None and stock is not None and torch.equal(ours, stock)


def _train(case: _Case, block: dict[str, Any] | None) -> _Result:
    torch.manual_seed(3)
    net = _Net()
    config = _ds_config(case) | ({"deep_optimizer_states": block} if block else {})
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    generator = torch.Generator().manual_seed(0)
    losses, norms = [], []
    try:
        for number in range(_NUM_UPDATES * case.accumulation):
            x, y = (torch.randn(4, _WIDTH, generator=generator).to(case.dtype) for _ in range(2))
            left_out = _LEFT_OUT.get(number) if case.accumulation > 1 else None
            loss = ((engine(x, left_out) - y).float() ** 2).mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            norms.append(float(engine.get_global_grad_norm() or 0.0))
            if number + 1 == _NUM_UPDATES * case.accumulation // 2:
                _save_and_load(engine)
        return _Result(type(engine.optimizer).__name__, losses, norms, _state_of(engine.optimizer))
    finally:
        engine.destroy()


def _save_and_load(engine: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder)
        engine.load_checkpoint(folder)


def _ds_config(case: _Case) -> dict[str, Any]:
    adam = {"lr": 1e-2, "betas": [0.9, 0.999], "weight_decay": 0.1}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "train_batch_size": 4 * case.accumulation,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "sub_group_size": 3000,
            "reduce_bucket_size": 3000,
            "stage3_param_persistence_threshold": 50,
        },
        "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": adam},
        **case.config,
    }


def _state_of(optimizer: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for idx, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        state = optimizer.optimizer.state[master]
        tensors = {
            "master weights": master.data,
            "first moments": state["exp_avg"],
            "second moments": state["exp_avg_sq"],
            "16-bit weights": optimizer.fp16_partitioned_groups_flat[idx],
        }
        for name, tensor in tensors.items():
            found[f"{name} of subgroup {idx}"] = tensor.detach().to("cpu", copy=True)
    return found
