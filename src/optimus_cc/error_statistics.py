"""Measures the assumptions of lazy error propagation about its errors.

A stage's weight gradient sums ``X_i`` times ``G_i`` over micro-batches, the activation by the
gradient that is sent back for it. Carried errors turn ``G_i`` into ``G_i + e_{i-1} - e_i``, which
changes that sum by ``e_i`` times ``X_{i+1} - X_i``. Where the two are orthogonal, and both are zero
on average, nothing is said to be lost. That they are is necessary for this argument and far from
sufficient: two random vectors of many elements are orthogonal too, the sum is a matrix of which the
cosine sees the trace alone, and errors arrive late whatever they are orthogonal to.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable

import torch
from torch import Tensor

STATISTICS = ("error_cosine", "error_mean", "difference_mean", "relative_error")
"""Names of what :meth:`ErrorStatistics.take` sums, in its order: the cosine of ``e_i`` with
``X_i - X_{i+1}``, the mean element of each over its root mean square, and ``|e_i| / |G_i|``."""
_TINY = 1e-30
"""Least divisor, so that an error of zero has cosine, mean and size zero."""


class ErrorStatistics:
    """Statistics of the sender's end of one link, from micro-batch to micro-batch.

    Activations and gradients come in the order of micro-batches. Activations are not copied: they
    are kept until the gradient of the one before has been sent, as backpropagation keeps them.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self._activations: defaultdict[Hashable, deque[Tensor]] = defaultdict(deque)
        # None for a gradient that was sent whole.
        self._errors: defaultdict[Hashable, deque[Tensor | None]] = defaultdict(deque)
        self._sums: Tensor | None = None

    def arrived(self, stream: Hashable, activation: Tensor) -> None:
        """Note an activation.

        What comes while gradients are switched off, such as in an evaluation, is left out: nothing
        is sent back for it.
        """
        if torch.is_grad_enabled():
            self._activations[stream].append(activation.detach())
            self._compare(stream)

    def sent(self, stream: Hashable, gradient: Tensor, error: Tensor) -> None:
        """Note a compressed gradient.

        Args:
            stream: as for the activations.
            gradient: as it was given, fp32 or bf16.
            error: what of it, and of the error before, was not sent; fp32, not changed later.
        """
        self._add(3, error.norm(), gradient.float().norm())
        self._errors[stream].append(error)
        self._compare(stream)

    def sent_whole(self, stream: Hashable) -> None:
        """Note a gradient that was not compressed."""
        self._errors[stream].append(None)
        self._compare(stream)

    def take(self) -> Tensor:
        """Return sums and counts since the last call, and start anew, such as after an iteration.

        Returns:
            (2, 4) fp64: sums of :data:`STATISTICS` over messages, then how many were summed. The
            first three are of compressed messages that another micro-batch followed.
        """
        sums = self._sums if self._sums is not None else torch.zeros(2, len(STATISTICS))
        self._activations.clear()
        self._errors.clear()
        self._sums = None
        return sums.double()

    def _compare(self, stream: Hashable) -> None:
        errors, activations = self._errors[stream], self._activations[stream]
        # An error is compared once the activations of it and of the next micro-batch are there.
        while errors and len(activations) > 1:
            error, activation = errors.popleft(), activations.popleft().float()
            if error is None or activations[0].shape != activation.shape:
                continue
            difference = activation - activations[0].float()
            product = (error * difference).sum()
            self._add(0, product, error.norm() * difference.norm())
            for index, compared in ((1, error), (2, difference)):
                self._add(index, compared.mean(), compared.square().mean().sqrt())

    def _add(self, index: int, value: Tensor, divisor: Tensor) -> None:
        if self._sums is None:
            self._sums = torch.zeros(2, len(STATISTICS), dtype=torch.float64, device=value.device)
        self._sums[0, index] += value / divisor.clamp_min(_TINY)
        self._sums[1, index] += 1
