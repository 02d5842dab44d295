"""Low-rank compression: a matrix as the product of two thin ones.

The method is PowerSGD's (Vogels et al., NeurIPS '19): one step of subspace iteration from a query
matrix that is kept from call to call. ``P = orthonormal(M Q)``, ``Q = Mᵀ P``, and ``M`` is
approximated by ``P Qᵀ``, its projection onto the columns of ``P``. Backpropagation across pipeline
stages and the reduction of gradients share it; the latter averages P and Q over its ranks between
the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from optimus_cc.sizes import matrix_shape, pair_numel, saves

__all__ = [
    "DTYPES",
    "LowRank",
    "matrix_shape",
    "orthonormal",
    "pair_numel",
    "require_dtype",
    "saves",
]

DTYPES = (torch.float32, torch.bfloat16)
"""Types that can be compressed; arithmetic is in fp32 for both."""


def require_dtype(tensor: Tensor) -> None:
    """Refuse what cannot be compressed.

    Raises:
        TypeError: the tensor is neither fp32 nor bf16.
    """
    if tensor.dtype not in DTYPES:
        raise TypeError(
            f"dtype = {tensor.dtype}: compression takes float32 and bfloat16; train in one of them"
        )


def orthonormal(matrices: Tensor) -> Tensor:
    """An orthonormal basis for the columns of each matrix.

    Householder QR, which gives orthonormal columns even where those of a matrix depend on each
    other or are zero; Gram-Schmidt would divide by zero there.

    Args:
        matrices: (batch, rows, rank) fp32, with rank at most rows.

    Returns:
        As ``matrices``.
    """
    basis: Tensor = torch.linalg.qr(matrices).Q
    return basis


class LowRank:
    """Factorises matrices, and keeps the query matrix of each for its next call.

    Ranks that must agree (replicas of a gradient, tensor-parallel ranks that each send a copy of
    the same message) agree when they have the same seed and factorise the same shapes in the same
    calls: first queries are drawn from the seed and the shape alone.
    """

    def __init__(self, rank: int, seed: int = 0) -> None:
        """Keep the settings; nothing is allocated before the first call.

        Args:
            rank: columns of P and Q, at most; a smaller full rank takes its place.
            seed: for the first queries.
        """
        self.rank = rank
        self._seed = seed
        self._queries: dict[Hashable, Tensor] = {}

    def factorise(
        self,
        key: Hashable,
        matrices: Tensor,
        average: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> tuple[Tensor, Tensor]:
        """One step of subspace iteration on matrices of one shape, all at once.

        Args:
            key: whose query to go on from; the same matrices (in a later iteration) have the same.
            matrices: (batch, rows, columns) fp32.
            average: what is done to P before it is made orthonormal and to Q at the end, such as
                the mean over ranks.

        Returns:
            P, (batch, rows, r) fp32 with orthonormal columns, and Q, (batch, columns, r) fp32,
            where r is the smallest of rank, rows and columns. What is not finite in ``matrices``
            is in the product too, and leaves no trace in later calls.
        """
        query = self._queries.get(key)
        if query is None:
            query = self._first_query(matrices)
        # The query spans the same either way, but from an orthonormal one P loses less precision.
        p = orthonormal(average(matrices @ orthonormal(query)))
        q = average(matrices.mT @ p)
        self._queries[key] = torch.where(q.isfinite().all(), q, query)
        return p, q

    def _first_query(self, matrices: Tensor) -> Tensor:
        """Normal numbers, (batch, columns, r) fp32; drawn on the CPU, equal on every device."""
        batch, rows, columns = matrices.shape
        generator = torch.Generator().manual_seed(self._seed)
        shape = (batch, columns, min(self.rank, rows, columns))
        return torch.randn(shape, generator=generator).to(matrices.device)

    def state_dict(self) -> dict[str, Any]:
        """The queries, to go on as if training had not stopped."""
        return {"queries": dict(self._queries)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self._queries = dict(state["queries"])
