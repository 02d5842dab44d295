"""Low-rank compression against NumPy, and where it is exact."""

import numpy as np
import pytest
import torch

from optimus_cc import low_rank


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
    compressor = low_rank.LowRank(rank, seed=3)
    first = torch.randn((1, columns, rank), generator=torch.Generator().manual_seed(3))[0]
    reference = NumpyReference(first)
    drift = random(rows, columns)
    for step in range(4):
        matrix = drift + 0.3 * random(rows, columns, seed=10 + step)
        seen = approximate(compressor, matrix).double().numpy()
        np.testing.assert_allclose(seen, reference.approximate(matrix), atol=2e-5)


def test_a_query_that_is_not_kept_differs_from_the_reference():
    reference = NumpyReference(
        torch.randn((1, 16, 2), generator=torch.Generator().manual_seed(0))[0]
    )
    matrix = random(24, 16)
    for step in range(2):
        cold = approximate(low_rank.LowRank(2), matrix).double().numpy()
        distance = np.abs(cold - reference.approximate(matrix)).max()
        assert (distance < 2e-5) == (step == 0)


@pytest.mark.parametrize("rank", [16, 17, 100])
def test_full_rank_is_exact_up_to_rounding(rank):
    matrix = random(24, 16)
    torch.testing.assert_close(
        approximate(low_rank.LowRank(rank), matrix), matrix, atol=1e-6, rtol=1e-6
    )


def test_a_rank_below_full_is_not_exact():
    matrix = random(24, 16)
    assert (approximate(low_rank.LowRank(15), matrix) - matrix).abs().max() > 0.01


def test_a_matrix_of_low_rank_is_exact_at_that_rank_and_not_below():
    matrix = random(24, 4) @ random(4, 16, seed=1)
    exact = approximate(low_rank.LowRank(4), matrix)
    # How exact fp32 is depends on the processor's order of sums: 1e-5 was too strict on some.
    assert (exact - matrix).abs().max() < 1e-4 * matrix.abs().max()
    assert (approximate(low_rank.LowRank(3), matrix) - matrix).abs().max() > 0.1


def test_warm_queries_come_closer_to_the_best_approximation():
    matrix = random(40, 30)
    u, s, v = torch.linalg.svd(matrix)
    best = (matrix - u[:, :4] @ torch.diag(s[:4]) @ v[:4]).norm()
    compressor = low_rank.LowRank(4)
    errors = [(matrix - approximate(compressor, matrix)).norm() for _ in range(40)]
    assert errors[0] > 1.05 * best
    assert best * 0.999 < errors[-1] < 1.01 * best


def test_equal_shapes_at_once_are_what_they_are_alone():
    batch = random(3, 20, 12)
    queries = torch.randn((3, 12, 2), generator=torch.Generator().manual_seed(0))
    p, q = low_rank.LowRank(2).factorise("batch", batch)
    for index in range(3):
        reference = NumpyReference(queries[index]).approximate(batch[index])
        np.testing.assert_allclose((p @ q.mT)[index].numpy(), reference, atol=2e-5)


def test_a_zero_matrix_does_not_end_compression():
    compressor = low_rank.LowRank(2)
    assert not approximate(compressor, torch.zeros(6, 5)).any()
    matrix = random(6, 5)
    after = [(matrix - approximate(compressor, matrix)).norm() for _ in range(20)]
    assert after[-1] < 0.9 * matrix.norm()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_arrives_and_leaves_no_trace(bad):
    compressor, matrix = low_rank.LowRank(2), random(6, 5)
    approximate(compressor, matrix)
    spoilt = matrix.clone()
    spoilt[0, 0] = bad
    assert not approximate(compressor, spoilt).isfinite().all()
    assert approximate(compressor, matrix).isfinite().all()


def test_ranks_with_one_seed_agree_and_others_do_not():
    matrix = random(12, 10)
    first, second = (approximate(low_rank.LowRank(2, seed), matrix) for seed in (5, 5))
    assert torch.equal(first, second)
    assert not torch.equal(first, approximate(low_rank.LowRank(2, 6), matrix))


def test_a_saved_state_goes_on_bit_for_bit():
    compressor = low_rank.LowRank(2)
    for step in range(3):
        approximate(compressor, random(9, 8, seed=step))
    restored = low_rank.LowRank(2)
    restored.load_state_dict(compressor.state_dict())
    matrix = random(9, 8, seed=9)
    assert torch.equal(approximate(compressor, matrix), approximate(restored, matrix))
    assert not torch.equal(approximate(low_rank.LowRank(2), matrix), approximate(restored, matrix))


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
    assert low_rank.saves(torch.Size(shape), rank) is saved


def test_fp16_is_refused_by_name():
    with pytest.raises(TypeError, match=r"dtype = torch.float16: .* float32 and bfloat16"):
        low_rank.require_dtype(torch.zeros(2, dtype=torch.float16))
