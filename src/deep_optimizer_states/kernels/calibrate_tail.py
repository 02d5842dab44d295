"""Find out how the installed DeepSpeed's CPUAdam rounds, by running it.

The vector part of its kernel is fixed by the source. The scalar code for the last elements is
contracted by whatever compiler built it, and the vector width depends on the CPU; how often it
takes ``pow`` depends on the release that it was built from, which need not be the one installed. So
the real op is run once on a few thousand numbers, and the variant of ours with the same bits is
taken.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
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
_UPDATES = (*(step for step in range(1, 25) for _ in range(3)), 40, 40, 41, 41, 7, 7, 8)
"""Steps of successive updates: three subgroups, and a checkpoint loaded ahead and behind."""
_GROUP: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


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
    inputs, steps = _draw(_NUMEL, _STEPS + 1), range(1, _STEPS + 1)
    expected = _run_stock(op, group, decoupled, inputs, steps)
    for width, mode in itertools.product(_WIDTHS, (1, 0, 2)):
        tail = Tail(width, mode)
        powers = BetaPowers(group["betas"])
        ours = _run_ours(tail, group, decoupled, inputs, powers, steps)
        if all(map(torch.equal, ours, expected)):
            return tail
    raise KernelError(
        "DeepSpeedCPUAdam on this machine rounds in a way that no variant of our kernel repeats; "
        "results would not equal stock DeepSpeed's. Rebuild its cpu_adam op with g++ on x86-64"
    )


def finds_pow_on_repeat(optimizer: Any) -> bool:
    """Whether the op of a DeepSpeedCPUAdam takes ``pow`` for a step that it is asked for again.

    Raises:
        KernelError: Neither that nor the other way gives the op's bits.
    """
    return pow_on_repeat_of_op(optimizer.ds_opt_adam, bool(optimizer.adam_w_mode))


@functools.cache
def pow_on_repeat_of_op(op: Any, decoupled: bool) -> bool:
    """The same of DeepSpeed's compiled op itself; ``decoupled`` for AdamW."""
    # At beta2 = 0.999 product and power part after a few steps.
    group = {**_GROUP, "betas": (0.9, 0.999), "bias_correction": True}
    tail = tail_of_op(op, decoupled)
    inputs = _draw(64, 2)
    inputs = [inputs[0], *[inputs[1]] * len(_UPDATES)]
    expected = _run_stock(op, group, decoupled, inputs, _UPDATES)
    for rule in (False, True):
        powers = BetaPowers(group["betas"], rule)
        ours = _run_ours(tail, group, decoupled, inputs, powers, _UPDATES)
        if all(map(torch.equal, ours, expected)):
            return rule
    raise KernelError(
        "DeepSpeedCPUAdam corrects the bias of its moments in a way that is not repeated here; "
        "results would not equal stock DeepSpeed's. Install a release that is supported and delete "
        "its compiled cpu_adam from TORCH_EXTENSIONS_DIR"
    )


def _draw(numel: int, number: int) -> list[torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(20241)
    # The caller may have set another default type or device.
    return [
        torch.randn(numel, generator=generator, dtype=torch.float32, device="cpu")
        for _ in range(number)
    ]


def _run_stock(
    op: Any,
    group: dict[str, Any],
    decoupled: bool,
    inputs: list[torch.Tensor],
    steps: Sequence[int],
) -> list[torch.Tensor]:
    # The op itself, not a second DeepSpeedCPUAdam: constructing one starts a process.
    master, *grads = inputs
    state = [master.clone(), torch.zeros_like(master), torch.zeros_like(master)]
    settings = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    op.create_adam(_PROBE_ID, *settings, decoupled, False)
    try:
        for step, grad in zip(steps, grads, strict=True):
            op.adam_update(_PROBE_ID, step, *settings, True, state[0], grad, *state[1:])
    finally:
        op.destroy_adam(_PROBE_ID)
    return state


def _run_ours(
    tail: Tail,
    group: dict[str, Any],
    decoupled: bool,
    inputs: list[torch.Tensor],
    powers: BetaPowers,
    steps: Sequence[int],
) -> list[torch.Tensor]:
    master, *grads = inputs
    state = [master.clone(), torch.zeros_like(master), torch.zeros_like(master)]
    weights = torch.empty_like(master)
    adam = make_host_adam(tail.mode)
    for step, grad in zip(steps, grads, strict=True):
        scalars = adam_scalars(group, powers.at(step, group["betas"]), 1.0, decoupled)
        tensors = AdamTensors(state[0], state[1], state[2], grad, weights)
        adam.step(tensors, scalars, tail.start(master.numel()), num_threads=1)
    return state
