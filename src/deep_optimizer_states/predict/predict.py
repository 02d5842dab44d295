"""Time and memory of one iteration, and the fastest policy: what plans, simulates and advises.

``"policy": "auto"`` of the engine asks :func:`choose_policy`; all else asks :func:`predict`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from deep_optimizer_states.predict.machine import Machine, MachineError
from deep_optimizer_states.predict.memory.offload import Memory, memory_of, shortages
from deep_optimizer_states.predict.model import ModelShape
from deep_optimizer_states.predict.phases import Phases, phases_of
from deep_optimizer_states.predict.rank import rank_of
from deep_optimizer_states.predict.update import UpdateRun, simulate_update
from deep_optimizer_states.predict.workload import STATE_BYTES, Workload, schedule_of

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
_ON_THE_HOST = {
    "copies to the GPU": "copies within host memory",
    "link to the GPU": "copies within host memory",
    "link to and from the GPU": "copies within host memory",
    "device Adam": "host Adam",
}
"""What lanes named after a GPU are on a machine without one."""


@dataclass(frozen=True)
class Prediction:
    """One iteration, in seconds."""

    iteration_s: float  # the phases less what is hidden, and what lies outside them
    forward_s: float  # all forwards
    backward_s: float  # all backwards, with recomputation and what gradients cost
    update_s: float  # the update phase
    outside_s: float  # between the phases: data, logging, memory reports
    hidden_s: float  # part of the update that runs behind the next forward
    memory: Memory  # of one rank
    shortages: list[str]  # what the machine lacks of it, and what to change
    binding: str  # what the update phase waits for
    bound_s: float  # no schedule on this machine is faster than this, an iteration
    policy: str  # who updates what, in words

    @property
    def fits(self) -> bool:
        """Whether the machine has the memory."""
        return not self.shortages


def predict(workload: Workload, machine: Machine) -> Prediction:
    """Predict one iteration of a workload on a machine.

    Raises:
        MachineError: The profile lacks a rate; says what measures it.
        WorkloadError: The machine cannot run it at all.
    """
    workload, choice = _settled(workload, machine)
    phases = phases_of(workload, machine)
    memory = memory_of(workload, machine, workload.policy)
    total = phases.forward_s + phases.backward_s + phases.outside_s
    total += choice.seconds - choice.hidden_s
    bound_update = bound_update_s(workload, machine, with_flush=True)
    binding = choice.binding
    if not machine.gpus:
        binding = _ON_THE_HOST.get(binding, binding)
    # Without a GPU both are work of the same cores, and neither hides the other.
    both = max if machine.gpus else sum
    return Prediction(
        iteration_s=total,
        forward_s=phases.forward_s,
        backward_s=phases.backward_s,
        update_s=choice.seconds,
        outside_s=phases.outside_s,
        hidden_s=choice.hidden_s,
        memory=memory,
        shortages=shortages(workload, machine, memory),
        binding=binding,
        bound_s=min(total, both((phases.computed_s, bound_update))),
        policy=choice.explanation,
    )


def bound_update_s(workload: Workload, machine: Machine, with_flush: bool = False) -> float:
    """No schedule of this package's kernels updates faster on this machine.

    The device's share is chosen freely, nothing but the resources themselves costs time, and
    gradients of that share are on the device already if the workload lets them stay there. 16-bit
    weights cross the link if they live on its other side: the CPU sends its own to the device, or
    the device its own to host memory.

    Args:
        workload: What runs.
        machine: Where it runs.
        with_flush: Count gradients on their way to host memory too, which use the same links in
            every iteration, whenever that is.
    """
    rank = rank_of(workload, machine)
    numel, weight = sum(workload.subgroups) * workload.offload_ratio, workload.weight_bytes
    grad = 0 if machine.gpus and workload.keeps_device_grads else weight

    to_device, to_host = (0, weight) if workload.weights_on_host else (weight, 0)
    flush = weight if with_flush and machine.gpus else 0
    stays = flush if workload.keeps_device_grads else 0

    def seconds(share: float) -> float:
        return numel * max(
            (1 - share) / rank.host_alone_parameters_per_s,
            (to_device * (1 - share) + (STATE_BYTES + grad) * share) / rank.h2d_bytes_per_s,
            ((STATE_BYTES + to_host - stays) * share + flush) / rank.d2h_bytes_per_s,
            share / rank.device_parameters_per_s,
            ((2 * STATE_BYTES - stays) * share + rank.host_bytes * (1 - share) + flush)
            / rank.host_bytes_per_s,
        )

    return min(seconds(step / 200) for step in range(201))


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


def _settled(workload: Workload, machine: Machine) -> tuple[Workload, Choice]:
    """Settle the policy: the workload's own, or for ``auto`` that of the shortest iteration."""
    if workload.software is None and workload.policy == "auto":
        choice = _choose(workload, machine)
        return dataclasses.replace(workload, policy=choice.policy, stride=choice.stride), choice
    given = _time(workload, machine)
    why = f"{given.label}, as given; bound by {given.binding}"
    if workload.software is not None:
        where = "on the GPU" if machine.gpus else "in the device's place, in host memory"
        why = workload.software.words.format(stride=workload.stride, where=where)
    return workload, dataclasses.replace(given, explanation=why)


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
        is_in_time = workload.software is None and workload.just_in_time_forward
        if is_in_time and machine.gpus:
            hidden = min(run.seconds, _hidden_s(workload, phases, run))
    return Choice(workload.policy, workload.stride, run.seconds, hidden, flush, run.binding)


def _hidden_s(workload: Workload, phases: Phases, run: UpdateRun) -> float:
    """Return the seconds of an update that do not show.

    The forward goes layer by layer; each layer begins when its own tiles are on the device.
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
