"""Low-rank compression, and feedback of the errors that any compression makes.

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

DTYPES = (torch.float32, torch.bfloat16)
"""Types that can be compressed; arithmetic is in fp32 for both."""


class Memory:
    """Tensors that compression keeps from call to call, by what they are and whose they are."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._kept: dict[str, dict[Hashable, Tensor]] = {}

    def of(self, what: str) -> dict[Hashable, Tensor]:
        """Return the tensors of one kind by their keys, to be read and changed in place."""
        return self._kept.setdefault(what, {})

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all tensors, to go on as if training had not stopped."""
        return {
            what: {key: tensor.clone() for key, tensor in kept.items()}
            for what, kept in self._kept.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        for what, kept in self._kept.items():
            kept.clear()
            kept.update({key: tensor.clone() for key, tensor in state[what].items()})


def held_bytes(state: object) -> int:
    """Return the bytes of all tensors in what a ``state_dict()`` gave."""
    if isinstance(state, Tensor):
        return state.nbytes
    return sum(map(held_bytes, state.values())) if isinstance(state, dict) else 0


def require_dtype(tensor: Tensor) -> None:
    """Refuse what cannot be compressed.

    Raises:
        TypeError: the tensor is neither fp32 nor bf16.
    """
    if tensor.dtype not in DTYPES:
        raise TypeError(
            f"dtype = {tensor.dtype}: compression takes float32 and bfloat16; train in one of them"
        )


class ErrorFeedback:
    """Adds what a compressed message left out to the next one.

    Lazy error propagation is this, applied to the activation gradients of successive micro-batches:
    ``M_i + e_{i-1}`` is compressed, and ``e_i`` is what of it was not sent. The sum of what was
    sent and of the error that is left is always the sum of what was given. Errors are fp32 for bf16
    messages too: rounding a small difference to eight bits would lose what it is to save.
    """

    def __init__(self, enabled: bool, memory: Memory) -> None:
        """Start without errors; when not ``enabled``, none is ever kept."""
        self.enabled = enabled
        self._errors = memory.of("errors")

    def add(self, key: Hashable, message: Tensor) -> Tensor:
        """Return the message with the error of the last one of its stream, fp32."""
        exact = message.float()
        error = self._errors.get(key)
        return exact if error is None else exact + error

    def keep(self, key: Hashable, given: Tensor, sent: Tensor) -> None:
        """Remember what was not sent.

        Args:
            key: the stream.
            given: what :meth:`add` returned.
            sent: what the receiver makes of the message, of that shape, fp32. Where the difference
                is not finite nothing is remembered, or one overflow would spoil all that follows.
        """
        if self.enabled:
            self._errors[key] = torch.nan_to_num(given - sent, nan=0.0, posinf=0.0, neginf=0.0)


def orthonormal(matrices: Tensor) -> Tensor:
    """Return an orthonormal basis for the columns of each matrix.

    Householder QR, which gives orthonormal columns even where those of a matrix depend on each
    other or are zero; Gram-Schmidt would divide by zero there.

    Args:
        matrices: (batch, rows, rank) fp32, with rank at most rows.
    """
    basis: Tensor = torch.linalg.qr(matrices).Q
    return basis


class LowRank:
    """Factorises matrices, and keeps the query matrix of each for its next call.

    Ranks that must agree (replicas of a gradient, tensor-parallel ranks that each send a copy of
    the same message) agree when they have the same seed and factorise the same shapes in the same
    calls: first queries are drawn from the seed and the shape alone.
    """

    def __init__(self, rank: int, seed: int = 0, memory: Memory | None = None) -> None:
        """Keep the settings; nothing is allocated before the first call.

        Args:
            rank: columns of P and Q, at most; a smaller full rank takes its place.
            seed: for the first queries.
            memory: where queries are kept.
        """
        self.rank = rank
        self._seed = seed
        self._queries = (memory or Memory()).of("queries")

    def factorise(
        self,
        key: Hashable,
        matrices: Tensor,
        average: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> tuple[Tensor, Tensor]:
        """Make one step of subspace iteration on matrices of one shape, all at once.

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
        # Drawn on the CPU, the numbers are equal on every device.
        batch, rows, columns = matrices.shape
        generator = torch.Generator().manual_seed(self._seed)
        shape = (batch, columns, min(self.rank, rows, columns))
        return torch.randn(shape, generator=generator).to(matrices.device)
