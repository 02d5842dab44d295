"""A sample of an update, repeated: no alarm without a fault, one for every kind of fault."""

import re

import pytest
import torch

from deep_optimizer_states.core.device.emulated import EmulatedDevice
from deep_optimizer_states.core.executor import Work
from deep_optimizer_states.core.kernels.adam import AdamTensors, BetaPowers, adam_scalars
from deep_optimizer_states.core.kernels.host import HostAdam, Tail
from deep_optimizer_states.core.verify import PART_NUMEL, Sample, check_device_adam, is_due
from deep_optimizer_states.errors import KernelError, UpdateError

ADAM = HostAdam(1)
GROUP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SCALARS = adam_scalars(
    {**GROUP, "bias_correction": True}, BetaPowers(GROUP["betas"]).at(1, GROUP["betas"]), 0.5, True
)
NUMELS = [1, 700, 2 * PART_NUMEL, 2 * PART_NUMEL + 1, 10 * PART_NUMEL + 7]


def make_work(numel):
    generator = torch.Generator().manual_seed(numel)
    master, exp_avg, exp_avg_sq, grad = (torch.randn(numel, generator=generator) for _ in "1234")
    weights = torch.zeros(numel, dtype=torch.bfloat16)
    tensors = AdamTensors(master, exp_avg, exp_avg_sq.abs(), grad.bfloat16(), weights)
    return Work(f"tile of {numel}", tensors, SCALARS, numel - numel % 16)


def update(work):
    for tile in work:
        ADAM.step(tile.tensors, tile.scalars, tile.tail_start, 1)


@pytest.fixture
def work():
    return [make_work(numel) for numel in NUMELS]


def test_a_right_update_passes(work):
    sample = Sample(work)
    update(work)
    sample.compare(ADAM, 1)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -0.0])
def test_gradients_that_are_not_finite_raise_no_alarm(work, bad):
    for tile in work:
        tile.tensors.grad.fill_(bad)
    sample = Sample(work)
    update(work)
    sample.compare(ADAM, 1)


@pytest.mark.parametrize("name", ["master", "exp_avg", "exp_avg_sq", "weights"])
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("end", [0, -1])
def test_one_wrong_number_at_either_end_is_found(work, name, numel, end):
    sample = Sample(work)
    update(work)
    tile = work[NUMELS.index(numel)]
    getattr(tile.tensors, name)[end] *= 1.01
    element = end % numel
    said = (
        f"update 7 since the start, tile of {numel}, went wrong: {name} of its element {element} is"
    )
    with pytest.raises(UpdateError, match=said):
        sample.compare(ADAM, 7)


def test_state_that_was_not_updated_is_found(work):
    sample = Sample(work)
    update(work[:-1])
    with pytest.raises(UpdateError, match=r"until this is understood, .* \"all-host\""):
        sample.compare(ADAM, 1)


def test_a_gradient_that_came_too_late_is_found(work):
    late = work[-1].tensors.grad
    arrived = late.clone()
    late.zero_()
    sample = Sample(work)
    update(work)
    late.copy_(arrived)
    with pytest.raises(UpdateError, match=f"{work[-1].name}, went wrong: master"):
        sample.compare(ADAM, 1)


def test_a_tail_within_a_part_is_a_tail_there(work):
    tile = work[-1]
    early = Work(tile.name, tile.tensors, SCALARS, tile.tensors.numel - PART_NUMEL // 2)
    sample = Sample([early])
    update([early])
    sample.compare(ADAM, 1)
    sample = Sample([early])
    update([tile])
    with pytest.raises(UpdateError, match=r"element (19[4-9]|20\d)\d\d is"):
        sample.compare(ADAM, 1)


@pytest.mark.parametrize(("every", "due"), [(0, []), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 2, 3, 6])])
def test_the_first_two_and_one_in_so_many_are_due(every, due):
    assert [number for number in range(1, 8) if is_due(number, every)] == due


TAIL = Tail(16, 1)
HOST = HostAdam(TAIL.mode)
BF16 = (torch.bfloat16, torch.bfloat16)
FP16 = (torch.float16, torch.float16)


@pytest.fixture
def device():
    device = EmulatedDevice(HOST)
    yield device
    device.close()


def check(device, decoupled=True, dtypes=BF16):
    check_device_adam(device, HOST, TAIL, decoupled, dtypes)


@pytest.mark.parametrize("dtypes", [BF16, (torch.float32,) * 2, FP16])
@pytest.mark.parametrize("decoupled", [True, False])
def test_equal_bits_pass(device, decoupled, dtypes):
    check(device, decoupled, dtypes)


@pytest.mark.parametrize(
    "state",
    [(torch.bfloat16,) * 2, (torch.bfloat16, torch.float32), FP16, (torch.float16, torch.float32)],
    ids=str,
)
def test_equal_bits_pass_with_state_of_16_bits(device, state):
    check_device_adam(device, HOST, TAIL, True, (torch.float32, state[0]), state)


def test_a_device_that_cuts_moments_off_is_refused(device):
    """Negative control: rounded towards zero, in place of to the nearest."""

    def step(tensors, scalars, tail):
        moments = [tensors.exp_avg, tensors.exp_avg_sq]
        wide = [moment.float() for moment in moments]
        tensors_ = AdamTensors(tensors.master, *wide, tensors.grad, tensors.weights)
        HOST.step(tensors_, scalars, tail, num_threads=1)
        for moment, value in zip(moments, wide, strict=True):
            moment.copy_((value.view(torch.int32) >> 16 << 16).view(torch.float32))

    device.adam = step
    with pytest.raises(KernelError, match="has not the bits of Adam on the host"):
        check_device_adam(device, HOST, TAIL, True, BF16, BF16)


def test_another_default_type_and_device_change_nothing(device):
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    try:
        check(device)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def unfused(adam):
    return lambda tensors, scalars, tail: HostAdam(2).step(tensors, scalars, 0, 1)


def without_tail(adam):
    return lambda tensors, scalars, tail: adam(tensors, scalars, tensors.numel)


def tail_too_early(adam):
    return lambda tensors, scalars, tail: adam(tensors, scalars, max(tail - 8, 0))


def without_subnormals(adam):
    def step(tensors, scalars, tail):
        adam(tensors, scalars, tail)
        for state in tensors.state:
            state[state.abs() < torch.finfo(torch.float32).tiny] = 0.0

    return step


def without_signs_of_zero(adam):
    def step(tensors, scalars, tail):
        adam(tensors, scalars, tail)
        tensors.weights[tensors.weights == 0] = 0.0

    return step


def weights_cut_off(adam):
    def step(tensors, scalars, tail):
        adam(tensors, scalars, tail)
        bits = tensors.master.view(torch.int32) & ~0xFFFF
        tensors.weights.copy_(bits.view(torch.float32))

    return step


def without_decay_wrong(adam):
    def step(tensors, scalars, tail):
        adam(tensors, scalars, tail if scalars.decay else 0)

    return step


def last_element_forgotten(adam):
    def step(tensors, scalars, tail):
        numel = tensors.numel - 1
        adam(tensors.narrow(0, numel), scalars, min(tail, numel))

    return step


@pytest.mark.parametrize(
    ("fault", "where", "dtypes"),
    [
        (unfused, "master", BF16),
        (without_tail, "(master|exp_avg)", BF16),
        (tail_too_early, "(master|exp_avg)", BF16),
        (without_subnormals, "master", BF16),
        (without_signs_of_zero, "weights", FP16),
        (weights_cut_off, "weights", BF16),
        (last_element_forgotten, "master", BF16),
        (without_decay_wrong, "(master|exp_avg)", BF16),
    ],
)
def test_other_bits_are_refused_with_the_number_and_the_way_out(device, fault, where, dtypes):
    device.adam = fault(device.adam)
    said = rf"of 65551 numbers of {where}\w* \d+ differ, first .* instead of .*all-host"
    with pytest.raises(KernelError, match=said):
        check(device, dtypes=dtypes)


def test_a_host_that_flushes_subnormal_numbers_is_named_as_the_cause(device):
    """The device's thread, which is older, flushes none, as a GPU flushes none."""
    assert torch.set_flush_denormal(True)
    try:
        with pytest.raises(KernelError, match=r"call torch.set_flush_denormal\(False\) before"):
            check(device)
    finally:
        torch.set_flush_denormal(False)
    check(device)


def test_a_device_that_cannot_step_is_refused_with_its_reason(device):
    def fail(*args):
        raise ImportError("No module named 'triton'")

    device.adam = fail
    with pytest.raises(KernelError, match=re.escape("No module named 'triton'")) as raised:
        check(device)
    assert "all-host" in str(raised.value)
