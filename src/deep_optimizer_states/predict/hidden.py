"""How much of an update runs behind the forward that needs its weights."""

from __future__ import annotations

from deep_optimizer_states.predict.phases import Phases
from deep_optimizer_states.predict.update_sim import UpdateRun
from deep_optimizer_states.predict.workload import Workload, schedule_of
from deep_optimizer_states.schedule import Schedule


def hidden_s(workload: Workload, phases: Phases, run: UpdateRun) -> float:
    """Seconds of an update that do not show.

    The forward goes layer by layer; each begins when its own tiles are on the device. Where the
    throughput timer synchronises, the first one begins only after what was in the streams' queues.

    Args:
        workload: What runs, its policy settled.
        phases: For the time of a layer.
        run: The update, simulated.
    """
    ready = _ready_by_element(schedule_of(workload, workload.policy), run)
    ends, total, tile = _layer_ends(workload), sum(workload.subgroups), 0
    clock, needed = _forward_begins_s(workload, run), 0.0
    last = len(ends) - 1
    for layer, end in enumerate(ends):
        while tile < len(ready) and ready[tile][0] < min(end, total):
            needed = max(needed, ready[tile][1])
            tile += 1
        clock = max(clock, needed) + (phases.layer_s if 0 < layer < last else 0.0)
    clock += phases.head_s
    alone = workload.model.layers * phases.layer_s + phases.head_s
    return max(0.0, run.seconds + alone - clock)


def _forward_begins_s(workload: Workload, run: UpdateRun) -> float:
    """When the next forward may begin, after the update was launched at 0."""
    begins = 0.0
    if workload.timer_synchronizes:
        streams = [job for job in run.jobs if job.entries]
        # The timer stops at the end of ``step()`` and starts anew in the forward. Each waits for
        # what is in the queues then, and not for what the update's thread puts there afterwards.
        for _ in ("stop", "start"):
            queued = (job.end_s for job in streams if job.submit_s <= begins)
            begins = max(queued, default=begins)
    return begins


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
