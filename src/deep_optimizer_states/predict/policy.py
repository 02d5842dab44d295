"""Which policy is fastest on a machine, and why in a sentence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from deep_optimizer_states.predict.machine import Machine, MachineError
from deep_optimizer_states.predict.model import ModelShape
from deep_optimizer_states.predict.phases import Phases, phases_of
from deep_optimizer_states.predict.update import UpdateRun, simulate_update
from deep_optimizer_states.predict.workload import Workload, schedule_of

WORTH = 0.03
"""A policy that gains less than this over one named before it is not worth its device slots."""
CANDIDATES = (
    ("all-host", 1),
    ("stride", 2),
    ("stride", 3),
    ("stride", 4),
    ("stride", 5),
    ("all-device", 1),
    ("dynamic", 1),
)
"""Policies that are weighed, each with its stride; ``dynamic`` does what larger strides would."""
_NO_SHAPE = ModelShape("unknown", 1, 1, 1, 1, 1)
"""An optimizer knows its subgroups and not the model's shape. An update depends on that only by the
activations that leave no room for gradients on the device."""


@dataclass(frozen=True)
class Choice:
    """A policy for this package's engine, and what is predicted of it."""

    policy: str  # all-host, ratio, stride, all-device or dynamic
    stride: int  # for policy stride
    seconds: float  # of the update phase
    hidden_s: float  # part of the update that runs behind the next forward
    flush_s: float  # what gradients add to backward; 0 where the model is not known
    binding: str  # what the update waits for
    explanation: str = ""  # why it was chosen, in a line for the log

    @property
    def shown_s(self) -> float:
        """What the update and the flush of gradients add to an iteration."""
        return self.seconds - self.hidden_s + self.flush_s

    @property
    def label(self) -> str:
        """Its name in the log."""
        return f"stride {self.stride}" if self.policy == "stride" else self.policy


def choose_policy(
    numels: Sequence[int],
    machine: Machine,
    num_ranks: int = 1,
    ratio: float = 1.0,
    tile_numel: int = 2**25,
    weights_on_host: bool = False,
) -> Choice:
    """Return the fastest policy for one rank's subgroups: what ``"policy": "auto"`` means.

    Args:
        numels: Elements of each subgroup of the rank.
        machine: Measured rates.
        num_ranks: Ranks of this node, which share its host.
        ratio: Share of the state in host memory.
        tile_numel: Largest tile, in elements.
        weights_on_host: Whether 16-bit weights live in host memory.

    Raises:
        MachineError: A rate that is needed was not measured; says what measures it.
    """
    if not numels or min(numels) < 0:
        raise MachineError("numels: a rank without subgroups has nothing to choose")
    workload = Workload(
        _NO_SHAPE,
        dp=num_ranks,
        offload_ratio=ratio,
        tile_numel=tile_numel,
        just_in_time_forward=False,
        weights_on_host=weights_on_host,
        subgroup_numels=tuple(numels),
    )
    return _choose(workload, machine)


def best_policy(workload: Workload, machine: Machine) -> tuple[Workload, Choice]:
    """Settle the policy: the workload's own, or for ``auto`` that of the shortest iteration.

    Raises:
        MachineError: A rate that is needed was not measured.
    """
    if workload.policy != "auto":
        given = _time(workload, machine)
        why = f"{given.label}, as given; bound by {given.binding}"
        return workload, dataclasses.replace(given, explanation=why)
    choice = _choose(workload, machine)
    return dataclasses.replace(workload, policy=choice.policy, stride=choice.stride), choice


def _choose(workload: Workload, machine: Machine) -> Choice:
    """Return the candidate of which least shows."""
    if not machine.gpus:
        only = _time(dataclasses.replace(workload, policy="all-host", stride=1), machine)
        why = f"policy auto: all-host, predicted {only.seconds:.3f} s an update; there is no GPU"
        return dataclasses.replace(only, explanation=why)
    timed = [
        _time(dataclasses.replace(workload, policy=policy, stride=stride), machine)
        for policy, stride in CANDIDATES
        if stride <= len(workload.subgroups)
    ]
    best = timed[0]
    for item in timed[1:]:
        if item.shown_s < best.shown_s * (1 - WORTH):
            best = item
    others = ", ".join(f"{item.label} {item.shown_s:.3f} s" for item in timed if item is not best)
    shown, word = "", ""
    if workload.model is not _NO_SHAPE:
        shown = f", of which with the gradients' flush {best.shown_s:.3f} s shows,"
        word = "showing: "
    why = (
        f"policy auto: {best.label}, predicted {best.seconds:.3f} s an update{shown} on "
        f"'{machine.name}', bound by {best.binding} ({word}{others})"
    )
    if min(item.shown_s for item in timed) < best.shown_s:
        why += f"; a gain under {100 * WORTH:.0f}% is not taken"
    return dataclasses.replace(best, explanation=why)


def _time(workload: Workload, machine: Machine) -> Choice:
    """Time a workload whose policy is settled; without the model nothing is hidden."""
    run = simulate_update(workload, machine, workload.policy)
    hidden = flush = 0.0
    if workload.model is not _NO_SHAPE:
        phases = phases_of(workload, machine)
        flush = phases.flush_s
        # Without a GPU the forward needs the very cores that the update is on.
        if workload.just_in_time_forward and machine.gpus:
            hidden = min(run.seconds, hidden_s(workload, phases, run))
    return Choice(workload.policy, workload.stride, run.seconds, hidden, flush, run.binding)


def hidden_s(workload: Workload, phases: Phases, run: UpdateRun) -> float:
    """Return the seconds of an update that do not show.

    The forward goes layer by layer; each layer begins when its own tiles are on the device.

    Args:
        workload: What runs, its policy settled.
        phases: For the time of a layer.
        run: The update, simulated.
    """
    ends = _layer_ends(workload)
    ends[-1] = sum(workload.subgroups)  # what lies behind the model's own tensors is waited for too
    last, clock, needed, first, tile = len(ends) - 1, 0.0, 0.0, 0, 0
    tiles = schedule_of(workload, workload.policy).tiles
    for layer, end in enumerate(ends):
        while tile < len(tiles) and first < end:
            needed = max(needed, run.ready_s[tile])
            first += tiles[tile].numel
            tile += 1
        clock = max(clock, needed) + (phases.layer_s if 0 < layer < last else 0.0)
    clock += phases.head_s
    alone = workload.model.layers * phases.layer_s + phases.head_s
    return max(0.0, run.seconds + alone - clock)


def _layer_ends(workload: Workload) -> list[int]:
    """Return the last element, among the rank's, of the embedding, each layer, and the output."""
    tensors = [-(-numel // workload.dp) for numel in workload.model.tensors(workload.tp)]
    layer = sum(tensors[1:7])
    ends = [tensors[0] + layer * number for number in range(workload.model.layers + 1)]
    return [*ends, sum(tensors)]
