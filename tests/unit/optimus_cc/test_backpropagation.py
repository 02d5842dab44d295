"""What a stage sends in place of activation gradients, without any process."""

import pytest
import torch
from hypothesis import given, settings as hypothesis_settings, strategies as st

from optimus_cc import Kind, Settings, Traffic
from optimus_cc.backpropagation import BackwardCompressor, in_epilogue, num_epilogue_messages
from optimus_cc.error_feedback import ErrorFeedback

CB = Settings(inter_grad_comp=True, inter_grad_comp_rank=2, use_error_feedback=True)


def gradient(seed, shape=(4, 3, 8), dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def send(compressor, message, late=True):
    packed = compressor.compress(message, late)
    shape = message.shape
    assert packed.shape == compressor.received_shape(shape, late, message.dtype)
    return compressor.restore(packed, shape, late)


@given(
    st.lists(st.integers(0, 2**30), min_size=1, max_size=6),
    st.integers(1, 4),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.floats(-3, 3),
)
@hypothesis_settings(deadline=None, max_examples=60)
def test_sent_and_error_add_up_to_what_was_given(seeds, rank, dtype, exponent):
    settings = Settings(inter_grad_comp=True, inter_grad_comp_rank=rank, use_error_feedback=True)
    sender, receiver = BackwardCompressor(settings), BackwardCompressor(settings)
    scale = 10.0**exponent
    messages = [(gradient(seed, (6, 2, 30)) * scale).to(dtype) for seed in seeds]
    given_sum = torch.zeros(6, 2, 30, dtype=torch.float64)
    sent_sum = given_sum.clone()
    for message in messages:
        before = sender.error(message.shape)
        packed = sender.compress(message, in_epilogue=True)
        sent = receiver._format.unpack(packed, message.shape)  # in fp32, before its last rounding
        error = sender.error(message.shape)
        carried = message.double() + (before.double() if before is not None else 0.0)
        # One subtraction in fp32 is rounded; all else is exact.
        bound = 1e-6 * scale * len(seeds) * 10
        assert (sent.double() + error.double() - carried).abs().max() <= bound
        given_sum += message.double()
        sent_sum += sent.double()
    total = sent_sum + sender.error(messages[0].shape).double()
    assert (total - given_sum).abs().max() <= 1e-5 * scale * len(seeds)


def test_the_invariant_fails_when_the_error_is_not_carried(monkeypatch):
    monkeypatch.setattr(ErrorFeedback, "add", lambda self, key, message: message.float())
    sender = BackwardCompressor(CB)
    messages = [gradient(seed) for seed in range(3)]
    sent = sum(send(sender, message) for message in messages)
    lost = sum(messages) - sent - sender.error(messages[0].shape)
    assert lost.abs().max() > 0.1


def test_without_error_feedback_nothing_is_kept():
    sender = BackwardCompressor(Settings(inter_grad_comp=True, inter_grad_comp_rank=2))
    send(sender, gradient(0))
    assert sender.error(gradient(0).shape) is None


def test_an_overflow_leaves_no_trace_in_the_error():
    sender = BackwardCompressor(CB)
    send(sender, gradient(0))
    spoilt = gradient(1)
    spoilt[0, 0, 0] = float("inf")
    assert not send(sender, spoilt).isfinite().all()
    assert send(sender, gradient(2)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pair_travels_in_the_messages_own_type(dtype):
    traffic = Traffic()
    message = gradient(0, dtype=dtype)
    packed = BackwardCompressor(CB, traffic).compress(message, in_epilogue=True)
    assert packed.dtype == dtype
    assert packed.shape == (2 * (12 + 8),)
    sent = traffic.sent[Kind.BACKWARD]
    assert (sent.messages, sent.compressed, sent.sent_bytes) == (1, 1, packed.nbytes)


def test_full_rank_is_sent_whole_and_bit_for_bit():
    compressor = BackwardCompressor(Settings(inter_grad_comp=True, inter_grad_comp_rank=8))
    message = gradient(0)
    assert compressor.compress(message, in_epilogue=True) is message
    assert torch.equal(send(compressor, message), message)


def test_a_pair_of_the_messages_true_rank_is_exact_to_rounding():
    message = (gradient(0, (12, 2)) @ gradient(1, (2, 8))).view(4, 3, 8)
    exact = send(
        BackwardCompressor(Settings(inter_grad_comp=True, inter_grad_comp_rank=2)), message
    )
    torch.testing.assert_close(exact, message, atol=1e-6, rtol=1e-6)
    below = send(
        BackwardCompressor(Settings(inter_grad_comp=True, inter_grad_comp_rank=1)), message
    )
    assert (below - message).abs().max() > 0.1


def test_epilogue_only_leaves_the_others_alone():
    settings = Settings(
        inter_grad_comp=True, inter_grad_comp_rank=2, inter_grad_comp_epilogue_only=True
    )
    compressor, message = BackwardCompressor(settings), gradient(0)
    assert torch.equal(send(compressor, message, late=False), message)
    assert not torch.equal(send(compressor, message, late=True), message)


def test_a_smaller_last_batch_has_errors_of_its_own():
    sender = BackwardCompressor(CB)
    send(sender, gradient(0))
    send(sender, gradient(1, (4, 2, 8)))
    assert sender.error(torch.Size((4, 3, 8))) is not None
    assert sender.error(torch.Size((4, 2, 8))) is not None


def test_two_streams_do_not_share_errors():
    alone, together = BackwardCompressor(CB), BackwardCompressor(CB)
    alone.compress(gradient(0), True, stream=0)
    together.compress(gradient(0), True, stream=0)
    together.compress(gradient(1), True, stream=1)
    assert torch.equal(
        alone.compress(gradient(2), True, stream=0), together.compress(gradient(2), True, stream=0)
    )


def test_a_saved_state_goes_on_bit_for_bit():
    sender, restored = BackwardCompressor(CB), BackwardCompressor(CB)
    for seed in range(3):
        send(sender, gradient(seed))
    restored.load_state_dict(sender.state_dict())
    assert torch.equal(send(sender, gradient(7)), send(restored, gradient(7)))


@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 4, 8, 13])
def test_the_epilogue_is_the_last_micro_batches_of_a_link(num_stages, num_micro_batches):
    for receiver in range(num_stages - 1):
        late = [
            micro_batch
            for micro_batch in range(num_micro_batches)
            if in_epilogue(
                micro_batch,
                receiver=receiver,
                num_stages=num_stages,
                num_micro_batches=num_micro_batches,
            )
        ]
        expected = min(num_stages - receiver - 1, num_micro_batches)
        assert len(late) == expected
        assert late == list(range(num_micro_batches))[num_micro_batches - expected :]
        assert num_epilogue_messages(receiver, num_stages, num_micro_batches) == expected
