"""Gradients of flat parameter groups: fp32, in host memory, where stock's backward copies them.

[Note: scaled late] Before its update stock multiplies the gradients of a group by one factor, which
unscales and clips them: a pass over memory of its own. Our kernels apply the factor while they read
a gradient, so it is not written back. But a parameter that takes no part in the next window is
updated with its old gradient again, multiplied twice then; and a user may look at gradients after a
step. So each parameter's gradient *owes* the last factor, until new content replaces it, the next
update reads it, or somebody looks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from deep_optimizer_states.zero12.stock import Run, Stock


class LateScaled:
    """The fp32 gradients of this rank, and what they are still to be multiplied with.

    It writes to the tensors that stock holds as ``grad`` of its master weights.

    Args:
        stock: DeepSpeed's optimizer.
        runs: The subgroups.
    """

    dtype = torch.float32

    def __init__(self, stock: Stock, runs: Sequence[Run]) -> None:
        self._stock = stock
        self._runs = runs
        self._grads: list[Tensor] = []
        self._owed: dict[int, float] = {}
        self._is_writing = False

    def take(self, grads: list[Tensor]) -> None:
        """Work on these: one for each parameter group, 1-D."""
        self._grads = grads

    @contextlib.contextmanager
    def writing(self, param_id: int | None = None) -> Iterator[None]:
        """Stock reads or writes gradients in here; what it sees is not scaled.

        Args:
            param_id: The parameter whose gradient is replaced; None for none.
        """
        if param_id is not None:
            self._owed.pop(param_id, None)
        before, self._is_writing = self._is_writing, True
        try:
            yield
        finally:
            self._is_writing = before

    def settle(self, param_ids: Iterable[int] | None = None) -> None:
        """Multiply what is owed, of some parameters or of all; see [Note: scaled late]."""
        if self._is_writing:
            return
        for param_id in list(self._owed if param_ids is None else param_ids):
            factor = self._owed.pop(param_id, 1.0)
            if factor != 1.0:
                group, _, start, numel = self._stock.grad_position[param_id]
                self._grads[group].narrow(0, start, numel).mul_(factor)

    def stepped(self, factor: float) -> None:
        """The update is launched, which multiplies every gradient by ``factor``."""
        self._owed = dict.fromkeys(self._stock.grad_position, factor)

    def beside_state(self, subgroup: int) -> Tensor:
        """A subgroup's gradients, 1-D, in host memory."""
        run = self._runs[subgroup]
        return run.of(self._grads[run.group])

    def widened(self) -> dict[int, Tensor]:
        """None: all are fp32, those of parameters that took no part too."""
        return {}

    def on_device(self, number: int) -> None:
        """None: stock keeps them in host memory alone."""

    def drain(self) -> None:
        """Nothing is in flight: stock waits for its copies when a step begins."""

    def forget_flushes(self) -> None:
        """None of ours is in flight."""


class SettledFragments(list[Tensor]):
    """Views of a group's gradients, one a parameter, that are scaled when they are looked at.

    Args:
        fragments: Stock's own list of them.
        param_ids: Their parameters.
        gradients: What they are views of.
    """

    def __init__(
        self, fragments: Iterable[Tensor], param_ids: list[int], gradients: LateScaled
    ) -> None:
        super().__init__(fragments)
        self._param_ids = param_ids
        self._gradients = gradients

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        self._gradients.settle(self._param_ids)
        return super().__getitem__(index)
