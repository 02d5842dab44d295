"""What a stage sends in place of activation gradients, in every format, without any process."""

import math

import pytest
import torch
from hypothesis import given, settings as hypothesis_settings, strategies as st

from optimus_cc import Kind, Settings, Traffic
from optimus_cc.backpropagation import BackwardCompressor, in_epilogue
from optimus_cc.low_rank import ErrorFeedback
from optimus_cc.settings import METHODS
from optimus_cc.sizes import num_epilogue_messages

SHAPE = torch.Size((6, 2, 40))
FORMATS = METHODS["inter_grad_comp_method"]
METHOD = pytest.mark.parametrize("method", FORMATS)
BITS = pytest.mark.parametrize("method", FORMATS[1:])
DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def compressor(method, traffic=None, seed=0, **settings):
    chosen = {"inter_grad_comp_method": method, "inter_grad_comp_rank": 2, **settings}
    return BackwardCompressor(Settings(inter_grad_comp=True, **chosen), traffic, seed)


def lep(method, **others):
    return compressor(method, use_error_feedback=True, **others)


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
    sender, receiver = lep(method), lep(method)
    scale = 10.0**exponent
    messages = [(gradient(seed) * scale).to(dtype) for seed in seeds]
    sent = torch.zeros(SHAPE, dtype=torch.float64)
    for message in messages:
        packed = sender.compress(message, in_epilogue=True)
        # In fp32, before the last rounding to the message's type.
        sent += receiver._format.unpack(packed, SHAPE).double()
    lost = sum(message.double() for message in messages) - sent - sender.error(SHAPE).double()
    assert lost.abs().max() <= 1e-5 * scale * len(seeds)


@METHOD
def test_the_invariant_fails_when_the_error_is_not_carried(method, monkeypatch):
    monkeypatch.setattr(ErrorFeedback, "add", lambda self, key, message: message.float())
    sender = lep(method)
    messages = [gradient(seed) for seed in range(3)]
    sent = sum(send(sender, message) for message in messages)
    assert (sum(messages) - sent - sender.error(SHAPE)).abs().max() > 1e-3


@BITS
def test_error_feedback_brings_the_mean_of_many_messages_closer(method):
    """The same message over and over: errors that are carried cancel, others add up."""
    message = gradient(0)
    carried, plain = (
        sum(send(sender, message) - message for _ in range(20)).norm()
        for sender in (lep(method), compressor(method))
    )
    assert carried < plain / 5


@DTYPE
@pytest.mark.parametrize(
    ("method", "elements", "off"),
    [("low-rank", 2 * (12 + 40), 1), ("hadamard-4bit", 8 * 34, 0.15), ("fp8", 8 * 66, 0.03)],
)
def test_what_is_counted_is_what_travels_in_the_messages_own_type(method, elements, off, dtype):
    """Elements of a pair; bytes of blocks, their scales included."""
    traffic = Traffic()
    sender, message = compressor(method, traffic), gradient(0, dtype)
    arrived = send(sender, message)
    assert (arrived.dtype, arrived.shape) == (dtype, SHAPE)
    assert 0 < (arrived.float() - message.float()).norm() < off * message.float().norm()
    sent = traffic.sent[Kind.BACKWARD]
    expected_bytes = elements * (dtype.itemsize if method == "low-rank" else 1)
    assert (sent.messages, sent.compressed, sent.sent_bytes) == (1, 1, expected_bytes)


@BITS
@DTYPE
def test_every_pattern_of_bits_survives_as_numbers_of_the_messages_type(method, dtype):
    """A receive buffer is of that type, and bytes that spell NaN must arrive as they are."""
    sender, message = compressor(method), gradient(3, dtype, (40, 2, 64))
    packed = sender.compress(message, in_epilogue=True)
    through = torch.empty_like(packed).copy_(packed)
    assert packed.isnan().any() == (method == "hadamard-4bit")
    assert torch.equal(through.view(torch.uint8), packed.view(torch.uint8))


@METHOD
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_arrives_as_such_and_leaves_no_trace(method, bad):
    sender, receiver = lep(method), lep(method)
    send(sender, gradient(0), receiver=receiver)
    spoilt = gradient(1)
    spoilt[0, 0, 0] = bad
    assert not send(sender, spoilt, receiver=receiver)[0, 0, 0].isfinite()
    assert sender.error(SHAPE).isfinite().all()
    assert send(sender, gradient(2), receiver=receiver).isfinite().all()


@METHOD
def test_ranks_that_send_copies_send_the_same_bytes(method):
    first, second, other = lep(method), lep(method), lep(method, seed=1)
    for seed in range(3):
        packed, again, others = (
            sender.compress(gradient(seed), True).view(torch.uint8)
            for sender in (first, second, other)
        )
        assert torch.equal(packed, again)
        assert torch.equal(packed, others) == (method == "fp8")


@METHOD
def test_a_saved_state_goes_on_bit_for_bit(method):
    sender, saved, fresh = lep(method), lep(method), lep(method)
    for seed in range(3):
        send(sender, gradient(seed))
    saved.load_state_dict(sender.state_dict())
    on = send(sender, gradient(7))
    assert torch.equal(on, send(saved, gradient(7)))
    assert not torch.equal(on, send(fresh, gradient(7)))


@METHOD
def test_epilogue_only_leaves_the_others_alone(method):
    sender, message = compressor(method, inter_grad_comp_epilogue_only=True), gradient(0)
    assert sender.compress(message, in_epilogue=False) is message
    assert torch.equal(send(sender, message, late=False), message)
    assert not torch.equal(send(sender, message, late=True), message)


@METHOD
@DTYPE
def test_a_message_that_would_not_be_smaller_is_sent_whole(method, dtype):
    """Eight numbers; at full rank, a matrix of eight by eight."""
    sender = compressor(method, inter_grad_comp_rank=8)
    shape = (1, 8, 8) if method == "low-rank" else (1, 1, 8)
    small = gradient(0, dtype, shape)
    assert sender.compress(small, in_epilogue=True) is small
    assert torch.equal(send(sender, small), small)
    assert sender.compress(gradient(0, dtype, (40, 2, 64)), in_epilogue=True).numel() < 40 * 2 * 64


@METHOD
def test_fp16_is_refused_by_name(method):
    with pytest.raises(TypeError, match=r"dtype = torch.float16: .* float32 and bfloat16"):
        compressor(method).compress(gradient(0, torch.float16), True)


def test_errors_are_kept_by_stream_and_shape_and_only_if_so_set():
    plain, alone, together = compressor("low-rank"), lep("low-rank"), lep("low-rank")
    send(plain, gradient(0))
    assert plain.error(SHAPE) is None
    for sender in (alone, together):
        sender.compress(gradient(0), True, stream=0)
    together.compress(gradient(1), True, stream=1)
    send(together, gradient(1, shape=(6, 1, 40)))  # a smaller last batch
    assert torch.equal(
        alone.compress(gradient(2), True, stream=0), together.compress(gradient(2), True, stream=0)
    )


@pytest.mark.parametrize("num_stages", [2, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 4, 13])
def test_the_epilogue_is_the_last_micro_batches_of_a_link(num_stages, count):
    for receiver in range(num_stages - 1):
        place = {"receiver": receiver, "num_stages": num_stages, "num_micro_batches": count}
        late = [micro_batch for micro_batch in range(count) if in_epilogue(micro_batch, **place)]
        expected = min(num_stages - receiver - 1, count)
        assert late == list(range(count))[count - expected :]
        assert num_epilogue_messages(**place) == expected
