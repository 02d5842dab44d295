"""The simplex method of Nelder and Mead: a minimum without derivatives."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_ENOUGH = 1e-9
"""Spread of losses over the simplex at which it stops."""

Vector = NDArray[np.float64]
Corner = tuple[float, int, Vector]
"""Loss, a number that breaks ties, and the point."""


def nelder_mead(
    loss: Callable[[Vector], float], start: Vector, steps: int = 200, size: float = 0.2
) -> Vector:
    """The point of least loss that a simplex finds from ``start``.

    Args:
        loss: To be minimised.
        start: First corner.
        steps: At most.
        size: Distance of the other corners from the first.
    """
    points = [start, *(start + size * axis for axis in np.eye(len(start)))]
    corners = [(loss(point), idx, point) for idx, point in enumerate(points)]
    for step in range(steps):
        corners.sort(key=lambda corner: corner[:2])
        if corners[-1][0] - corners[0][0] < _ENOUGH:
            break
        _improve(corners, loss, len(points) + step)
    return min(corners, key=lambda corner: corner[:2])[2]


def _improve(corners: list[Corner], loss: Callable[[Vector], float], number: int) -> None:
    """Replace the worst of sorted corners, or draw all of them to the best."""
    centre = np.mean([point for _, _, point in corners[:-1]], axis=0)
    worst_loss, _, worst = corners[-1]
    moved = 2 * centre - worst
    value = loss(moved)
    if value < corners[0][0]:
        further = 3 * centre - 2 * worst
        further_value = loss(further)
        if further_value < value:
            value, moved = further_value, further
    elif value >= corners[-2][0]:
        moved = (centre + (moved if value < worst_loss else worst)) / 2
        value = loss(moved)
        if value >= worst_loss:
            best = corners[0][2]
            drawn = [((best + point) / 2, idx) for _, idx, point in corners[1:]]
            corners[1:] = [(loss(point), idx, point) for point, idx in drawn]
            return
    corners[-1] = (value, number, moved)
