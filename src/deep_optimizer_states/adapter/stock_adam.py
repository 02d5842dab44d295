"""Find out how the installed DeepSpeed's CPUAdam rounds, by running it.

The vector part of its kernel is fixed by the source. The scalar code for the last elements is
contracted by whatever compiler built it, and the vector width depends on the CPU and on the types;
how often it takes ``pow`` depends on the release that it was built from, which need not be the one
installed. So the real op is run once on a few thousand numbers in the types of the run, and the
variant of ours with the same bits is taken.

[Note: cancellation] A contraction changes the last bit of an fp32 number, which rounding to 16
bits hides in all but one of 2^16 cases. So the first step of 16-bit state begins with moments that
nearly cancel against the gradient: what is left of them is little more than the error of one
rounding, and differs between the variants in its leading bits.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch

from deep_optimizer_states.core.kernels.adam import AdamTensors, BetaPowers, adam_scalars
from deep_optimizer_states.core.kernels.host import HostAdam, Tail
from deep_optimizer_states.errors import KernelError

_NUMEL = 16 * 512 + 15  # every vector width up to 16 leaves a tail
_STEPS = 3
_WIDTHS = (16, 8, 4, sys.maxsize, 1)  # maxsize: built without vectors, so all is tail
_PROBE_ID = -20241  # DeepSpeed numbers its optimizers from 0
_UPDATES = (*(step for step in range(1, 25) for _ in range(3)), 40, 40, 41, 41, 7, 7, 8)
"""Steps of successive updates: three subgroups, and a checkpoint loaded ahead and behind."""
_GROUP: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
_CANCELLING = {**_GROUP, "betas": (0.25 + 2.0**-25, 0.25 - 2.0**-26), "weight_decay": 0.0}
"""A moment of minus three times what is added to it nearly cancels; the second stays positive."""


@functools.cache
def tail_of_op(
    op: Any, decoupled: bool, dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32,) * 2
) -> Tail:
    """Return how DeepSpeed's compiled op rounds the last elements.

    Args:
        op: ``ds_opt_adam`` of a DeepSpeedCPUAdam.
        decoupled: Whether it is AdamW.
        dtypes: Of master weights and the gradients that the op reads, and of both moments.

    Raises:
        KernelError: No variant gives the op's bits: equality with stock is not possible here.
    """
    runs = [(group, probe_inputs(group, dtypes)) for group in _groups_of(dtypes)]
    expected = [_run_stock(op, group, decoupled, inputs) for group, inputs in runs]
    for width, mode in itertools.product(_WIDTHS, (1, 0, 2)):
        tail = Tail(width, mode)
        found = (_run_ours(tail, group, decoupled, inputs) for group, inputs in runs)
        if all(all(map(torch.equal, *pair)) for pair in zip(found, expected, strict=True)):
            return tail
    raise KernelError(
        "DeepSpeedCPUAdam on this machine rounds in a way that no variant of our kernel repeats; "
        "results would not equal stock DeepSpeed's. Rebuild its cpu_adam op with g++"
    )


@functools.cache
def pow_on_repeat_of_op(op: Any, decoupled: bool) -> bool:
    """Return whether the op takes ``pow`` for a step that is asked for again.

    Raises:
        KernelError: Neither that nor the other way gives the op's bits.
    """
    # At beta2 = 0.999 product and power part after a few steps.
    group = {**_GROUP, "betas": (0.9, 0.999), "bias_correction": True}
    tail = tail_of_op(op, decoupled)
    before, grad, *_ = probe_inputs(group, (torch.float32,) * 2)
    inputs = [[tensor[:64] for tensor in before], *[[grad[0][:64]]] * len(_UPDATES)]
    expected = _run_stock(op, group, decoupled, inputs, _UPDATES)
    for rule in (False, True):
        ours = _run_ours(tail, group, decoupled, inputs, _UPDATES, rule)
        if all(map(torch.equal, ours, expected)):
            return rule
    raise KernelError(
        "DeepSpeedCPUAdam corrects the bias of its moments in a way that is not repeated here; "
        "results would not equal stock DeepSpeed's. Install a release that is supported and delete "
        "its compiled cpu_adam from TORCH_EXTENSIONS_DIR"
    )


def _groups_of(dtypes: tuple[torch.dtype, torch.dtype]) -> list[dict[str, Any]]:
    groups = [_GROUP] if set(dtypes) == {torch.float32} else [_CANCELLING, _GROUP]
    return [{**group, "bias_correction": True} for group in groups]


def probe_inputs(
    group: dict[str, Any], dtypes: tuple[torch.dtype, torch.dtype]
) -> list[list[torch.Tensor]]:
    """Draw numbers to step: master weights and moments, then each step's gradient.

    Args:
        group: One of the groups of hyperparameters that the probe uses.
        dtypes: Of master weights and gradients, and of moments.
    """
    master_dtype, moment_dtype = dtypes
    generator = torch.Generator("cpu").manual_seed(20241)
    # The caller may have set another default type or device.
    master, *grads = [
        torch.randn(_NUMEL, generator=generator, dtype=torch.float32, device="cpu")
        for _ in range(_STEPS + 1)
    ]
    state = [master.to(master_dtype), *torch.zeros(2, _NUMEL, dtype=moment_dtype, device="cpu")]
    if group["betas"] == _CANCELLING["betas"]:  # see [Note: cancellation]
        # Few bits, so that three times the number and three times its square are exact in bf16.
        few = torch.randint(5, 10, (_NUMEL,), generator=generator, device="cpu").float() * 16
        grads[0] = few * torch.where(grads[0] < 0, -1.0, 1.0)
        state[1].copy_(-3 * grads[0])
        state[2].copy_(-3 * grads[0] ** 2)
        del grads[1:]
    return [state, *([grad.to(master_dtype)] for grad in grads)]


def _run_stock(
    op: Any,
    group: dict[str, Any],
    decoupled: bool,
    inputs: list[list[torch.Tensor]],
    steps: Sequence[int] = range(1, _STEPS + 1),
) -> list[torch.Tensor]:
    # The op itself, not a second DeepSpeedCPUAdam: constructing one starts a process.
    before, *grads = inputs
    state = [tensor.clone() for tensor in before]
    settings = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    op.create_adam(_PROBE_ID, *settings, decoupled, False)
    try:
        for step, (grad,) in zip(steps, grads, strict=False):
            op.adam_update(_PROBE_ID, step, *settings, True, state[0], grad, *state[1:])
    finally:
        op.destroy_adam(_PROBE_ID)
    return state


def _run_ours(
    tail: Tail,
    group: dict[str, Any],
    decoupled: bool,
    inputs: list[list[torch.Tensor]],
    steps: Sequence[int] = range(1, _STEPS + 1),
    pow_on_repeat: bool = False,
) -> list[torch.Tensor]:
    before, *grads = inputs
    state = [tensor.clone() for tensor in before]
    weights = torch.empty_like(state[0])
    powers = BetaPowers(group["betas"], pow_on_repeat)
    adam = HostAdam(tail.mode)
    for step, (grad,) in zip(steps, grads, strict=False):
        scalars = adam_scalars(group, powers.at(step, group["betas"]), 1.0, decoupled)
        tensors = AdamTensors(state[0], state[1], state[2], grad, weights)
        adam.step(tensors, scalars, tail.start(state[0].numel()), num_threads=1)
    return state


def tail_of_fresh_op() -> Tail:
    """Build DeepSpeed's op where it is not built yet, and return its tail.

    Raises:
        KernelError: It does not build or load, or no variant of ours has its bits.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    try:
        optimizer = DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(1))])
    except RuntimeError as error:
        raise KernelError(
            f"DeepSpeed's cpu_adam op did not build ({error.__cause__ or error}); it needs a C++ "
            "compiler, ninja and Python's headers (python3-dev on Debian)"
        ) from error
    except OSError as error:
        # torch locks an op in its folder whenever it loads it, built or not.
        raise KernelError(
            f"DeepSpeed's cpu_adam op cannot be loaded from {error.filename}: {error.strerror}; "
            "name a folder that you can write in TORCH_EXTENSIONS_DIR"
        ) from error
    return tail_of_op(optimizer.ds_opt_adam, bool(optimizer.adam_w_mode))
