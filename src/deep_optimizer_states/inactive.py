"""Gradients of parameters that took no part in a window: what stock does with them, repeated.

Stock keeps a second gradient a parameter, in the type of the master weights (fp32 unless 16 bits
were asked for), and multiplies it in place by the step's factor. A
parameter that got no gradient in this accumulation window still has its last one there, already
scaled once for every step since, and is updated with it again. We keep no second gradient, so for
such parameters alone, one is made, and lives until they take part again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class InactiveGradients:
    """Gradients of the parameters that stock would update with a stale one.

    Args:
        home_of: The 1-D gradient home of a parameter, by its key.
        dtype: Of these gradients: that of the master weights.
    """

    def __init__(
        self, home_of: Callable[[int], Tensor], dtype: torch.dtype = torch.float32
    ) -> None:
        self._home_of = home_of
        self._dtype = dtype
        self._stale: dict[int, Tensor] = {}
        self._last_factor: dict[int, float] = {}

    def collect(self, inactive: Iterable[int]) -> dict[int, Tensor]:
        """Gradients to use in this step for parameters without one, before this step's factor.

        Args:
            inactive: Keys of parameters that got no gradient in this window.

        Returns:
            Key -> gradient, 1-D. Parameters that never had one are left out: their home is 0.
        """
        for key in inactive:
            if key in self._stale:
                continue
            factor = self._last_factor.get(key)
            if factor is not None:
                self._stale[key] = self._home_of(key).to(self._dtype, copy=True).mul_(factor)
        return {key: self._stale[key] for key in inactive if key in self._stale}

    def value(self, key: int) -> Tensor:
        """A copy of a parameter's gradient as the last step left it, 1-D."""
        if key in self._stale:
            return self._stale[key].clone()
        home = self._home_of(key).to(self._dtype, copy=True)
        return home.mul_(self._last_factor.get(key, 1.0))

    def stepped(self, active: Iterable[int], factor: float) -> None:
        """A step was made: every gradient was multiplied by ``factor``.

        Args:
            active: Keys of parameters that got a gradient in this window.
            factor: The step's factor, rounded to fp32.
        """
        for key in active:
            self._stale.pop(key, None)
            self._last_factor[key] = factor
        for gradient in self._stale.values():
            gradient.mul_(factor)

    def skipped(self, active: Iterable[int]) -> None:
        """The step was skipped (overflow): this window's gradients stay as they came.

        Args:
            active: Keys of parameters that got a gradient in this window.
        """
        for key in active:
            self._stale.pop(key, None)
            self._last_factor[key] = 1.0
