"""Our arithmetic against DeepSpeed's own compiled op, on any numbers, types, sizes and cuts."""

import functools

import pytest
import torch
from deepspeed.ops.op_builder import CPUAdamBuilder
from hypothesis import example, given, settings, strategies as st

from deep_optimizer_states.adapter.stock_adam import (
    _groups_of,
    _run_ours,
    pow_on_repeat_of_op,
    probe_inputs,
    tail_of_op,
)
from deep_optimizer_states.core.kernels import host
from deep_optimizer_states.core.kernels.adam import (
    AdamTensors,
    BetaPowers,
    adam_scalars,
    first_difference,
    tail_within,
)
from deep_optimizer_states.core.kernels.host import (
    LEAST_PER_THREAD,
    HostAdam,
    InstructionSet,
    Tail,
    best_instruction_set,
)
from deep_optimizer_states.errors import KernelError

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
WIDE, NARROW = (F32, F32), [(BF16, BF16), (BF16, F32), (FP16, FP16), (FP16, F32)]
STATES = [WIDE, *NARROW]
BETAS = (0.9, 0.95)
OPTIMIZER_ID = 7316
SPECIAL = (0.0, -0.0, 1e-40, -6e-8, 5e-5, 65504.0, -7e4, 3e38, torch.inf, -torch.inf, torch.nan)
states, narrow_states = (pytest.mark.parametrize("dtypes", s, ids=str) for s in (STATES, NARROW))


@functools.cache
def op():
    return CPUAdamBuilder().load()


@functools.cache
def tail_of(dtypes=WIDE, decoupled=True):
    return tail_of_op(op(), decoupled, dtypes)


def make_group(**changes):
    group = {"lr": 1e-2, "betas": BETAS, "eps": 1e-8, "weight_decay": 0.1}
    return {**group, "bias_correction": True, **changes}


class StockAdam:
    """The op that DeepSpeedCPUAdam calls, which counts steps as it goes on."""

    def __init__(self, group, decoupled=True):
        self.group = group
        op().create_adam(OPTIMIZER_ID, group["lr"], *group["betas"], 1e-8, 0.0, decoupled, False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        op().destroy_adam(OPTIMIZER_ID)

    def step(self, count, master, grad, *moments):
        group = self.group
        numbers = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
        op().adam_update(OPTIMIZER_ID, count, *numbers, True, master, grad, *moments)


def scalars_at(step, decoupled=True, scale=1.0, **changes):
    return adam_scalars(make_group(**changes), BetaPowers(BETAS).at(step, BETAS), scale, decoupled)


def step_ours(adam, tensors, scalars, tail, tile_numel=2**30, num_threads=1):
    """A step in tiles, of which the last holds the tail."""
    numel = tensors.numel
    for first in range(0, numel, tile_numel):
        tile = tensors.narrow(first, min(tile_numel, numel - first))
        start = tail_within(tail.start(numel), first, tile.numel)
        adam.step(tile, scalars, start, num_threads)


# Steps as the op takes them.


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
SECOND = {**FIRST, "numel": 5003, "dtypes": WIDE, "weights_dtype": BF16, "tile_numel": 4096}


@settings(max_examples=100, deadline=None)
@example(FIRST)
@example(SECOND)
@given(runs())
def test_any_numbers_in_any_tiles_have_the_bits_of_the_op(run):
    """Gradients of any type are unscaled in that of the master weights, as stock unscales them."""
    generator = torch.Generator().manual_seed(run["seed"])
    master_dtype, moment_dtype = run["dtypes"]
    master, exp_avg, exp_avg_sq = (numbers(run, generator) for _ in range(3))
    state = [master.to(master_dtype), exp_avg.to(moment_dtype), exp_avg_sq.abs().to(moment_dtype)]
    theirs = [tensor.clone() for tensor in state]  # the op wants aligned addresses
    ours = AdamTensors(
        *(placed(tensor, tensor.dtype, run["offset"]) for tensor in state),
        torch.zeros(run["numel"], dtype=run["grad_dtype"]),
        torch.zeros(run["numel"], dtype=run["weights_dtype"]),
    )
    tail = tail_of(run["dtypes"], run["decoupled"])
    decay = {"weight_decay": run["decay"]}
    for step in (1, 2, 3):
        gradient = numbers(run, generator).to(run["grad_dtype"])
        unscaled = gradient.to(master_dtype, copy=True)
        unscaled.mul_(torch.tensor(run["scale"]))  # as stock does: in place, by a tensor
        with StockAdam(make_group(**decay), run["decoupled"]) as stock:
            stock.step(step, theirs[0], unscaled, *theirs[1:])
        scalars = scalars_at(step, run["decoupled"], run["scale"], **decay)
        ours.grad.copy_(gradient)
        step_ours(HostAdam(tail.mode), ours, scalars, tail, run["tile_numel"])
        expected = AdamTensors(*theirs, gradient, theirs[0].to(run["weights_dtype"]))
        assert first_difference(ours, expected) is None


COUNTED = [range(1, 60), (1, 2, 3), (7, 8, 9), (3, 3, 4, 4), (5, 2, 3)]


@pytest.mark.parametrize("steps", COUNTED, ids=str)
@pytest.mark.parametrize("numel", [33, 3 * LEAST_PER_THREAD + 1003])
def test_a_team_follows_the_op_over_many_steps_jumps_and_repeats(numel, steps):
    if numel > 33 and len(steps) > 4:
        steps = steps[:3]
    generator, group = torch.Generator().manual_seed(1), make_group(betas=(0.87, 0.993))
    theirs = [torch.randn(numel, generator=generator), *torch.zeros(2, numel)]
    ours = AdamTensors(
        *(tensor.clone() for tensor in theirs),
        torch.zeros(numel, dtype=BF16),
        torch.zeros(numel, dtype=BF16),
    )
    powers, tail = BetaPowers(group["betas"], pow_on_repeat_of_op(op(), True)), tail_of()
    with StockAdam(group) as stock:
        for number, step in enumerate(steps):
            group["lr"] = 1e-3 * (1 + step % 5)
            if number == 2:
                group["betas"] = (0.8, 0.9)
            ours.grad.copy_(torch.randn(numel, generator=generator))
            stock.step(step, theirs[0], ours.grad.float(), *theirs[1:])
            scalars = adam_scalars(group, powers.at(step, group["betas"]), 1.0, True)
            step_ours(HostAdam(tail.mode), ours, scalars, tail, num_threads=3)
    expected = AdamTensors(*theirs, ours.grad, theirs[0].bfloat16())
    assert first_difference(ours, expected) is None


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
            adam.step(tensors, scalars_at(step, False, 0.3), 4992, num_threads=1)
        found.append(torch.cat([t.view(torch.uint8) for t in vars(tensors).values()]))
    assert all(torch.equal(result, found[0]) for result in found)


def test_an_instruction_set_that_the_cpu_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(host, "best_instruction_set", lambda: InstructionSet.PORTABLE)
    with pytest.raises(KernelError, match="no AVX512, only PORTABLE"):
        HostAdam(0, InstructionSet.AVX512)
    assert HostAdam(0).instruction_set is InstructionSet.PORTABLE


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grad": torch.zeros(7)}, "8 elements"),
        ({"grad": torch.zeros(8, dtype=torch.int32)}, "int32"),
        ({"weights": torch.zeros(8, device="meta")}, r"weights is .* on meta"),
        ({"exp_avg": torch.zeros(8, dtype=BF16)}, "both moments in one type"),
    ],
    ids=str,
)
def test_wrong_tensors_are_refused(changes, words):
    names = ("master", "exp_avg", "exp_avg_sq", "grad", "weights")
    tensors = AdamTensors(**{name: torch.zeros(8) for name in names} | changes)
    with pytest.raises(KernelError, match=words):
        HostAdam(1).step(tensors, scalars_at(1), 8, num_threads=1)


# How the op rounds its tail and counts its steps, which is found out by running it.


def test_the_tail_is_found_under_another_default_type():
    torch.set_default_dtype(BF16)
    try:
        again = tail_of_op.__wrapped__(op(), True)  # not what was found before
    finally:
        torch.set_default_dtype(F32)
    assert again == tail_of()


class MadeUpOp:
    """An op that takes every element for tail, and counts steps by powers that are given."""

    def __init__(self, make_powers):
        self._make_powers = make_powers

    def create_adam(self, opt_id, *settings):
        self._powers = self._make_powers()

    def destroy_adam(self, opt_id):
        pass

    def adam_update(self, opt_id, step, *rest):
        lr, *betas, eps, decay, _bias, master, grad, exp_avg, exp_avg_sq = rest
        group = make_group(lr=lr, betas=betas, eps=eps, weight_decay=decay)
        scalars = adam_scalars(group, self._powers.at(step, betas), 1.0, True)
        tensors = AdamTensors(master, exp_avg, exp_avg_sq, grad, torch.empty_like(master))
        HostAdam(1).step(tensors, scalars, 0, 1)


class MultipliedUp:
    """Powers that begin anew at every call."""

    def at(self, step, betas):
        powers = BetaPowers(betas)
        return [powers.at(number, betas) for number in range(1, step + 1)][-1]


class AlwaysPow:
    """Powers of an op that multiplies nothing up."""

    def at(self, step, betas):
        return BetaPowers((0.5, 0.5)).at(step, betas)  # the betas change at every call


def test_an_op_without_vectors_is_all_tail():
    tail = tail_of_op(MadeUpOp(MultipliedUp), True)
    assert tail.mode == 1
    assert [tail.start(numel) for numel in (1, 8207, 8208, 8209, 10**9)] == [0] * 5


def test_how_the_op_counts_a_step_that_comes_again_is_found_and_a_third_way_refused():
    for rule in (False, True):
        op_of_rule = MadeUpOp(functools.partial(BetaPowers, (0.9, 0.999), rule))
        assert pow_on_repeat_of_op(op_of_rule, True) == rule
    with pytest.raises(KernelError, match="corrects the bias of its moments in a way that is not"):
        pow_on_repeat_of_op(MadeUpOp(AlwaysPow), True)


class WronglyRounded:
    """An op that cuts 16-bit moments off in place of rounding them."""

    def __getattr__(self, name):
        return getattr(op(), name)

    def adam_update(self, *arguments):
        *settings_, master, grad, exp_avg, exp_avg_sq = arguments
        wide = [exp_avg.float(), exp_avg_sq.float()]
        op().adam_update(*settings_, master, grad, *wide)
        for narrow, moment in zip((exp_avg, exp_avg_sq), wide, strict=True):
            narrow.copy_((moment.view(torch.int32) >> 16 << 16).view(F32))


def test_an_op_that_rounds_in_another_way_is_refused():
    with pytest.raises(KernelError, match="no variant of our kernel repeats"):
        tail_of_op(WronglyRounded(), True, (BF16, BF16))


@narrow_states
@pytest.mark.parametrize("wrong", [Tail(16, 0), Tail(16, 2), Tail(8, 1), Tail(2**62, 1)])
def test_the_probe_is_of_finite_numbers_and_sees_every_other_tail_in_16_bits(dtypes, wrong):
    """Rounding to 16 bits hides a contraction from numbers that do not cancel."""
    group = _groups_of(dtypes)[0]
    inputs = probe_inputs(group, dtypes)
    right, found = (_run_ours(tail, group, True, inputs) for tail in (Tail(16, 1), wrong))
    assert all(tensor.isfinite().all() for tensor in right)
    moments = zip(right[1:], found[1:], strict=True)
    assert all(int((mine != other).sum()) >= 8 for mine, other in moments)


# Negative controls: the rounding of the tail and of narrow state is seen.


def state_after_steps(dtypes, tail, wide=False):
    """Some hundred elements after a few steps, each gradient unscaled by 0.37."""
    generator = torch.Generator().manual_seed(2)
    master_dtype, moment_dtype = WIDE if wide else dtypes
    master = torch.randn(511, generator=generator).to(dtypes[0])
    state = [master.to(master_dtype), *torch.zeros(2, 511, dtype=moment_dtype)]
    tensors = AdamTensors(*state, torch.zeros(511), torch.zeros(511, dtype=dtypes[0]))
    for step in range(1, 6):
        tensors.grad.copy_(torch.randn(511, generator=generator).to(dtypes[0]))
        step_ours(HostAdam(tail.mode), tensors, scalars_at(step, scale=0.37), tail)
    return torch.cat([tensor.float() for tensor in tensors.state])


def test_another_tail_gives_other_bits():
    tail = tail_of()
    other = Tail(16, 2 if tail.mode != 2 else 0)
    assert not torch.equal(state_after_steps(WIDE, tail), state_after_steps(WIDE, other))


@narrow_states
def test_state_kept_wider_than_stocks_is_seen(dtypes):
    tail = tail_of(dtypes)
    assert not torch.equal(
        state_after_steps(dtypes, tail), state_after_steps(dtypes, tail, wide=True)
    )
