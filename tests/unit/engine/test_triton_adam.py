"""The device kernel's compiled code, run on the CPU: the bits of the host kernel.

Launches go through :class:`TritonAdam`, so Triton chooses what it compiles as on a GPU. A result
that is not a number need only be none on both sides: GPUs know one such pattern, CPUs keep the
operand's.
"""

import contextlib
import itertools
import re
from typing import NamedTuple

import pytest
import torch

from deep_optimizer_states.core.kernels.adam import AdamTensors, BetaPowers, adam_scalars
from deep_optimizer_states.core.kernels.host import HostAdam, Tail
from deep_optimizer_states.core.verify import check_device_adam

triton = pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch")

from engine_iterations import run_iterations  # noqa: E402
from engine_updates import ADAM, SCHEDULES, TAIL  # noqa: E402
from ptx import PtxError, PtxKernel, use_target  # noqa: E402
from turns import some  # noqa: E402

from deep_optimizer_states.adapter.steppers import Steppers  # noqa: E402
from deep_optimizer_states.core.kernels import triton_adam  # noqa: E402
from deep_optimizer_states.core.kernels.triton_adam import TritonAdam  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP32_STATE = (torch.float32, torch.float32)
NARROW_STATES = [
    (master, moments)
    for master in (torch.bfloat16, torch.float16)
    for moments in (master, torch.float32)
]
CAPABILITIES = (80, 90, 100)
BETAS = (0.9, 0.95)
DECAYS = {"none": (0.0, True), "decoupled": (0.1, True), "l2": (0.1, False)}
NUMELS = (1, 15, 16, 17, 1023, 1024, 1025, 5000)
HARD = torch.tensor(
    [
        *(0.0, 1e-45, 3e-42, 1e-39, 2.0**-126, 1e-30, 1e-19, 1.0, 1e19, 3e38, torch.inf, torch.nan),
        # Ties, and the ends of the 16-bit formats.
        *(65504.0, 65519.99, 65520.0, 1e-7, 2.0**-25, 1.00390625, 1.01171875),
    ]
)
HARD = torch.cat([HARD, -HARD])


@pytest.fixture
def launch(monkeypatch):
    """Make launches run on the CPU; returns what starts them for a compute capability."""
    launches = []

    def start(capability):
        use_target(monkeypatch, capability)
        for name in ("aligned_kernel", "any_kernel"):
            kernel = PtxKernel(getattr(triton_adam, name), launches)
            monkeypatch.setattr(triton_adam, name, kernel)
        monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
        return launches

    return start


def tile(numel, grad_dtype, weights_dtype, offset, draw, state=FP32_STATE):
    """A tile that begins ``offset`` elements after an aligned address; master, moments, grad."""
    dtypes = (state[0], state[1], state[1], grad_dtype, weights_dtype)
    tensors = []
    for dtype in dtypes:
        whole = torch.zeros(numel + 32, dtype=dtype)
        assert whole.data_ptr() % 16 == 0
        tensors.append(whole.narrow(0, offset, numel))
    master, exp_avg, exp_avg_sq, grad, weights = tensors
    for tensor in (master, exp_avg, exp_avg_sq, grad):
        tensor.copy_(draw(numel))
    exp_avg_sq.abs_()
    return AdamTensors(master, exp_avg, exp_avg_sq, grad, weights)


def copy(tensors):
    return AdamTensors(*(tensor.clone() for tensor in vars(tensors).values()))


def same_bits(ours, theirs):
    integers = torch.int32 if ours.dtype == torch.float32 else torch.int16
    is_number = ~ours.isnan()
    return torch.equal(is_number, ~theirs.isnan()) and torch.equal(
        ours.view(integers)[is_number], theirs.view(integers)[is_number]
    )


def different(ours, theirs):
    pairs = zip(vars(ours).items(), vars(theirs).values(), strict=True)
    return [name for (name, mine), other in pairs if not same_bits(mine, other)]


def scalars_at(step, decay="decoupled", eps=1e-8, grad_scale=0.37):
    weight_decay, decoupled = DECAYS[decay]
    group = {"lr": 1e-3, "betas": BETAS, "eps": eps, "weight_decay": weight_decay}
    group["bias_correction"] = True
    return adam_scalars(group, BetaPowers(BETAS).at(step, BETAS), grad_scale, decoupled)


def updates_differ(device, modes, tail_start, gradients, **options):
    """Step copies on both sides; what differs after the first step at which anything does."""
    host = copy(device)
    sides = TritonAdam(modes[0]), HostAdam(modes[1])
    for step, gradient in enumerate(gradients, start=1):
        device.grad.copy_(gradient)
        host.grad.copy_(gradient)
        sides[0].step(device, scalars_at(step, **options), tail_start)
        sides[1].step(host, scalars_at(step, **options), tail_start, num_threads=1)
        if found := different(device, host):
            return found
    return []


def normal(generator):
    return lambda numel: torch.randn(numel, generator=generator)


class Case(NamedTuple):
    """A launch; ``offset`` elements past an aligned address, ``mode`` as in ``Tail``."""

    capability: int
    grad: torch.dtype
    weights: torch.dtype
    decay: str
    mode: int
    offset: int
    numel: int
    state: tuple[torch.dtype, torch.dtype] = FP32_STATE

    def __str__(self):
        return "-".join(str(value).removeprefix("torch.") for value in self)


def cases(*values):
    return [Case(*found) for found in itertools.product(*values)]


BF16 = (torch.bfloat16,)
CASES = [
    *cases(CAPABILITIES, DTYPES, DTYPES, ("decoupled",), (1,), (0,), (1023,)),
    *cases((90,), BF16, BF16, DECAYS, (0, 1), (0, 1), NUMELS),
]
NARROW_CASES = [
    # The gradient has the type of the state or has been summed wider.
    Case(capability, torch.float32 if wide else state[0], state[0], "l2", 1, at, 1023, state)
    for capability, state, wide, at in itertools.product(
        CAPABILITIES, NARROW_STATES, (True, False), (0, 1)
    )
]


@pytest.mark.parametrize("case", [*some(CASES, 5), *some(NARROW_CASES, 5)], ids=str)
def test_compiled_code_has_the_bits_of_the_host_kernel(launch, case):
    launch(case.capability)
    generator = torch.Generator().manual_seed(case.numel)
    draw = normal(generator)
    device = tile(case.numel, case.grad, case.weights, case.offset, draw, case.state)
    gradients = (torch.randn(case.numel, generator=generator) for _ in range(3))
    start, modes = Tail(16, case.mode).start(case.numel), (case.mode, case.mode)
    assert updates_differ(device, modes, start, gradients, decay=case.decay) == []


HARD_CASES = cases((90,), DTYPES, DTYPES, DECAYS, (1,), (0,), (3000,))
NARROW_HARD_CASES = [
    Case(90, torch.float32, weights, decay, 1, 0, 3000, state)
    for state, weights, decay in itertools.product(NARROW_STATES, DTYPES, DECAYS)
]


@pytest.mark.parametrize("eps", [1e-8, 0.0])
@pytest.mark.parametrize("case", [*some(HARD_CASES, 5), *some(NARROW_HARD_CASES, 2)], ids=str)
def test_zeros_subnormal_huge_and_infinite_numbers_too(launch, case, eps):
    launch(case.capability)
    generator = torch.Generator().manual_seed(1)

    def draw(numel):
        return HARD[torch.randint(len(HARD), (numel,), generator=generator)]

    device = tile(case.numel, case.grad, case.weights, 0, draw, case.state)
    device.exp_avg_sq.copy_(draw(case.numel))
    gradients = (draw(case.numel) for _ in range(3))
    scale = 1.0 if case.state == FP32_STATE else 0.37
    options = {"decay": case.decay, "eps": eps, "grad_scale": scale}
    assert updates_differ(device, (1, 1), case.numel // 2, gradients, **options) == []


@pytest.mark.parametrize(
    ("modes", "tail_start", "are_equal"),
    [
        *(((mode, mode), start, True) for mode in (0, 1) for start in (-7, 0, 1, 999, 1007, 2**40)),
        *(((0, 1), 1, False), ((1, 0), 1, False), ((0, 1), 1000, True)),
    ],
)
def test_a_tail_may_begin_anywhere_and_one_rounded_the_other_way_is_seen(
    launch, modes, tail_start, are_equal
):
    launch(90)
    generator = torch.Generator().manual_seed(4)
    device = tile(1000, torch.bfloat16, torch.float32, 0, normal(generator))
    gradients = [torch.randn(1000, generator=generator)]
    assert (updates_differ(device, modes, tail_start, gradients) == []) is are_equal


def test_scalars_reach_the_kernel_by_name(launch):
    """And not by the order in which Python happens to keep them."""
    launch(80)
    generator = torch.Generator().manual_seed(4)
    first = tile(100, torch.float32, torch.float32, 0, normal(generator))
    second, scalars = copy(first), scalars_at(3)
    turned = object.__new__(type(scalars))
    vars(turned).update(reversed(vars(scalars).items()))
    TritonAdam(0).step(first, scalars, 100)
    TritonAdam(0).step(second, turned, 100)
    assert different(first, second) == []


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "weights", "grad"])
def test_an_element_past_the_end_is_not_touched(launch, name):
    """Negative control: a tensor that is one element short is noticed."""
    launch(90)
    device = tile(1000, torch.bfloat16, torch.bfloat16, 1, torch.randn)
    TritonAdam(0).step(device, scalars_at(1), 1000)
    short = {**vars(device), name: getattr(device, name)[:-1]}
    with pytest.raises(PtxError, match="outside of every array"):
        TritonAdam(0).step(AdamTensors(**short), scalars_at(1), 1000)


def variants(launches):
    return {id(one) for one in launches}


def test_two_variants_do_for_tiles_of_every_size_and_place(launch):
    """Triton would compile one for each set of sizes that are 1 or multiples of 16."""
    launches = launch(90)
    dtypes = (torch.bfloat16, torch.bfloat16)
    for numel, offset in itertools.product((1, 15, 16, 17, 1024), (0, 1, 4, 8, 16)):
        for tail in (0, 1, 16, numel):
            TritonAdam(1).step(tile(numel, *dtypes, offset, torch.zeros), scalars_at(1), tail)
    assert len(launches) == 100
    assert len(variants(launches)) == 2


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_aligned_tiles_are_loaded_and_stored_by_16_bytes(launch, capability):
    launches = launch(capability)
    for numel in (1024, 1023):
        tensors = tile(numel, torch.bfloat16, torch.bfloat16, 0, torch.zeros)
        TritonAdam(1).step(tensors, scalars_at(1), numel)
    wide, narrow = (
        re.findall(r"(?:ld|st)\.global\S*\.v4\.b32", one.asm["ptx"]) for one in launches
    )
    assert wide
    assert not narrow


def step_tiles(adam, grad_dtypes, states):
    cases = itertools.product((1, 16, 33), grad_dtypes, states, ("decoupled", "none"))
    for numel, grad, state, decay in cases:
        tensors = tile(numel, grad, torch.bfloat16, 1, torch.zeros, state)
        adam.step(tensors, scalars_at(1, decay), numel)


def test_updates_compile_nothing_that_the_self_check_has_not(launch, device):
    launches, adam = launch(90), TritonAdam(TAIL.mode)
    device.adam, grad_dtypes = adam.step, (torch.bfloat16, torch.float32)
    for dtype in grad_dtypes:  # fp32: resident gradients of parameters that took no part
        check_device_adam(device, ADAM, TAIL, True, (dtype, torch.bfloat16))
    compiled = variants(launches)
    for name in ("stride and ratio", "stride 2, tiles"):
        run_iterations(device, SCHEDULES[name])
    step_tiles(adam, grad_dtypes, [FP32_STATE])
    assert len(compiled) == 8, "two kernels, two types, with weight decay and without"
    assert variants(launches) == compiled


def test_updates_of_16_bit_state_compile_nothing_either(launch, device):
    """Moments are fp32 until a checkpoint is loaded, and then as narrow as the master weights."""
    launches, adam, bf16 = launch(90), TritonAdam(TAIL.mode), torch.bfloat16
    device.adam = adam.step
    states = [(bf16, torch.float32), (bf16, bf16)]
    steppers = Steppers(TAIL, ADAM, device, pow_on_repeat=False, state_dtypes=states[0])
    steppers.check(True, bf16, bf16)
    compiled = variants(launches)
    step_tiles(adam, [bf16], states)
    assert len(compiled) == 8, "two kernels, two types of moments, with weight decay and without"
    assert variants(launches) == compiled
