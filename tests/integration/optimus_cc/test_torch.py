"""The three schemes on torch alone: four processes, real messages and reductions."""

from pathlib import Path

import compression_worker
import numpy as np
import pytest
import torch
from compression_worker import (
    HIDDEN,
    NARROW,
    TOKENS,
    local_gradient,
)
from processes import python_path
from ranks import run_ranks

ROOT = Path(__file__).resolve().parents[3]
WORKER = Path(compression_worker.__file__)
WARM_UP = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(WORKER, out, num_ranks=4, PYTHONPATH=python_path(ROOT / "src"))
    return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(4)]


def largest_difference(results, name, other):
    """Of the parameters' gradients on any rank."""
    return max(
        (a.float() - b.float()).abs().max().item()
        for rank in results
        for a, b in zip(rank[name]["gradients"], rank[other]["gradients"], strict=True)
    )


def test_full_rank_is_uncompressed_bit_for_bit(results):
    assert largest_difference(results, "full", "whole") == 0.0
    assert results[3]["full"]["losses"] == results[3]["whole"]["losses"]


def test_the_gradients_own_rank_is_within_rounding_though_pairs_are_sent(results):
    assert largest_difference(results, "narrow", "whole") < 1e-6
    for rank in results[1:]:
        assert rank["narrow"]["compressed"] == rank["narrow"]["messages"] == 16
        assert rank["narrow"]["forward_bytes"] == 16 * 4 * TOKENS * HIDDEN * (
            rank is not results[3]
        )
        pair_bytes = 4 * NARROW * (TOKENS + HIDDEN)
        assert rank["narrow"]["bytes"] == 16 * pair_bytes
        assert rank["whole"]["bytes"] == 16 * 4 * TOKENS * HIDDEN
    # Activations are counted and never compressed.
    forward_bytes = [rank["narrow"]["forward_bytes"] for rank in results]
    assert forward_bytes == [16 * 4 * TOKENS * HIDDEN] * 3 + [0]


def test_one_rank_less_differs(results):
    assert largest_difference(results, "below", "whole") > 1e-5


def test_bf16_pairs_are_half_as_large_and_as_exact_as_bf16_is(results):
    largest = max(g.abs().max().item() for r in results for g in r["whole-bf16"]["gradients"])
    assert largest_difference(results, "narrow-bf16", "whole-bf16") < 0.03 * largest
    for rank in results[1:]:
        assert rank["narrow-bf16"]["bytes"] * 2 == rank["narrow"]["bytes"]


@pytest.mark.parametrize("name", ["below", "no-lep"])
def test_what_arrives_is_what_numpy_makes_of_what_was_given(results, name):
    """Link by link, warm queries included."""
    rank = {"below": NARROW - 1, "no-lep": 2}[name]
    for receiver in range(3):
        given, received = results[receiver + 1][name]["given"], results[receiver][name]["received"]
        assert len(given) == len(received) == 16
        query = torch.randn((1, HIDDEN, rank), generator=torch.Generator().manual_seed(0))
        query = query[0].double().numpy()
        for sent, arrived in zip(given, received, strict=True):
            matrix = sent.double().numpy()
            basis, _ = np.linalg.qr(matrix @ np.linalg.qr(query)[0])
            query = matrix.T @ basis
            scale = np.abs(matrix).max()
            np.testing.assert_allclose(arrived.numpy(), basis @ query.T, atol=2e-4 * scale)


def test_error_feedback_loses_nothing_over_a_link(results):
    """Over two iterations of eight micro-batches; without it something is lost."""
    for receiver in range(3):
        for name, holds in (("lep", True), ("no-lep", False)):
            sender = results[receiver + 1][name]
            left = sender["error"] if sender["error"] is not None else 0.0
            lost = sum(sender["given"]) - sum(results[receiver][name]["received"]) - left
            scale = max(g.abs().max() for g in sender["given"])
            assert (lost.abs().max() < 1e-5 * scale) == holds


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("count", ["4", "8", "gpipe"])
def test_the_epilogue_has_one_message_for_every_stage_before_the_last(results, num_stages, count):
    num_micro_batches = 6 if count == "gpipe" else int(count)
    for rank in results:
        run = rank[f"late-{num_stages}-{count}"]
        if run["stage"] == 0:
            assert run["messages"] == 0
            continue
        receiver = run["stage"] - 1
        assert run["messages"] == num_micro_batches
        assert run["compressed"] == num_stages - receiver - 1
        whole = (num_micro_batches - run["compressed"]) * 4 * TOKENS * HIDDEN
        assert run["bytes"] == whole + run["compressed"] * 4 * 2 * (TOKENS + HIDDEN)


def test_making_and_restoring_messages_is_timed_and_nothing_else_is(results):
    """Eight messages a link; the first stage sends none back, the last one gets none."""
    expected = [800.0, 808.0, 808.0, 8.0]
    assert [rank["compression-time"].pop("compression") for rank in results] == expected
    assert not any(any(rank["compression-time"].values()) for rank in results)


def test_several_stages_a_rank_are_refused_by_name(results):
    assert results[0]["interleaved"].startswith("num_stages = 8: 4 ranks would hold several stages")
    assert "interleaved schedules" in results[0]["interleaved"]


def means(iteration, number):
    return np.mean([local_gradient(rank, iteration).numpy() for rank in range(4)], 0) + number


def test_gradients_are_whole_in_the_warm_up_and_compressed_after(results):
    sc = results[0]["sc"]
    for iteration in range(6):
        first = sc["reduced"][iteration][0].numpy()
        distance = np.abs(first - means(iteration, 0)).max()
        assert (distance < 1e-6) == (iteration < WARM_UP)
        assert bool(sc["compressed"][iteration]) == (iteration >= WARM_UP)
    whole, compressed = 2 * 24 * HIDDEN + 5, 2 * 3 * (24 + HIDDEN) + 5
    ring = 4 * 2 * 3 / 4
    assert (
        sc["bytes"]
        == [pytest.approx(whole * ring, abs=3)] * 2 + [pytest.approx(compressed * ring, abs=3)] * 4
    )


def test_compressed_gradients_are_numpys_over_warm_calls(results):
    """Both matrices of one shape, which are compressed at once; without error feedback."""
    queries = torch.randn((2, HIDDEN, 3), generator=torch.Generator().manual_seed(0))
    for number in range(2):
        query = queries[number].double().numpy()
        for iteration in range(WARM_UP, 6):
            mean = means(iteration, number).astype(np.float64)
            basis, _ = np.linalg.qr(mean @ np.linalg.qr(query)[0])
            query = mean.T @ basis
            seen = results[0]["sc"]["reduced"][iteration][number].numpy()
            np.testing.assert_allclose(seen, basis @ query.T, atol=1e-4)


def test_a_stage_that_is_not_selected_is_reduced_whole(results):
    other = results[0]["sc-other-stage"]
    assert other["compressed"] == [0] * 6
    for iteration in range(6):
        first = other["reduced"][iteration][0].numpy()
        np.testing.assert_allclose(first, means(iteration, 0), atol=1e-6)
