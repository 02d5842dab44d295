"""Time and memory of one iteration, predicted."""

from __future__ import annotations

from dataclasses import dataclass, field

from deep_optimizer_states.predict.advice import advise
from deep_optimizer_states.predict.closed_form import bound_update_s, estimate_update
from deep_optimizer_states.predict.machine import Machine
from deep_optimizer_states.predict.memory_need import Memory, memory_of, shortages
from deep_optimizer_states.predict.phases import Phases, phases_of
from deep_optimizer_states.predict.policy import best_policy, simulate
from deep_optimizer_states.predict.update_sim import UpdateRun
from deep_optimizer_states.predict.workload import Workload
from deep_optimizer_states.schedule import Schedule

__all__ = ["Memory", "Prediction", "predict"]

_ENGINE_POLICIES = {
    "zero3-0.13": "every subgroup on the CPU, gradients flushed one after the other",
    "async-0.13": "every subgroup on the CPU, gradients flushed behind backward",
    "zero3": "every subgroup on the CPU",
}


@dataclass(frozen=True)
class Prediction:
    """One iteration.

    Attributes:
        iteration_s: From one iteration to the next: the phases less what is hidden, and what lies
            outside them.
        forward_s: All forwards of the iteration.
        backward_s: All backwards, with recomputation and what gradients cost.
        update_s: The update phase.
        outside_s: Between the phases: data, logging, memory reports.
        hidden_s: Part of the update that runs behind the next forward.
        memory: Of one rank.
        fits: Whether the machine has that memory.
        shortages: What it lacks, and what to change.
        binding: What the update phase waits for.
        bound_s: No schedule on this machine is faster than this, an iteration.
        policy: Who updates what, in words.
        advice: What to change and the figure behind it, a sentence each.
    """

    iteration_s: float
    forward_s: float
    backward_s: float
    update_s: float
    outside_s: float
    hidden_s: float
    memory: Memory
    fits: bool
    binding: str
    bound_s: float
    policy: str
    shortages: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)


def predict(workload: Workload, machine: Machine, with_advice: bool = False) -> Prediction:
    """Predict one iteration of ``workload`` on ``machine``.

    Args:
        workload: What runs.
        machine: Where.
        with_advice: Also weigh other settings, which takes a dozen predictions.

    Raises:
        MachineError: The profile lacks a rate; says what measures it.
        WorkloadError: The machine cannot run it at all.
    """
    phases = phases_of(workload, machine)
    hidden, words = 0.0, _ENGINE_POLICIES.get(workload.engine, "")
    if workload.engine == "ours":
        workload, choice = best_policy(workload, machine)
        update, words = choice.seconds, choice.explanation
        if workload.just_in_time_forward:
            run = simulate(workload, machine, workload.policy)
            hidden = hidden_s(workload, phases, run)
    else:
        update = simulate(workload, machine, "all-host").seconds
        if workload.engine == "paper":
            words = f"one subgroup in {workload.stride} on the GPU, through one slot"
    memory = memory_of(workload, machine, workload.policy)
    lacks = shortages(workload, machine, memory)
    total = phases.forward_s + phases.backward_s + update - hidden + phases.outside_s
    return Prediction(
        iteration_s=total,
        forward_s=phases.forward_s,
        backward_s=phases.backward_s,
        update_s=update,
        outside_s=phases.outside_s,
        hidden_s=hidden,
        memory=memory,
        fits=not lacks,
        binding=estimate_update(workload, machine, workload.policy).binding,
        bound_s=min(total, max(phases.computed_s, bound_update_s(workload, machine))),
        policy=words,
        shortages=lacks,
        advice=advise(workload, machine, total, predict) if with_advice else [],
    )


def hidden_s(workload: Workload, phases: Phases, run: UpdateRun) -> float:
    """How much of an update runs behind the forward that needs its weights.

    The forward goes layer by layer; each begins when its own tiles are on the device.

    Args:
        workload: What runs.
        phases: For the time of a layer.
        run: The update, simulated.
    """
    schedule = Schedule.make(
        workload.subgroups,
        workload.policy,
        workload.stride,
        workload.offload_ratio,
        workload.tile_numel,
    )
    ready = _ready_by_element(schedule, run)
    ends, total, clock, tile = _layer_ends(workload), sum(workload.subgroups), 0.0, 0
    needed = 0.0
    last = len(ends) - 1
    for layer, end in enumerate(ends):
        while tile < len(ready) and ready[tile][0] < min(end, total):
            needed = max(needed, ready[tile][1])
            tile += 1
        clock = max(clock, needed) + (phases.layer_s if 0 < layer < last else 0.0)
    clock += phases.head_s
    alone = workload.model.layers * phases.layer_s + phases.head_s
    return max(0.0, run.seconds + alone - clock)


def _ready_by_element(schedule: Schedule, run: UpdateRun) -> list[tuple[int, float]]:
    """First element of each tile among all of the rank's, and when its weights are ready."""
    found, at = [], 0
    for idx, tile in enumerate(schedule.tiles):
        found.append((at, run.ready_s[idx]))
        at += tile.numel
    return found


def _layer_ends(workload: Workload) -> list[int]:
    """Last element, among the rank's, of the embedding, each layer, and the output layer."""
    tensors = [-(-numel // workload.dp) for numel in workload.model.tensors(workload.tp)]
    layer = sum(tensors[1:7])
    ends = [tensors[0]]
    for _ in range(workload.model.layers):
        ends.append(ends[-1] + layer)
    return [*ends, sum(tensors)]
