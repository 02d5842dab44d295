"""Numbers of four and eight bits: against NumPy, and where they are exact."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings as hypothesis_settings, strategies as st

from optimus_cc.formats import Float8Blocks, HadamardBlocks, rotation

METHODS = {"hadamard-4bit": HadamardBlocks, "fp8": Float8Blocks}
METHOD = pytest.mark.parametrize("method", METHODS)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def round_trip(method, numbers):
    blocks = METHODS[method]()
    return blocks.unpack(blocks.pack(numbers, torch.uint8), numbers.shape)


def hadamard(size):
    """H[i, j] is -1 to the number of ones that i and j have in common."""
    index = np.arange(size)
    return (-1.0) ** np.array([[bin(i & j).count("1") for j in index] for i in index])


def test_the_rotation_is_signs_times_hadamard_and_its_transpose_is_its_inverse():
    made = rotation(3).numpy()
    np.testing.assert_array_equal(made @ made.T, np.eye(64, dtype=np.float32))
    signs = made[:, 0] * 8
    assert set(signs) == {-1.0, 1.0}
    np.testing.assert_array_equal(made, signs[:, None] * hadamard(64) / 8)
    assert not np.array_equal(made, rotation(4).numpy())


def test_four_bits_are_numpys():
    """Codes by round half to even, two a byte, the first in the low half; then the scale.

    Codes are of the scale that is sent: of the one before its rounding a few would differ.
    """
    numbers = random(50, 64)
    rotated = numbers.numpy() @ rotation(0).numpy()
    scales = torch.from_numpy(np.abs(rotated).max(1, keepdims=True) / np.float32(7)).bfloat16()
    codes = np.clip(np.rint(rotated / scales.float().numpy()), -7, 7)
    assert set(np.unique(codes)) == set(range(-7, 8))
    packed = HadamardBlocks().pack(numbers, torch.uint8).view(50, 34)
    stored = (codes + 8).astype(np.uint8)
    np.testing.assert_array_equal(packed[:, :32].numpy(), stored[:, 0::2] + 16 * stored[:, 1::2])
    assert torch.equal(packed[:, 32:].contiguous().view(torch.bfloat16), scales)
    exact = (codes * scales.float().numpy()).astype(np.float64) @ rotation(0).numpy().T
    np.testing.assert_allclose(round_trip("hadamard-4bit", numbers).numpy(), exact, atol=1e-6)


@pytest.mark.parametrize("power", [-100, -3, 0, 40])
def test_whole_numbers_to_seven_are_exact_once_rotated(power):
    codes = torch.randint(-7, 8, (9, 64), generator=torch.Generator().manual_seed(1)).float()
    codes[:, 0] = 7.0
    numbers = (codes @ rotation(0).T) * 2.0**power
    assert torch.equal(round_trip("hadamard-4bit", numbers), numbers)
    beside = numbers + 0.3 * 2.0**power
    assert not torch.equal(round_trip("hadamard-4bit", beside), beside)


def test_numbers_of_eight_bits_are_exact_and_those_between_are_not():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = every[every.isfinite()].repeat(64) * 2.0**-30
    # Every block has the largest, so that its scale is a power of two.
    numbers = numbers[: numbers.numel() // 63 * 63].view(-1, 63)
    top = torch.full((len(numbers), 1), 448.0 * 2.0**-30)
    numbers = torch.cat([numbers, top], 1)
    assert torch.equal(round_trip("fp8", numbers), numbers)
    beside = numbers.clone()
    beside[:, 0] = 0.3 * 2.0**-30
    assert not torch.equal(round_trip("fp8", beside), beside)


def test_a_rotation_helps_where_one_number_is_large():
    """Without it the other 63 would round to zero."""
    numbers = random(200, 64)
    numbers[:, 5] *= 30
    error = (round_trip("hadamard-4bit", numbers) - numbers)[:, 6:].norm()
    scales = numbers.abs().amax(1, keepdim=True) / 7
    plain = ((numbers / scales).round() * scales - numbers)[:, 6:].norm()
    assert error < 0.6 * plain


@METHOD
@given(st.integers(0, 2**30), st.integers(1, 200), st.floats(-30, 30))
@hypothesis_settings(deadline=None, max_examples=60)
def test_no_number_is_off_by_more_than_its_format_rounds(method, seed, numel, exponent):
    numbers = random(numel, seed=seed) * 10.0**exponent
    off = (round_trip(method, numbers) - numbers).double().abs()
    largest = numbers.abs().max()
    if method == "fp8":
        # Half of the last of three bits, and less than a 2 ** 18th of the largest for small ones.
        bound = numbers.abs() / 16 * 1.01 + largest * 2**-17
        assert (off <= bound).all()
    else:
        # An orthogonal rotation keeps distances: half a code for each of a block's 64.
        assert off.norm() <= 8 * largest * 8 / 14 * math.sqrt(-(-numel // 64)) * 1.01


@METHOD
def test_zeros_and_the_smallest_numbers_stay_finite(method):
    assert not round_trip(method, torch.zeros(3, 64)).any()
    tiny = torch.full((64,), 1e-44)
    assert (round_trip(method, tiny) - tiny).abs().max() <= 1e-44


@METHOD
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_block_so_and_no_other(method, bad):
    numbers = random(3, 64)
    numbers[1, 7] = bad
    arrived = round_trip(method, numbers)
    assert arrived[1].isnan().all()
    assert arrived[[0, 2]].isfinite().all()


def test_what_overflows_in_the_rotation_does_not_arrive_as_a_number():
    row = torch.full((64,), 3e38) * rotation(0)[:, 0].sign()
    assert not round_trip("hadamard-4bit", row).isfinite().any()


@METHOD
@pytest.mark.parametrize("numel", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sizes_are_known_from_the_number_of_elements(method, numel, dtype):
    made = METHODS[method]()
    packed = made.pack(random(numel), dtype)
    nbytes = math.ceil(numel / 64) * (64 * made.bits // 8 + 2)
    assert packed.numel() == made.packed_numel((numel,), dtype)
    assert nbytes <= packed.nbytes < nbytes + dtype.itemsize
