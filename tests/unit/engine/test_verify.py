"""A sample of an update, repeated: no alarm without a fault, one for every kind of fault."""

import pytest
import torch
from engine_updates import ADAM, TAIL, first_scalars

from deep_optimizer_states.core.kernels.adam import AdamTensors
from deep_optimizer_states.core.kernels.host import HostAdam
from deep_optimizer_states.core.update import TileArgs
from deep_optimizer_states.core.verify import PART_NUMEL, Sample, check_device_adam, is_due
from deep_optimizer_states.errors import KernelError, UpdateError

SCALARS = first_scalars()
NUMELS = [1, 700, 2 * PART_NUMEL, 2 * PART_NUMEL + 1, 10 * PART_NUMEL + 7]
F32, FP16 = (torch.float32,) * 2, (torch.float16,) * 2
BF16 = (torch.bfloat16,) * 2


def make_work(numel):
    generator = torch.Generator().manual_seed(numel)
    master, exp_avg, exp_avg_sq, grad = (torch.randn(numel, generator=generator) for _ in "1234")
    weights = torch.zeros(numel, dtype=torch.bfloat16)
    tensors = AdamTensors(master, exp_avg, exp_avg_sq.abs(), grad.bfloat16(), weights)
    return TileArgs(f"tile of {numel}", tensors, SCALARS, numel - numel % 16)


def update(work):
    for tile in work:
        ADAM.step(tile.tensors, tile.scalars, tile.tail_start, 1)


@pytest.fixture
def work():
    return [make_work(numel) for numel in NUMELS]


@pytest.mark.parametrize("bad", [None, torch.nan, torch.inf, -0.0])
def test_a_right_update_raises_no_alarm_whatever_its_gradients(work, bad):
    for tile in work if bad is not None else ():
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
    where = f"tile of {numel}, went wrong: {name} of its element {end % numel} is"
    with pytest.raises(UpdateError, match=f"update 7 since the start, {where}"):
        sample.compare(ADAM, 7)


def test_a_gradient_that_came_too_late_is_found(work):
    late = work[-1].tensors.grad
    arrived = late.clone()
    late.zero_()
    sample = Sample(work)
    update(work)
    late.copy_(arrived)
    words = rf"{work[-1].name}, went wrong: master.* until this is understood, .* \"all-host\""
    with pytest.raises(UpdateError, match=words):
        sample.compare(ADAM, 1)


def test_a_tail_within_a_part_is_a_tail_there(work):
    tile = work[-1]
    early = TileArgs(tile.name, tile.tensors, SCALARS, tile.tensors.numel - PART_NUMEL // 2)
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


# The check of a device before training.


def check(device, decoupled=True, dtypes=BF16, state=F32):
    check_device_adam(device, ADAM, TAIL, decoupled, dtypes, state)


@pytest.mark.parametrize(
    ("decoupled", "dtypes", "state"),
    [
        *((decoupled, dtypes, F32) for decoupled in (True, False) for dtypes in (BF16, F32, FP16)),
        (True, (torch.float32, torch.bfloat16), BF16),
        (True, (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)),
        (True, (torch.float32, torch.float16), FP16),
        (True, (torch.float32, torch.float16), (torch.float16, torch.float32)),
    ],
    ids=str,
)
def test_equal_bits_pass(device, decoupled, dtypes, state):
    check(device, decoupled, dtypes, state)


def test_another_default_type_and_device_change_nothing(device):
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    try:
        check(device)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def truncated(values):
    return (values.float().view(torch.int32) & ~0xFFFF).view(torch.float32)


def moments_cut_off(adam, tensors, scalars, tail):
    """Rounded towards zero, in place of to the nearest."""
    moments = [tensors.exp_avg, tensors.exp_avg_sq]
    wide = [moment.float() for moment in moments]
    wide_tensors = AdamTensors(tensors.master, *wide, tensors.grad, tensors.weights)
    ADAM.step(wide_tensors, scalars, tail, num_threads=1)
    for moment, value in zip(moments, wide, strict=True):
        moment.copy_(truncated(value))


def without_subnormals(adam, tensors, scalars, tail):
    adam(tensors, scalars, tail)
    for state in tensors.state:
        state[state.abs() < torch.finfo(torch.float32).tiny] = 0.0


def without_signs_of_zero(adam, tensors, scalars, tail):
    adam(tensors, scalars, tail)
    tensors.weights[tensors.weights == 0] = 0.0


def weights_cut_off(adam, tensors, scalars, tail):
    adam(tensors, scalars, tail)
    tensors.weights.copy_(truncated(tensors.master))


def last_element_forgotten(adam, tensors, scalars, tail):
    numel = tensors.numel - 1
    adam(tensors.narrow(0, numel), scalars, min(tail, numel))


MOVED = "(master|exp_avg)"
FAULTS = {
    "not fused": (lambda adam, t, s, tail: HostAdam(2).step(t, s, 0, 1), "master", BF16, F32),
    "no tail": (lambda adam, t, s, tail: adam(t, s, t.numel), MOVED, BF16, F32),
    "tail too early": (lambda adam, t, s, tail: adam(t, s, max(tail - 8, 0)), MOVED, BF16, F32),
    "wrong without decay": (
        lambda adam, t, s, tail: adam(t, s, tail if s.decay else 0),
        *(MOVED, BF16, F32),
    ),
    "no subnormals": (without_subnormals, "master", BF16, F32),
    "no signs of zero": (without_signs_of_zero, "weights", FP16, F32),
    "weights cut off": (weights_cut_off, "weights", BF16, F32),
    "last element forgotten": (last_element_forgotten, "master", BF16, F32),
    "moments cut off": (moments_cut_off, MOVED, BF16, BF16),
}
"""What the device does, the tensors in which it shows, and types of gradient, weights and state."""


@pytest.mark.parametrize(("wrong", "where", "dtypes", "state"), FAULTS.values(), ids=FAULTS)
def test_other_bits_are_refused_with_the_number_and_the_way_out(
    device, wrong, where, dtypes, state
):
    adam = device.adam
    device.adam = lambda tensors, scalars, tail: wrong(adam, tensors, scalars, tail)
    said = rf"of 65551 numbers of {where}\w* \d+ differ, first .* instead of .*all-host"
    with pytest.raises(KernelError, match=said):
        check(device, dtypes=dtypes, state=state)


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
    with pytest.raises(KernelError, match=r"No module named 'triton'.*all-host"):
        check(device)
