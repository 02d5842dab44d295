"""Passes over one subgroup's arrays in host memory: our fused one, a probe, and stock's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from deepspeed.ops.op_builder import CPUAdamBuilder
from torch import Tensor

from benchmarks.timing import Times, in_turns, total
from deep_optimizer_states.kernels.calibrate_tail import tail_of_op
from deep_optimizer_states.kernels.host import HostAdam, Tail
from deep_optimizer_states.kernels.scalars import AdamScalars, BetaPowers, adam_scalars
from deep_optimizer_states.kernels.tensors import AdamTensors

LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
SETTINGS = (LR, *BETAS, EPS, WEIGHT_DECAY)
GRAD_SCALE = 0.5
FUSED_BYTES = 28
"""A parameter of the fused pass: gradient in, three fp32 arrays in and out, weight out."""
UNSCALE_BYTES = 8
"""A parameter of stock's unscaling, torch's multiplication in place."""
STOCK_WITH_GPU = ("unscale", "CPUAdam", "cast to fresh memory")
"""Stock's ``step()`` with a GPU. The gradient arrives in fp32; torch casts a blocking copy to
another type and device on the host, into memory taken for it each time."""
STOCK_ON_CPU = ("widen gradients", "unscale", "CPUAdam", "cast to kept memory")
"""Stock's passes where the CPU is the device: the cast writes the weights themselves."""
_OP_ID = 9001  # DeepSpeed numbers its optimizers from 0


class StockPasses:
    """What stock DeepSpeed does to a subgroup, pass by pass, with its own compiled op.

    Args:
        op: DeepSpeed's ``cpu_adam``.
        master: Master weights to start from; copied.
        grad: bf16 gradients.
    """

    def __init__(self, op: Any, master: Tensor, grad: Tensor) -> None:  # noqa: ANN401 - untyped op
        self._op = op
        self._grad = grad
        self._grad32 = torch.empty_like(master)
        self._steps = 0
        self.state = (master.clone(), torch.zeros_like(master), torch.zeros_like(master))
        self.weights = torch.empty_like(grad)
        op.create_adam(_OP_ID, *SETTINGS, True, False)

    def parts(self) -> dict[str, Callable[[], object]]:
        """The passes, in order; both casts, of which stock does one."""
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
        """One update."""
        self._adam.step(self.tensors, self._scalars(), self._tail_start, self._num_threads)

    def probe(self) -> None:
        """The same reads and writes, nearly without arithmetic."""
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
    """Sums and ratios of the passes' times.

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
