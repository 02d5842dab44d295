"""State of 16 bits against DeepSpeed's own compiled op, on any numbers, sizes and cuts."""

import functools

import pytest
import torch
from deepspeed.ops.op_builder import CPUAdamBuilder
from hypothesis import example, given, settings, strategies as st

from deep_optimizer_states.adapter.stock_adam import (
    _groups_of,
    _run_ours,
    probe_inputs,
    tail_of_op,
)
from deep_optimizer_states.core.kernels.adam import (
    AdamTensors,
    BetaPowers,
    adam_scalars,
    first_difference,
    tail_within,
)
from deep_optimizer_states.core.kernels.host import (
    HostAdam,
    InstructionSet,
    Tail,
    best_instruction_set,
)
from deep_optimizer_states.errors import KernelError

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
STATES = [(BF16, BF16), (BF16, F32), (FP16, FP16), (FP16, F32)]
BETAS = (0.9, 0.95)
OPTIMIZER_ID = 7316
SPECIAL = (0.0, -0.0, 1e-40, -6e-8, 5e-5, 65504.0, -7e4, 3e38, torch.inf, -torch.inf, torch.nan)
states = pytest.mark.parametrize("dtypes", STATES, ids=str)


@functools.cache
def op():
    return CPUAdamBuilder().load()


def host_adam(mode):
    return HostAdam(mode)


@functools.cache
def tail_of(dtypes, decoupled):
    return tail_of_op(op(), decoupled, dtypes)


def make_group(decay):
    group = {"lr": 1e-2, "betas": BETAS, "eps": 1e-8, "weight_decay": decay}
    return {**group, "bias_correction": True}


def step_stock(decoupled, decay, count, tensors):
    """One step of the op that DeepSpeedCPUAdam calls: master weights, gradient, moments."""
    group = make_group(decay)
    settings_ = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
    op().create_adam(OPTIMIZER_ID, *settings_, decoupled, False)
    try:
        op().adam_update(OPTIMIZER_ID, count, *settings_, True, *tensors)
    finally:
        op().destroy_adam(OPTIMIZER_ID)


def scalars_at(step, decoupled, decay, scale):
    return adam_scalars(make_group(decay), BetaPowers(BETAS).at(step, BETAS), scale, decoupled)


def step_ours(adam, tensors, scalars, tail, tile_numel):
    """The same in tiles, of which the last holds the tail."""
    numel = tensors.numel
    start = tail.start(numel)
    for first in range(0, numel, tile_numel):
        tile = tensors.narrow(first, min(tile_numel, numel - first))
        adam.step(tile, scalars, tail_within(start, first, tile.numel), num_threads=1)


@st.composite
def runs(draw):
    numel = draw(st.one_of(st.integers(1, 70), st.integers(100, 700)))
    return {
        "numel": numel,
        "dtypes": draw(st.sampled_from(STATES)),
        "grad_dtype": draw(st.sampled_from([F32, BF16, FP16])),
        "weights_dtype": draw(st.sampled_from([F32, BF16, FP16])),
        "decoupled": draw(st.booleans()),
        "decay": draw(st.sampled_from([0.0, 0.1])),
        "scale": draw(st.sampled_from([1.0, 0.37, 2.0**-16, 3e-7])),
        "exponents": draw(st.sampled_from([(-3, 3), (-30, 16), (-140, 120)])),
        "tile_numel": 16 * draw(st.integers(1, 50)),
        "offset": draw(st.integers(0, 17)),
        "seed": draw(st.integers(0, 10**6)),
        "specials": draw(st.lists(st.sampled_from(SPECIAL), max_size=6)),
    }


def numbers(run, generator):
    powers = torch.randint(*run["exponents"], (run["numel"],), generator=generator)
    found = torch.randn(run["numel"], generator=generator) * powers.double().exp2()
    for number, special in enumerate(run["specials"]):
        found[(number * 37 + run["seed"]) % run["numel"]] = special
    return found


def placed(source, dtype, offset):
    """A copy that begins ``offset`` elements after an aligned address."""
    whole = torch.zeros(source.numel() + offset, dtype=dtype)
    return whole.narrow(0, offset, source.numel()).copy_(source)


FIRST = {"numel": 47, "dtypes": (FP16, FP16), "grad_dtype": BF16, "weights_dtype": FP16}
FIRST |= {"decoupled": False, "decay": 0.1, "scale": 0.37, "exponents": (-3, 3), "offset": 3}
FIRST |= {"tile_numel": 16, "seed": 1, "specials": list(SPECIAL[:6])}


@settings(max_examples=60, deadline=None)
@example(FIRST)
@given(runs())
def test_any_numbers_in_any_tiles_have_the_bits_of_the_op(run):
    """Gradients of any type are unscaled in that of the master weights, as stock unscales them."""
    generator = torch.Generator().manual_seed(run["seed"])
    master_dtype, moment_dtype = run["dtypes"]
    master, exp_avg, exp_avg_sq = (numbers(run, generator) for _ in range(3))
    state = [master.to(master_dtype), exp_avg.to(moment_dtype), exp_avg_sq.abs().to(moment_dtype)]
    stock = [tensor.clone() for tensor in state]  # the op wants aligned addresses
    ours = AdamTensors(
        *(placed(tensor, tensor.dtype, run["offset"]) for tensor in state),
        torch.zeros(run["numel"], dtype=run["grad_dtype"]),
        torch.zeros(run["numel"], dtype=run["weights_dtype"]),
    )
    tail = tail_of(run["dtypes"], run["decoupled"])
    for step in (1, 2, 3):
        gradient = numbers(run, generator).to(run["grad_dtype"])
        unscaled = gradient.to(master_dtype, copy=True)
        unscaled.mul_(torch.tensor(run["scale"]))  # as stock does: in place, by a tensor
        step_stock(run["decoupled"], run["decay"], step, [stock[0], unscaled, *stock[1:]])
        scalars = scalars_at(step, run["decoupled"], run["decay"], run["scale"])
        ours.grad.copy_(gradient)
        step_ours(host_adam(tail.mode), ours, scalars, tail, run["tile_numel"])
        expected = AdamTensors(*stock, gradient, stock[0].to(run["weights_dtype"]))
        assert first_difference(ours, expected) is None


def steps_of(dtypes, tail, rounded_once=False, wide=False):
    """Some hundred elements after a few steps, each gradient unscaled by 0.37."""
    generator = torch.Generator().manual_seed(2)
    master_dtype, moment_dtype = (F32, F32) if wide else dtypes
    master = torch.randn(511, generator=generator).to(dtypes[0])
    state = [master.to(master_dtype), *torch.zeros(2, 511, dtype=moment_dtype)]
    tensors = AdamTensors(*state, torch.zeros(511), torch.zeros(511, dtype=dtypes[0]))
    for step in range(1, 6):
        tensors.grad.copy_(torch.randn(511, generator=generator).to(dtypes[0]))
        if rounded_once:
            tensors.grad.mul_(0.37)
        scalars = scalars_at(step, True, 0.1, 1.0 if rounded_once else 0.37)
        HostAdam(tail.mode).step(tensors, scalars, tail.start(511), num_threads=1)
    return torch.cat([tensor.float() for tensor in tensors.state])


@states
def test_state_kept_wider_than_stocks_is_seen(dtypes):
    """Negative control: what is rounded between steps is rounded to be equal."""
    tail = tail_of(dtypes, True)
    assert not torch.equal(steps_of(dtypes, tail), steps_of(dtypes, tail, wide=True))


@states
@pytest.mark.parametrize("wrong", [Tail(16, 0), Tail(16, 2), Tail(8, 1), Tail(2**62, 1)])
def test_the_probe_sees_every_other_tail_in_16_bits(dtypes, wrong):
    """Rounding to 16 bits hides a contraction from numbers that do not cancel."""
    group = _groups_of(dtypes)[0]
    inputs = probe_inputs(group, dtypes)
    right = _run_ours(Tail(16, 1), group, True, inputs)
    found = _run_ours(wrong, group, True, inputs)
    moments = zip(right[1:], found[1:], strict=True)
    assert all(int((mine != other).sum()) >= 8 for mine, other in moments)


@states
def test_the_probe_is_of_finite_numbers(dtypes):
    for group in _groups_of(dtypes):
        assert all(
            t.isfinite().all()
            for t in _run_ours(Tail(16, 1), group, True, probe_inputs(group, dtypes))
        )


class WronglyRounded:
    """An op that cuts 16-bit moments off in place of rounding them."""

    def create_adam(self, *settings):
        op().create_adam(*settings)

    def destroy_adam(self, opt_id):
        op().destroy_adam(opt_id)

    def adam_update(self, *arguments):
        *settings_, master, grad, exp_avg, exp_avg_sq = arguments
        wide = [exp_avg.float(), exp_avg_sq.float()]
        op().adam_update(*settings_, master, grad, *wide)
        for narrow, moment in zip((exp_avg, exp_avg_sq), wide, strict=True):
            narrow.copy_((moment.view(torch.int32) >> 16 << 16).view(F32))


def test_an_op_that_rounds_in_another_way_is_refused():
    with pytest.raises(KernelError, match="no variant of our kernel repeats"):
        tail_of_op(WronglyRounded(), True, (BF16, BF16))


@states
def test_every_instruction_set_gives_the_same_bits(dtypes):
    found = []
    for instruction_set in range(best_instruction_set() + 1):
        generator = torch.Generator().manual_seed(6)
        state = [torch.randn(5003, generator=generator).to(dtypes[0])]
        state += [*torch.zeros(2, 5003, dtype=dtypes[1])]
        grad, weights = torch.randn(5003, generator=generator), torch.zeros(5003, dtype=FP16)
        tensors = AdamTensors(*state, grad.to(dtypes[0]), weights)
        adam = HostAdam(1, InstructionSet(instruction_set))
        for step in range(1, 5):
            adam.step(tensors, scalars_at(step, False, 0.1, 0.3), 4992, num_threads=1)
        found.append(torch.cat([t.view(torch.uint8) for t in vars(tensors).values()]))
    assert all(torch.equal(result, found[0]) for result in found)


def test_moments_of_two_types_are_refused():
    tensors = AdamTensors(*(torch.zeros(8, dtype=dtype) for dtype in (BF16, F32, BF16, BF16, BF16)))
    with pytest.raises(KernelError, match="both moments in one type"):
        HostAdam(1).step(tensors, scalars_at(1, True, 0.0, 1.0), 8, num_threads=1)
