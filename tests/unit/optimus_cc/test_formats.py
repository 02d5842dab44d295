"""Messages in every format: what arrives, what is left out, and how large it is."""

import math

import pytest
import torch
from hypothesis import given, settings as hypothesis_settings, strategies as st

from optimus_cc import Kind, Settings, Traffic
from optimus_cc.backpropagation import BackwardCompressor
from optimus_cc.error_feedback import ErrorFeedback
from optimus_cc.settings import INTER_GRAD_COMP_METHODS

SHAPE = torch.Size((6, 2, 40))
FEW_BITS = INTER_GRAD_COMP_METHODS[1:]
METHOD = pytest.mark.parametrize("method", INTER_GRAD_COMP_METHODS)
BITS = pytest.mark.parametrize("method", FEW_BITS)
DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def settings(method, **others):
    return Settings(
        inter_grad_comp=True, inter_grad_comp_method=method, inter_grad_comp_rank=2, **others
    )


def lep(method):
    return settings(method, use_error_feedback=True)


def gradient(seed, dtype=torch.float32, shape=SHAPE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def send(sender, message, late=True, receiver=None):
    """What arrives at another rank, over a wire of bytes."""
    receiver = receiver or sender
    packed = sender.compress(message, late)
    buffer = torch.empty(
        receiver.received_shape(message.shape, late, message.dtype), dtype=message.dtype
    )
    assert packed.dtype == buffer.dtype
    buffer.view(torch.uint8).copy_(packed.view(torch.uint8))
    return receiver.restore(buffer, message.shape, late)


@METHOD
@given(
    st.lists(st.integers(0, 2**30), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.floats(-3, 3),
)
@hypothesis_settings(deadline=None, max_examples=40)
def test_sent_and_error_add_up_to_what_was_given(method, seeds, dtype, exponent):
    sender, receiver = (BackwardCompressor(lep(method)) for _ in range(2))
    scale = 10.0**exponent
    messages = [(gradient(seed) * scale).to(dtype) for seed in seeds]
    sent = torch.zeros(SHAPE, dtype=torch.float64)
    for message in messages:
        packed = sender.compress(message, in_epilogue=True)
        # In fp32, before the last rounding to the message's type.
        sent += receiver._format.unpack(packed, SHAPE).double()
    given_sum = sum(message.double() for message in messages)
    lost = given_sum - sent - sender.error(SHAPE).double()
    assert lost.abs().max() <= 1e-5 * scale * len(seeds)


@METHOD
def test_the_invariant_fails_when_the_error_is_not_carried(method, monkeypatch):
    monkeypatch.setattr(ErrorFeedback, "add", lambda self, key, message: message.float())
    sender = BackwardCompressor(lep(method))
    messages = [gradient(seed) for seed in range(3)]
    sent = sum(send(sender, message) for message in messages)
    assert (sum(messages) - sent - sender.error(SHAPE)).abs().max() > 1e-3


@BITS
def test_error_feedback_brings_the_mean_of_many_messages_closer(method):
    """The same message over and over: errors that are carried cancel, others add up."""
    off = {}
    for name, made in (("lep", lep(method)), ("plain", settings(method))):
        sender, message = BackwardCompressor(made), gradient(0)
        off[name] = sum(send(sender, message) - message for _ in range(20)).norm()
    assert off["lep"] < off["plain"] / 5


@DTYPE
@pytest.mark.parametrize(
    ("method", "expected_bytes", "off"), [("hadamard-4bit", 8 * 34, 0.15), ("fp8", 8 * 66, 0.03)]
)
def test_counted_bytes_include_the_scales(method, expected_bytes, off, dtype):
    traffic = Traffic()
    sender, message = BackwardCompressor(settings(method), traffic), gradient(0, dtype)
    arrived = send(sender, message)
    assert arrived.dtype == dtype
    assert arrived.shape == SHAPE
    assert 0 < (arrived.float() - message.float()).norm() < off * message.float().norm()
    sent = traffic.sent[Kind.BACKWARD]
    assert (sent.messages, sent.compressed, sent.sent_bytes) == (1, 1, expected_bytes)


@BITS
@DTYPE
def test_every_pattern_of_bits_survives_as_numbers_of_the_messages_type(method, dtype):
    """A receive buffer is of that type, and bytes that spell NaN must arrive as they are."""
    sender, message = BackwardCompressor(settings(method)), gradient(3, dtype, (40, 2, 64))
    packed = sender.compress(message, in_epilogue=True)
    through = torch.empty_like(packed).copy_(packed)
    assert packed.isnan().any() == (method == "hadamard-4bit")
    assert torch.equal(through.view(torch.uint8), packed.view(torch.uint8))
    expected = sender._format._blocks.pack(message.float()).flatten()
    assert torch.equal(packed.view(torch.uint8)[: expected.numel()], expected)


@METHOD
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_arrives_as_such_and_leaves_no_trace(method, bad):
    sender, receiver = BackwardCompressor(lep(method)), BackwardCompressor(lep(method))
    send(sender, gradient(0), receiver=receiver)
    spoilt = gradient(1)
    spoilt[0, 0, 0] = bad
    assert not send(sender, spoilt, receiver=receiver)[0, 0, 0].isfinite()
    assert sender.error(SHAPE).isfinite().all()
    assert send(sender, gradient(2), receiver=receiver).isfinite().all()


@METHOD
def test_ranks_that_send_copies_send_the_same_bytes(method):
    first, second = (BackwardCompressor(lep(method)) for _ in range(2))
    other = BackwardCompressor(lep(method), seed=1)
    for seed in range(3):
        packed = first.compress(gradient(seed), True).view(torch.uint8)
        assert torch.equal(packed, second.compress(gradient(seed), True).view(torch.uint8))
        same = torch.equal(packed, other.compress(gradient(seed), True).view(torch.uint8))
        assert same == (method == "fp8")


@METHOD
def test_a_saved_state_goes_on_bit_for_bit(method):
    sender, fresh = BackwardCompressor(lep(method)), BackwardCompressor(lep(method))
    for seed in range(3):
        send(sender, gradient(seed))
    saved = BackwardCompressor(lep(method))
    saved.load_state_dict(sender.state_dict())
    on = send(sender, gradient(7))
    assert torch.equal(on, send(saved, gradient(7)))
    assert not torch.equal(on, send(fresh, gradient(7)))


@BITS
def test_epilogue_only_leaves_the_others_alone(method):
    compressor = BackwardCompressor(settings(method, inter_grad_comp_epilogue_only=True))
    message = gradient(0)
    assert compressor.compress(message, in_epilogue=False) is message
    assert torch.equal(send(compressor, message, late=False), message)
    assert not torch.equal(send(compressor, message, late=True), message)


@BITS
@DTYPE
def test_a_message_that_would_not_be_smaller_is_sent_whole(method, dtype):
    compressor = BackwardCompressor(settings(method))
    small, larger = (gradient(0, dtype, (1, 1, numel)) for numel in (8, 64))
    assert compressor.compress(small, in_epilogue=True) is small
    assert torch.equal(send(compressor, small), small)
    assert compressor.compress(larger, in_epilogue=True).numel() < 64


@METHOD
def test_fp16_is_refused_by_name(method):
    with pytest.raises(TypeError, match=r"dtype = torch.float16: .* float32 and bfloat16"):
        BackwardCompressor(settings(method)).compress(gradient(0, torch.float16), True)
