"""Choose the type of the small form's numbers where nobody chose it: what the processor is fast in.

The small form computes in bf16, the type that people train in. A processor without a bf16 matrix
product spends minutes on each of its runs, so that there it computes in fp32. Model, data and
number of iterations stay, and equality is held to every bit in either type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from configs.schema import Point
from launch.fit.capacity import runs_on_gpu
from launch.fit.machine import Machine
from launch.task import RunOptions

FAST = "fp32"
"""Type that every processor multiplies natively."""
NO_PRODUCT = "torch has no native bf16 matrix product on this processor"
AS_BEFORE = "the runs that stay are of this type"


def in_fast_type(
    points: Sequence[Point], machine: Machine, options: RunOptions, stays: str = ""
) -> tuple[list[Point], dict[str, str]]:
    """Give points of the small form whose type nobody chose the one that is fast here.

    All of them change or none does, so that engines are compared in one type.

    Args:
        points: what is asked for.
        machine: where it runs; torch is asked about it only if a point is open.
        options: how it runs. Of other hosts it is not known what they multiply.
        stays: type of earlier runs that are kept, which decides then; empty where none are.

    Returns:
        The points, and the reason by the names of those that changed.
    """
    changed = {
        point.name: point.model_copy(update={"dtype": FAST})
        for point in points
        if not options.launcher.is_far and _is_open(point, machine)
    }
    if not changed or stays == "bf16" or (not stays and "bf16" in machine.half_types()):
        return list(points), {}
    # DeepSpeed's JSON of the user's own, a checkpoint or another trainer may ask for bf16.
    refuse = options.trainer.refuse
    if any(refuse(changed[p.name]) and not refuse(p) for p in points if p.name in changed):
        return list(points), {}
    reason = AS_BEFORE if stays else NO_PRODUCT
    return [changed.get(p.name, p) for p in points], dict.fromkeys(changed, reason)


def options_for_others(points: Sequence[Point], options: RunOptions) -> list[str]:
    """Return the option with which other machines take the type of these points.

    Nodes of several kinds that choose for themselves could choose several types.
    """
    types = {
        point.dtype
        for point in points
        if _is_small(point) and (point.name in options.dtype_reasons or _is_unset(point))
    }
    return ["--dtype", *types] if len(types) == 1 else []


def words(reasons: Mapping[str, str]) -> str:
    """Say in a line what was chosen; empty where nothing was."""
    reason = next(iter(reasons.values()), "")
    return reason and f"type: {FAST} in place of bf16, since {reason}; --dtype bf16 asks for it"


def _is_open(point: Point, machine: Machine) -> bool:
    """Return whether the point is of the small form, on the CPU, and nobody named its type."""
    return _is_small(point) and _is_unset(point) and not runs_on_gpu(point, machine)


def _is_small(point: Point) -> bool:
    return point.study is not None and point.model.name == point.study.small_model


def _is_unset(point: Point) -> bool:
    return "dtype" not in point.model_fields_set
