"""Low-rank compression against NumPy, and where it is exact."""

import numpy as np
import pytest
import torch

from optimus_cc.low_rank import LowRank, Memory
from optimus_cc.sizes import saves


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class NumpyReference:
    """Projects onto the columns of M Q by a pseudo-inverse, in double precision."""

    def __init__(self, query):
        self.query = query.double().numpy()

    def approximate(self, matrix):
        matrix = matrix.double().numpy()
        projected = matrix @ self.query
        projection = projected @ np.linalg.pinv(projected)
        # Any orthonormal basis of the columns gives the same product P Qᵀ, and warm queries that
        # span the same rows.
        basis, _ = np.linalg.qr(projected)
        self.query = matrix.T @ basis
        return projection @ matrix


def approximate(compressor, matrix, key=0):
    p, q = compressor.factorise(key, matrix[None])
    return (p @ q.mT)[0]


@pytest.mark.parametrize(("rows", "columns", "rank"), [(24, 16, 3), (7, 40, 5), (16, 16, 1)])
def test_the_product_is_numpys_over_several_warm_calls(rows, columns, rank):
    """A query that is not kept gives another one from the second call on."""
    warm = LowRank(rank, seed=3)
    reference = NumpyReference(random(1, columns, rank, seed=3)[0])
    drift = random(rows, columns)
    for step in range(4):
        matrix = drift + 0.3 * random(rows, columns, seed=10 + step)
        wanted = reference.approximate(matrix)
        np.testing.assert_allclose(approximate(warm, matrix).double().numpy(), wanted, atol=2e-5)
        cold = approximate(LowRank(rank, seed=3), matrix).double().numpy()
        assert (np.abs(cold - wanted).max() < 2e-5) == (step == 0)


@pytest.mark.parametrize(("rank", "exact"), [(15, False), (16, True), (100, True)])
def test_full_rank_is_exact_up_to_rounding_and_no_other(rank, exact):
    matrix = random(24, 16)
    off = (approximate(LowRank(rank), matrix) - matrix).abs().max()
    assert off < 1e-5 if exact else off > 0.01


def test_a_matrix_of_low_rank_is_exact_at_that_rank_and_not_below():
    matrix = random(24, 4) @ random(4, 16, seed=1)
    exact = approximate(LowRank(4), matrix)
    # How exact fp32 is depends on the processor's order of sums: 1e-5 was too strict on some.
    assert (exact - matrix).abs().max() < 1e-4 * matrix.abs().max()
    assert (approximate(LowRank(3), matrix) - matrix).abs().max() > 0.1


def test_warm_queries_come_closer_to_the_best_approximation():
    matrix = random(40, 30)
    u, s, v = torch.linalg.svd(matrix)
    best = (matrix - u[:, :4] @ torch.diag(s[:4]) @ v[:4]).norm()
    compressor = LowRank(4)
    errors = [(matrix - approximate(compressor, matrix)).norm() for _ in range(40)]
    assert errors[0] > 1.05 * best
    assert best * 0.999 < errors[-1] < 1.01 * best


def test_equal_shapes_at_once_are_what_they_are_alone():
    batch, queries = random(3, 20, 12), random(3, 12, 2)
    p, q = LowRank(2).factorise("batch", batch)
    for index in range(3):
        reference = NumpyReference(queries[index]).approximate(batch[index])
        np.testing.assert_allclose((p @ q.mT)[index].numpy(), reference, atol=2e-5)


def test_a_zero_matrix_does_not_end_compression():
    compressor = LowRank(2)
    assert not approximate(compressor, torch.zeros(6, 5)).any()
    matrix = random(6, 5)
    after = [(matrix - approximate(compressor, matrix)).norm() for _ in range(20)]
    assert after[-1] < 0.9 * matrix.norm()


def test_a_saved_state_is_a_copy():
    memory = Memory()
    kept = memory.of("errors")
    kept[0] = torch.zeros(3)
    state = memory.state_dict()
    kept[0].add_(1.0)
    memory.load_state_dict(state)
    kept[0].add_(1.0)
    assert not state["errors"][0].any()


@pytest.mark.parametrize(
    ("shape", "rank", "saved"),
    [
        ((8, 8), 3, True),
        ((8, 8), 4, False),
        ((2, 4, 8), 4, False),
        ((64,), 1, False),
        ((), 1, False),
    ],
)
def test_a_pair_that_is_not_smaller_is_not_sent(shape, rank, saved):
    assert saves(torch.Size(shape), rank) is saved
