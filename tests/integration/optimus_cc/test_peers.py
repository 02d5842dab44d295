"""Gradients by each method, messages of few bits: two processes, real reductions and messages."""

from pathlib import Path

import numpy as np
import peers_worker
import pytest
import torch
from compression_worker import HIDDEN, TOKENS
from peers_worker import ITERATIONS, RANK, SHAPES, local_gradients
from processes import python_path
from ranks import run_ranks

from optimus_cc.formats import Float8Blocks, HadamardBlocks

ROOT = Path(__file__).resolve().parents[3]
WORKER = Path(peers_worker.__file__)
MATRICES = range(3)
METHOD = pytest.mark.parametrize("method", ["4bit", "torch-power-sgd", "power-sgd"])


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(WORKER, out, num_ranks=2, PYTHONPATH=python_path(ROOT / "src"))
    return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(2)]


def mean(iteration, number):
    return sum(local_gradients(rank, iteration)[number].double() for rank in range(2)) / 2


def equal(one, other):
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, other, strict=True))


def test_torchs_hook_on_our_gradients_is_torchs_hook_bit_for_bit(results):
    for result in results:
        assert len(result["hook"]) == ITERATIONS
        for theirs, ours in result["hook"]:
            assert torch.equal(theirs, ours)
        assert not torch.equal(*(ours for _, ours in result["hook"][:2]))


@METHOD
@pytest.mark.parametrize("case", ["", "-no-feedback", "-bf16", "-spoilt"])
def test_replicas_end_with_the_same_bits(results, method, case):
    first, second = (result[method + case]["seen"] for result in results)
    for one, other in zip(first, second, strict=True):
        assert equal(one, other)


@METHOD
def test_matrices_are_approximated_and_vectors_are_not(results, method):
    for iteration, gradients in enumerate(results[0][method]["seen"]):
        for number in MATRICES:
            assert not np.allclose(gradients[number], mean(iteration, number), atol=1e-3)
        np.testing.assert_allclose(gradients[3], mean(iteration, 3), atol=1e-6)


@METHOD
def test_error_feedback_loses_nothing_over_iterations(results, method):
    """What was applied, and the errors of all ranks, are what was given; without, some is lost."""
    given = [sum(mean(iteration, n) for iteration in range(ITERATIONS)) for n in MATRICES]
    given = torch.cat([g.flatten() for g in given])
    for case, holds in (("", True), ("-no-feedback", False)):
        runs = [result[method + case] for result in results]
        sent = torch.cat([sum(g[n].double() for g in runs[0]["seen"]).flatten() for n in MATRICES])
        left = errors(method, [run["states"][-1]["power_sgd"]["errors"] for run in runs])
        off = (sent + (left[: len(sent)] if holds else 0) - given).abs().max()
        assert (off < 2e-5) == holds


def errors(method, kept):
    """What has not been applied yet: ranks' mean and, in four bits, the owners' parts of it."""
    if not kept[0]:
        return None
    if method != "4bit":
        flat = [torch.cat([error.flatten() for error in own.values()]) for own in kept]
        return sum(own.double() for own in flat) / 2
    key = str(torch.float32)
    own = sum(errors[("own", key)].double() for errors in kept) / 2
    return own + torch.cat([errors[("mean", key)].double() for errors in kept])


def arriving(numbers, kind=HadamardBlocks):
    blocks = kind()
    return blocks.unpack(blocks.pack(numbers, torch.uint8), numbers.shape)


def test_four_bits_without_feedback_are_two_roundings_of_the_mean(results):
    """Each rank's gradients, then the mean of what arrived, part by part."""
    for iteration, seen in enumerate(results[0]["4bit-no-feedback"]["seen"]):
        sent = []
        for rank in range(2):
            flat = torch.cat([g.flatten() for g in local_gradients(rank, iteration)[:3]])
            sent.append(arriving(torch.nn.functional.pad(flat, (0, -len(flat) % 128))))
        rounded = arriving((sent[0] + sent[1]) / 2)
        wanted = torch.split(rounded[: len(flat)], [seen[n].numel() for n in MATRICES])
        for number in MATRICES:
            torch.testing.assert_close(seen[number].flatten(), wanted[number], atol=1e-6, rtol=1e-6)


def test_bytes_are_those_of_codes_scales_and_factors(results):
    """Two ranks: what a ring of as many bytes sends; fp32 vectors beside."""
    numels = [np.prod(shape) for shape in SHAPES]
    blocks = -(-sum(numels[:3]) // 128) * 2
    vector = 4 * numels[3]
    factors = 4 * RANK * sum(sum(shape) for shape in SHAPES[:3])
    for result in results:
        assert result["4bit"]["bytes"] == 34 * blocks + vector
        # Vectors and factors are bf16 then; four bits are four bits.
        assert result["4bit-bf16"]["bytes"] == 34 * blocks + vector / 2
        for method in ("power-sgd", "torch-power-sgd"):
            assert result[method]["bytes"] == factors + vector
            assert result[f"{method}-bf16"]["bytes"] == (factors + vector) / 2


@METHOD
@pytest.mark.parametrize("case", ["", "-spoilt"])
def test_a_saved_state_goes_on_bit_for_bit(results, method, case):
    for result in results:
        run = result[method + case]
        for whole, rest in zip(run["seen"][2:], run["continued"], strict=True):
            assert equal(whole, rest)
        others = zip(run["seen"][2:], run["forgetful"], strict=True)
        assert any(not equal(whole, rest) for whole, rest in others) == (
            method != "torch-power-sgd" or not case
        )


@METHOD
def test_what_is_not_finite_arrives_on_all_ranks_and_leaves_no_trace(results, method):
    for result in results:
        seen = result[f"{method}-spoilt"]["seen"]
        assert not seen[1][0][3, 3].isfinite()
        for gradients in [seen[0], *seen[2:]]:
            assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize(
    ("method", "kind", "nbytes"),
    [("hadamard-4bit", HadamardBlocks, 34 * 8), ("fp8", Float8Blocks, 66 * 8)],
)
def test_messages_of_few_bits_arrive_as_they_were_packed(results, method, kind, nbytes):
    """Over gloo, as tensors of fp32 whose bits are anything."""
    sender, receiver = results[1][method], results[0][method]
    carried = torch.zeros(TOKENS, HIDDEN)
    assert sender["bytes"] == 4 * nbytes
    assert sender["compressed"] == sender["messages"] == 4
    for given, received in zip(sender["given"], receiver["received"], strict=True):
        carried = carried + given
        assert torch.equal(arriving(carried, kind), received)
        carried = carried - received
    torch.testing.assert_close(sender["error"], carried)


def test_statistics_are_of_three_pairs_of_four_messages_and_change_nothing(results):
    sums, counts = results[1]["fp8"]["statistics"]
    assert counts.tolist() == [3, 3, 3, 4]
    assert 0 < sums[3] / 4 < 0.05
    assert not results[0]["fp8"]["statistics"].any()
    for result in results:
        assert equal(result["fp8"]["gradients"], result["unchecked"]["gradients"])
        assert result["unchecked"]["statistics"] is None
