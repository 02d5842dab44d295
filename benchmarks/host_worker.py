"""Measure with one number of threads, in a process of its own: see ``benchmarks.host``.

Passes over one subgroup's arrays, and the update of real DeepSpeed engines.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import deepspeed
import deepspeed.ops
import torch
from deepspeed.ops.op_builder import CPUAdamBuilder
from torch import Tensor

import deep_optimizer_states
from benchmarks.timing import Times, in_turns, total
from deep_optimizer_states.adapter.stock_adam import tail_of_op
from deep_optimizer_states.core.kernels.adam import (
    AdamScalars,
    AdamTensors,
    BetaPowers,
    adam_scalars,
)
from deep_optimizer_states.core.kernels.host import HostAdam, Tail
from deep_optimizer_states.state_reader import read_state
from launch.launchers import free_port

LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
SETTINGS = (LR, *BETAS, EPS, WEIGHT_DECAY)
GRAD_SCALE = 0.5
FUSED_BYTES = 28
"""Bytes a parameter that the fused pass moves: gradient in, three fp32 arrays in and out, weight
out."""
UNSCALE_BYTES = 8
"""Bytes a parameter that stock's unscaling moves, torch's multiplication in place."""
STOCK_WITH_GPU = ("unscale", "CPUAdam", "cast to fresh memory")
"""Stock's ``step()`` with a GPU. The gradient arrives in fp32; torch casts a blocking copy to
another type and device on the host, into memory taken for it each time."""
STOCK_ON_CPU = ("widen gradients", "unscale", "CPUAdam", "cast to kept memory")
"""Stock's passes where the CPU is the device: the cast writes the weights themselves."""
_OP_ID = 9001  # DeepSpeed numbers its optimizers from 0
_OURS: dict[str, Any] = {"enabled": True, "just_in_time_forward": False}
BLOCKS: dict[str, dict[str, Any]] = {
    "stock": {"enabled": False},
    "all-host": {**_OURS, "policy": "all-host"},
    "stride 2": {**_OURS, "policy": "stride", "stride": 2},
    "dynamic": {**_OURS, "policy": "dynamic"},
}
"""Engines that are timed. Where the CPU is the device, it steps the device's tiles too, so that the
last two show what the schedule costs and never what it gains."""
WARM_UP = 2
"""Turns that do not count, since the first ones touch fresh pages."""


class StockPasses:
    """Stock DeepSpeed's way through a subgroup, pass by pass, with its own compiled op.

    Args:
        op: DeepSpeed's ``cpu_adam``.
        master: Master weights to start from; copied.
        grad: bf16 gradients.
    """

    def __init__(self, op: Any, master: Tensor, grad: Tensor) -> None:
        self._op = op
        self._grad = grad
        self._grad32 = torch.empty_like(master)
        self._steps = 0
        self.state = (master.clone(), torch.zeros_like(master), torch.zeros_like(master))
        self.weights = torch.empty_like(grad)
        op.create_adam(_OP_ID, *SETTINGS, True, False)

    def parts(self) -> dict[str, Callable[[], object]]:
        """Return the passes in order, with both casts, of which stock does one."""
        return {
            "widen gradients": lambda: self._grad32.copy_(self._grad),
            "unscale": lambda: self._grad32.mul_(GRAD_SCALE),
            "CPUAdam": self._step,
            "cast to kept memory": lambda: self.weights.copy_(self.state[0]),
            "cast to fresh memory": lambda: self.state[0].to(self.weights.dtype),
        }

    def _step(self) -> None:
        self._steps += 1
        master, exp_avg, exp_avg_sq = self.state
        state = (master, self._grad32, exp_avg, exp_avg_sq)
        self._op.adam_update(_OP_ID, self._steps, *SETTINGS, True, *state)


class FusedPass:
    """Our kernel on the same start.

    Args:
        adam: The kernel.
        tail: How it treats the last elements.
        start: Tensors of the subgroup; copied.
        num_threads: OpenMP threads.
    """

    def __init__(self, adam: HostAdam, tail: Tail, start: AdamTensors, num_threads: int) -> None:
        self.tensors = replace(start, **{k: v.clone() for k, v in vars(start).items()})
        self._adam = adam
        self._tail_start = tail.start(start.numel)
        self._num_threads = num_threads
        self._powers = BetaPowers(BETAS)
        self._steps = 0

    def _scalars(self) -> AdamScalars:
        self._steps += 1
        group = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
        powers = self._powers.at(self._steps, BETAS)
        return adam_scalars({**group, "bias_correction": True}, powers, GRAD_SCALE, True)

    def step(self) -> None:
        """Update the subgroup once."""
        self._adam.step(self.tensors, self._scalars(), self._tail_start, self._num_threads)

    def probe(self) -> None:
        """Do the same reads and writes, nearly without arithmetic."""
        self._adam.probe(self.tensors, self._scalars(), self._num_threads)


def passes(numel: int, repeats: int, num_threads: int) -> dict[str, Any]:
    """Time passes over one subgroup of ``numel`` elements with bf16 gradients and weights.

    Every turn runs every pass once. The state of both sides, after all turns, must be the same
    bits.
    """
    op = CPUAdamBuilder().load()
    tail = tail_of_op(op, True)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(numel, generator=generator).bfloat16()
    master = torch.randn(numel, generator=generator)
    zeros = torch.zeros(numel)
    start = AdamTensors(master, zeros, zeros, grad, torch.empty_like(grad))
    adam = HostAdam(tail.mode)
    stock = StockPasses(op, master, grad)
    fused, probed = (FusedPass(adam, tail, start, num_threads) for _ in range(2))
    del start, master, zeros
    work = {"fused pass": fused.step, "probe": probed.probe, **stock.parts()}
    times = in_turns(work, repeats)
    ours = fused.tensors
    equal = all(map(torch.equal, ours.state, stock.state))
    return {
        "numel": numel,
        "instruction_set": adam.instruction_set.name,
        "equal": equal and torch.equal(ours.weights, stock.weights),
        **compare(times, numel),
    }


def compare(times: dict[str, Times], numel: int) -> dict[str, Any]:
    """Return sums and ratios of the passes' times.

    Args:
        times: Of every pass.
        numel: Elements of each pass.

    Returns:
        Seconds per 1e9 parameters of each pass and of stock's two ways; how many times longer than
        the fused pass they are; and what share of the probe's rate, and of the bytes a second that
        torch's multiplication in place reaches, the fused pass has.
    """
    fused = times["fused pass"]
    with_gpu = total([times[name] for name in STOCK_WITH_GPU])
    on_cpu = total([times[name] for name in STOCK_ON_CPU])
    rows = {**times, "stock, with a GPU": with_gpu, "stock, on the CPU": on_cpu}
    stream = times["unscale"].scaled(FUSED_BYTES / UNSCALE_BYTES)
    return {
        "seconds_per_1e9": {k: t.scaled(1e9 / numel).as_json() for k, t in rows.items()},
        "stock_with_gpu_over_fused": with_gpu.ratios_to(fused).as_json(),
        "stock_on_cpu_over_fused": on_cpu.ratios_to(fused).as_json(),
        "share_of_probe": times["probe"].ratios_to(fused).as_json(),
        "share_of_stream": stream.ratios_to(fused).as_json(),
    }


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
    """Return seconds per 1e9 parameters, ratios to stock, and which engines are equal to it."""
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
    start_one_rank()
    return {name: make_engine(width, layers, block) for name, block in BLOCKS.items()}


def start_one_rank() -> None:
    """Make this process the one rank of a job on the CPU."""
    # DeepSpeed calls functions that newer torch renames, and each call warns.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # An extension that DeepSpeed would build for collectives of one machine; nothing here uses it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(free_port())
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    deep_optimizer_states.install()


def make_engine(width: int, layers: int, block: dict[str, Any]) -> Any:
    """Return an engine of square layers, of the same bits whatever the plugin's block."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    config = _ds_config(width, block)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def _equal(made: dict[str, Any]) -> dict[str, bool]:
    found = {name: trained_state(engine) for name, engine in made.items()}
    stock = found.pop("stock")
    return {
        name: len(ours) == len(stock) and all(map(torch.equal, ours, stock))
        for name, ours in found.items()
    }


def trained_state(engine: Any) -> list[torch.Tensor]:
    """Return what training has changed of an engine: master weights and moments."""
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
