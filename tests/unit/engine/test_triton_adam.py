"""The device kernel without a GPU: what it computes, what it compiles to, and how often.

Launches go through :class:`TritonAdam`, so Triton chooses what it compiles as on a GPU. What the
kernel computes is seen in Triton's interpreter, which knows neither fused multiply-adds nor PTX and
cuts numbers off where they become bf16: the first two are put in here, to the bit, and bf16 is left
to the GPU (``tests/gpu/test_triton_adam.py``).
"""

import contextlib
import itertools
import re
from collections import Counter

import numpy as np
import pytest
import torch

from deep_optimizer_states.core.kernels.adam import AdamTensors, BetaPowers, adam_scalars
from deep_optimizer_states.core.kernels.host import HostAdam, Tail
from deep_optimizer_states.core.verify import check_device_adam

triton = pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch")

from engine_iterations import run_iterations  # noqa: E402
from engine_updates import ADAM, SCHEDULES, TAIL  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder  # noqa: E402

from deep_optimizer_states.adapter.steppers import Steppers  # noqa: E402
from deep_optimizer_states.core.kernels import triton_adam  # noqa: E402
from deep_optimizer_states.core.kernels.triton_adam import BLOCK, TritonAdam  # noqa: E402

FP32_STATE = (torch.float32, torch.float32)
CAPABILITIES = (80, 90, 100)
BETAS = (0.9, 0.95)
DECAYS = {"none": (0.0, True), "decoupled": (0.1, True), "l2": (0.1, False)}


class Target:
    """Tells Triton of a GPU of a compute capability; stands where its driver does."""

    def __init__(self, capability):
        self._capability = capability

    def get_current_device(self):
        return self._capability  # Triton keeps what it compiled by device

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self._capability, 32)


@pytest.fixture
def compiled(monkeypatch):
    """Make launches compile and do nothing; returns what begins that for a compute capability."""
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    launches = []

    class Compile:
        def __init__(self, kernel):
            self._kernel = kernel

        def __getitem__(self, grid):
            def launch(*arguments, **options):
                launches.append(self._kernel.run(*arguments, grid=grid, warmup=True, **options))

            return launch

    def start(capability):
        driver = triton.runtime.driver
        name = "_active" if hasattr(driver, "_active") else "active"  # the latter before Triton 3.4
        monkeypatch.setattr(driver, name, Target(capability))
        for kernel in ("aligned_kernel", "any_kernel"):
            monkeypatch.setattr(triton_adam, kernel, Compile(getattr(triton_adam, kernel)))
        return launches

    return start


def variants(launches):
    return {id(one) for one in launches}


def tile(numel, grad_dtype, weights_dtype, offset, state=FP32_STATE):
    """A tile of zeros that begins ``offset`` elements after an aligned address."""
    tensors = []
    for dtype in (state[0], state[1], state[1], grad_dtype, weights_dtype):
        whole = torch.zeros(numel + 32, dtype=dtype)
        assert whole.data_ptr() % 16 == 0
        tensors.append(whole.narrow(0, offset, numel))
    return AdamTensors(*tensors)


def scalars_at(step, decay="decoupled"):
    weight_decay, decoupled = DECAYS[decay]
    group = {"lr": 1e-3, "betas": BETAS, "eps": 1e-8, "weight_decay": weight_decay}
    group["bias_correction"] = True
    return adam_scalars(group, BetaPowers(BETAS).at(step, BETAS), 0.37, decoupled)


# What it computes.


def fused(builder, x, y, z):
    """One rounding, but for a sum that fp64 rounds to half way between two numbers of fp32."""
    exact = x.data.astype(np.float64) * y.data + z.data
    return type(x)(exact.astype(np.float32), z.dtype.scalar)


def interpret(monkeypatch):
    for name in ("aligned_kernel", "any_kernel"):
        monkeypatch.setattr(triton_adam, name, InterpretedFunction(triton_adam._adam))
    monkeypatch.setattr(InterpreterBuilder, "create_fma", fused)
    monkeypatch.setattr(triton_adam, "_sqrt_rn", lambda x: triton.language.sqrt(x))
    monkeypatch.setattr(triton_adam, "_div_rn", lambda x, y: x / y)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)


def drawn(numel, grad, weights, state):
    generator = torch.Generator().manual_seed(numel)
    device = tile(numel, grad, weights, 1, state)
    for tensor in (device.master, device.exp_avg, device.exp_avg_sq, device.grad):
        tensor.copy_(torch.randn(numel, generator=generator))
    device.exp_avg_sq.abs_()
    device.master[:3], device.grad[1:4] = 1e-39, 0.0
    return device


def differences(device, modes, tail_start, decay):
    """Step copies on both sides twice; the names of what differs."""
    host = AdamTensors(*(tensor.clone() for tensor in vars(device).values()))
    gradient = device.grad.clone()
    for step in (1, 2):
        for side in (device, host):
            side.grad.copy_(gradient / step)
        scalars = scalars_at(step, decay)
        TritonAdam(modes[0]).step(device, scalars, tail_start)
        HostAdam(modes[1]).step(host, scalars, tail_start, num_threads=1)
    pairs = zip(vars(device).items(), vars(host).values(), strict=True)
    return {name for (name, ours), theirs in pairs if not torch.equal(ours, theirs)}


@pytest.mark.own_process  # Triton's interpreter leaves its language changed
def test_the_kernel_computes_what_the_host_kernel_does(monkeypatch):
    interpret(monkeypatch)
    fp32, fp16 = torch.float32, torch.float16
    types = [(fp32, fp32, FP32_STATE), (fp16, fp16, FP32_STATE), (fp16, fp16, (fp16, fp16))]
    for mode, decay, types_of_case in itertools.product((0, 1), DECAYS, types):
        for tail_start in (Tail(16, mode).start(1025), 500):
            found = differences(drawn(1025, *types_of_case), (mode, mode), tail_start, decay)
            assert found == set(), (mode, decay, types_of_case, tail_start)


@pytest.mark.own_process
def test_a_tail_that_is_rounded_the_other_way_is_seen(monkeypatch):
    """Negative control: the tail's last bits are compared, and in it alone."""
    interpret(monkeypatch)
    for modes in ((0, 1), (1, 0)):
        for tail_start, differ in ((1, True), (1000, False)):
            device = drawn(1000, torch.float16, torch.float32, FP32_STATE)
            found = differences(device, modes, tail_start, "none")
            assert ("exp_avg" in found) is differ


# What it compiles to.


def operations(compiled):
    """Operations on floating-point numbers that one element takes, and how many of each."""
    counts = Counter()
    for name, kind in re.findall(r"^\s*(?:@\S+\s+)?((\w+)\.[\w.]*f32(?:x2)?) ", compiled, re.M):
        if kind not in ("ld", "st", "mov", "cvt", "selp"):
            counts[name.removesuffix("x2")] += 2 if name.endswith("x2") else 1
    threads = int(re.search(r"\.reqntid (\d+)", compiled)[1])
    return {name: count * threads / BLOCK for name, count in counts.items()}


@pytest.mark.parametrize(
    ("capability", "mode", "decay", "dtype"),
    [
        (80, 1, "l2", torch.bfloat16),
        *itertools.product((90,), (0, 1), DECAYS, (torch.bfloat16,)),
        (90, 1, "decoupled", torch.float32),
        (100, 1, "decoupled", torch.bfloat16),
    ],
)
def test_nothing_is_fused_or_approximated_that_the_host_kernel_does_not(
    compiled, capability, mode, decay, dtype
):
    launches = compiled(capability)
    tensors = tile(1024, dtype, torch.bfloat16, 0, (dtype, dtype))
    TritonAdam(mode).step(tensors, scalars_at(1, decay), 1000)
    found = operations(launches[-1].asm["ptx"])
    # Both moments, each again where a tail is rounded otherwise; the denominator, the weight.
    num_fused = 4 + 2 * mode + (decay != "none")
    num_products = 4 + 2 * mode  # the scale, the square, a part of each moment
    assert found == {
        "fma.rn.f32": num_fused,
        "mul.rn.f32": num_products,
        "sqrt.rn.f32": 1,
        "div.rn.f32": 1,
    }
    assert ".ftz" not in launches[-1].asm["ptx"]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_aligned_tiles_are_loaded_and_stored_by_16_bytes(compiled, capability):
    launches = compiled(capability)
    for numel in (1024, 1023):
        TritonAdam(1).step(tile(numel, *[torch.bfloat16] * 2, 0), scalars_at(1), numel)
    wide, narrow = (
        re.findall(r"(?:ld|st)\.global\S*\.v4\.b32", one.asm["ptx"]) for one in launches
    )
    assert wide
    assert not narrow


def test_scalars_reach_the_kernel_by_name(monkeypatch):
    """And not by the order in which Python happens to keep them."""
    given = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: given.append(options)

    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(triton_adam, "any_kernel", Kernel())
    scalars = scalars_at(3)
    turned = object.__new__(type(scalars))
    vars(turned).update(reversed(vars(scalars).items()))
    for one in (scalars, turned):
        TritonAdam(0).step(tile(100, *FP32_STATE, 1), one, 100)
    assert given[0] == given[1]
    assert given[0]["beta1"] == scalars.beta1


# How often it is compiled.


def test_two_variants_do_for_tiles_of_every_size_and_place(compiled):
    """Triton would compile one for each set of sizes that are 1 or multiples of 16."""
    launches = compiled(90)
    dtypes = (torch.bfloat16, torch.bfloat16)
    for numel, offset in itertools.product((1, 15, 16, 17, 1024), (0, 1, 4, 8, 16)):
        for tail in (0, 1, 16, numel):
            TritonAdam(1).step(tile(numel, *dtypes, offset), scalars_at(1), tail)
    assert len(launches) == 100
    assert len(variants(launches)) == 2


def compile_and_step(adam):
    """What a device does: the launch compiles, and the host kernel gives the bits."""

    def step(tensors, scalars, tail_start):
        adam.step(tensors, scalars, tail_start)
        ADAM.step(tensors, scalars, tail_start, num_threads=1)

    return step


def step_tiles(adam, grad_dtypes, states):
    cases = itertools.product((1, 16, 33), grad_dtypes, states, ("decoupled", "none"))
    for numel, grad, state, decay in cases:
        adam.step(tile(numel, grad, torch.bfloat16, 1, state), scalars_at(1, decay), numel)


def test_updates_compile_nothing_that_the_self_check_has_not(compiled, device):
    launches, adam = compiled(90), TritonAdam(TAIL.mode)
    device.adam, grad_dtypes = compile_and_step(adam), (torch.bfloat16, torch.float32)
    for dtype in grad_dtypes:  # fp32: resident gradients of parameters that took no part
        check_device_adam(device, ADAM, TAIL, True, (dtype, torch.bfloat16))
    checked = variants(launches)
    for name in ("stride and ratio", "stride 2, tiles"):
        run_iterations(device, SCHEDULES[name])
    step_tiles(adam, grad_dtypes, [FP32_STATE])
    assert len(checked) == 8, "two kernels, two types, with weight decay and without"
    assert variants(launches) == checked


def test_updates_of_16_bit_state_compile_nothing_either(compiled, device):
    """Moments are fp32 until a checkpoint is loaded, and then as narrow as the master weights."""
    launches, adam, bf16 = compiled(90), TritonAdam(TAIL.mode), torch.bfloat16
    device.adam = compile_and_step(adam)
    states = [(bf16, torch.float32), (bf16, bf16)]
    steppers = Steppers(TAIL, ADAM, device, pow_on_repeat=False, state_dtypes=states[0])
    steppers.check(True, bf16, bf16)
    checked = variants(launches)
    step_tiles(adam, [bf16], states)
    assert len(checked) == 8, "two kernels, two types of moments, with weight decay and without"
    assert variants(launches) == checked
