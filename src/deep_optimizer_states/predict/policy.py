"""Which policy is fastest on a machine, and why in a sentence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from deep_optimizer_states.predict.closed_form import estimate_update
from deep_optimizer_states.predict.machine import Machine, MachineError
from deep_optimizer_states.predict.model import ModelShape
from deep_optimizer_states.predict.update_sim import UpdateRun, UpdateSimulator
from deep_optimizer_states.predict.workload import Workload

CANDIDATES = (
    ("all-host", 1),
    ("stride", 4),
    ("stride", 3),
    ("stride", 2),
    ("all-device", 1),
    ("dynamic", 1),
)
"""Policies and strides that are weighed."""
_NO_SHAPE = ModelShape("unknown", 1, 1, 1, 1, 1)
"""An optimizer knows its subgroups and not the model's shape, which no update depends on."""
WORTH = 0.03
"""A policy that gains less than this over one named before it is not worth its device slots."""


@dataclass(frozen=True)
class Choice:
    """A policy for this package's engine.

    Attributes:
        policy: ``all-host``, ``stride``, ``all-device`` or ``dynamic``.
        stride: For ``stride``.
        seconds: Predicted for the update phase.
        explanation: Why, in a line for the log.
    """

    policy: str
    stride: int
    seconds: float
    explanation: str


def choose_policy(
    numels: Sequence[int],
    machine: Machine,
    num_ranks: int = 1,
    ratio: float = 1.0,
    tile_numel: int = 2**25,
) -> Choice:
    """The fastest policy for one rank's subgroups: what ``"policy": "auto"`` means.

    Args:
        numels: Elements of each subgroup of the rank.
        machine: Measured rates.
        num_ranks: Ranks of this node, which share its host.
        ratio: Share of the state in host memory.
        tile_numel: Largest tile, in elements.

    Raises:
        MachineError: A rate that is needed was not measured; says what measures it.
    """
    if not machine.gpus:
        work = Workload(_NO_SHAPE, dp=num_ranks, subgroup_numels=tuple(numels))
        seconds, _ = update_seconds(work, machine, "all-host")
        why = f"policy auto: all-host, predicted {seconds:.3f} s an update; there is no GPU"
        return Choice("all-host", 1, seconds, why)
    timed = _time_policies(list(numels), machine, num_ranks, (ratio, tile_numel))
    best = timed[0]
    for name, stride, seconds, busiest in timed[1:]:
        if seconds < best[2] * (1 - WORTH):
            best = (name, stride, seconds, busiest)
    others = ", ".join(
        f"{_label(name, stride)} {seconds:.3f} s"
        for name, stride, seconds, _ in timed
        if (name, stride) != best[:2]
    )
    explanation = (
        f"policy auto: {_label(best[0], best[1])}, predicted {best[2]:.3f} s an update on "
        f"'{machine.name}', bound by {best[3]} ({others})"
    )
    return Choice(best[0], best[1], best[2], explanation)


def _time_policies(
    numels: list[int], machine: Machine, num_ranks: int, shape: tuple[float, int]
) -> list[tuple[str, int, float, str]]:
    if not numels or min(numels) < 0:
        raise MachineError("numels: a rank without subgroups has nothing to choose")
    ratio, tile_numel = shape
    found = []
    for name, stride in CANDIDATES:
        workload = Workload(
            _NO_SHAPE,
            dp=num_ranks,
            stride=stride,
            offload_ratio=ratio,
            tile_numel=tile_numel,
            subgroup_numels=tuple(numels),
        )
        seconds, busiest = update_seconds(workload, machine, name)
        found.append((name, stride, seconds, busiest))
    return found


def update_seconds(workload: Workload, machine: Machine, policy: str) -> tuple[float, str]:
    """Seconds of the update phase, and what binds it: in closed form where that holds."""
    estimate = estimate_update(workload, machine, policy)
    if estimate.applies:
        return estimate.seconds, estimate.binding
    return simulate(workload, machine, policy).seconds, estimate.binding


def simulate(workload: Workload, machine: Machine, policy: str) -> UpdateRun:
    """Simulate one update phase."""
    return UpdateSimulator(workload, machine).run(policy)


def best_policy(workload: Workload, machine: Machine) -> tuple[Workload, Choice]:
    """The workload with its policy settled: its own, or the fastest for ``auto``.

    Raises:
        MachineError: A rate that is needed was not measured.
    """
    if workload.policy != "auto":
        seconds, binding = update_seconds(workload, machine, workload.policy)
        label = _label(workload.policy, workload.stride)
        given = Choice(
            workload.policy, workload.stride, seconds, f"{label}, as given; bound by {binding}"
        )
        return workload, given
    ranks = min(workload.ranks, machine.gpus) if machine.gpus else workload.ranks
    choice = choose_policy(
        workload.subgroups, machine, ranks, workload.offload_ratio, workload.tile_numel
    )
    chosen = dataclasses.replace(workload, policy=choice.policy, stride=choice.stride)
    return chosen, choice


def _label(policy: str, stride: int) -> str:
    return f"stride {stride}" if policy == "stride" else policy
