"""Memory that compression keeps: the formula, and what the objects hold."""

import pytest
import torch
from hypothesis import given, settings as hypothesis_settings, strategies as st
from torch import distributed as dist

from optimus_cc import Settings, Traffic
from optimus_cc.backpropagation import BackwardCompressor
from optimus_cc.memory import held_bytes, low_rank_bytes, state_bytes
from optimus_cc.selective import PowerSgd

SIZES = st.integers(1, 40)


@pytest.fixture(scope="module")
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@given(st.tuples(SIZES, SIZES, SIZES), st.integers(1, 50), st.booleans(), st.booleans())
@hypothesis_settings(deadline=None, max_examples=60)
def test_of_messages_it_is_what_the_compressor_holds(shape, rank, feedback, is_bf16):
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    settings = Settings(
        inter_grad_comp=True, inter_grad_comp_rank=rank, use_error_feedback=feedback
    )
    compressor = BackwardCompressor(settings)
    for stream in range(2):
        compressor.compress(torch.randn(shape).to(dtype), True, stream)
    held = held_bytes(compressor.state_dict())
    assert held == state_bytes(settings, 1, [torch.Size(shape)] * 2, [])
    assert state_bytes(settings, 0, [torch.Size(shape)] * 2, []) == 0


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("rank", [1, 3, 7, 64])
def test_of_gradients_it_is_what_power_sgd_holds(alone, rank, feedback):
    settings = Settings(
        grad_comp=True, grad_comp_rank=rank, use_error_feedback=feedback,
        selective_grad_comp=True, selective_grad_comp_way=1,
    )  # fmt: skip
    shapes = [(24, 16)] * 3 + [(8, 64), (2, 5), (40,), (3, 4, 5)]
    power_sgd = PowerSgd(settings, alone, Traffic())
    gradients = [torch.randn(shape) for shape in shapes]
    power_sgd.average([g for g in gradients if power_sgd.takes(g)])
    sizes = [torch.Size(shape) for shape in shapes]
    assert held_bytes(power_sgd.state_dict()) == state_bytes(settings, 0, [], sizes)
    assert state_bytes(settings, 1, [], sizes) == 0


def test_an_error_takes_as_much_as_the_message_in_fp32():
    """The published 2.5B model's message at rank 16: 60 MiB more, beside 120 KiB."""
    shape = torch.Size((1024, 8, 1920))
    without, with_errors = (low_rank_bytes(shape, 16, feedback) for feedback in (False, True))
    assert without == 4 * 1920 * 16
    assert with_errors - without == 4 * 1024 * 8 * 1920
