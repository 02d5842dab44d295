"""A device whose Adam has other bits than the host's is found out before it trains."""

import re

import pytest
import torch

from deep_optimizer_states.core.device.emulated import EmulatedDevice
from deep_optimizer_states.core.kernels.adam import AdamTensors
from deep_optimizer_states.core.kernels.host import HostAdam, Tail
from deep_optimizer_states.core.verify import check_device_adam
from deep_optimizer_states.errors import KernelError

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
