"""Find out how the installed DeepSpeed's CPUAdam rounds, by running it.

The vector part of its kernel is fixed by the source. The scalar code for the last elements is
contracted by whatever compiler built it, and the vector width depends on the CPU. So the real op is
run once on a few thousand numbers, and the variant of ours with the same bits is taken.
"""

from __future__ import annotations

import functools
import itertools
import sys
from typing import Any

import torch

from deep_optimizer_states.errors import KernelError
from deep_optimizer_states.kernels.host import Tail
from deep_optimizer_states.kernels.scalars import BetaPowers, adam_scalars
from deep_optimizer_states.kernels.tensors import AdamTensors
from deep_optimizer_states.kernels.torch_adam import make_host_adam

_NUMEL = 16 * 512 + 15  # every vector width up to 16 leaves a tail
_STEPS = 3
_WIDTHS = (16, 8, 4, sys.maxsize, 1)  # maxsize: built without vectors, so all is tail
_PROBE_ID = -20241  # DeepSpeed numbers its optimizers from 0
_GROUP = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def find_tail(optimizer: Any) -> Tail:
    """The tail of the op that ``optimizer``, a DeepSpeedCPUAdam, uses.

    Raises:
        KernelError: No variant gives the op's bits: equality with stock is not possible here.
    """
    return tail_of_op(optimizer.ds_opt_adam, bool(optimizer.adam_w_mode))


@functools.cache
def tail_of_op(op: Any, decoupled: bool) -> Tail:
    """The same of DeepSpeed's compiled op itself; ``decoupled`` for AdamW."""
    group = {**_GROUP, "bias_correction": True}
    generator = torch.Generator("cpu").manual_seed(20241)
    # The caller may have set another default type or device.
    inputs = [
        torch.randn(_NUMEL, generator=generator, dtype=torch.float32, device="cpu")
        for _ in range(_STEPS + 1)
    ]
    expected = _run_stock(op, group, decoupled, inputs)
    for width, mode in itertools.product(_WIDTHS, (1, 0, 2)):
        tail = Tail(width, mode)
        if all(map(torch.equal, _run_ours(tail, group, decoupled, inputs), expected)):
            return tail
    raise KernelError(
        "DeepSpeedCPUAdam on this machine rounds in a way that no variant of our kernel repeats; "
        "results would not equal stock DeepSpeed's. Rebuild its cpu_adam op with g++ on x86-64"
    )


def _run_stock(
    op: Any, group: dict[str, Any], decoupled: bool, inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    # The op itself, not a second DeepSpeedCPUAdam: constructing one starts a process.
    master, *grads = inputs
    state = [master.clone(), torch.zeros_like(master), torch.zeros_like(master)]
    settings = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    op.create_adam(_PROBE_ID, *settings, decoupled, False)
    try:
        for step, grad in enumerate(grads, start=1):
            op.adam_update(_PROBE_ID, step, *settings, True, state[0], grad, *state[1:])
    finally:
        op.destroy_adam(_PROBE_ID)
    return state


def _run_ours(
    tail: Tail, group: dict[str, Any], decoupled: bool, inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    master, *grads = inputs
    state = [master.clone(), torch.zeros_like(master), torch.zeros_like(master)]
    weights = torch.empty_like(master)
    powers = BetaPowers(group["betas"])
    adam = make_host_adam(tail.mode)
    for step, grad in enumerate(grads, start=1):
        scalars = adam_scalars(group, powers.at(step, group["betas"]), 1.0, decoupled)
        tensors = AdamTensors(state[0], state[1], state[2], grad, weights)
        adam.step(tensors, scalars, tail.start(_NUMEL), num_threads=1)
    return state
