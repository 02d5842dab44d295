"""Which policy is fastest on a machine, and why in a sentence."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from deep_optimizer_states.predict.machine import Machine, MachineError
from deep_optimizer_states.predict.memory.offload import HEADROOM, memory_of
from deep_optimizer_states.predict.memory.peaks import CONTEXT_BYTES, GIB
from deep_optimizer_states.predict.model import ModelShape
from deep_optimizer_states.predict.phases import Phases, phases_of
from deep_optimizer_states.predict.rank import rank_of
from deep_optimizer_states.predict.update import UpdateRun, simulate_update
from deep_optimizer_states.predict.workload import Workload, schedule_of

WORTH = 0.03
"""A policy that gains less than this over one named before it is not worth its device slots."""
MAX_STRIDE = round(1 / WORTH)
"""A larger stride leaves the device less than this share of the state, and so gains no more."""
_ROUNDING = 1e-9
"""Share by which a simulated time may be too short, by rounding."""
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
    choice = _choose(workload, machine, knows_model=False)
    note = _all_resident_note(workload, machine, choice.seconds)
    return dataclasses.replace(choice, explanation=note + choice.explanation)


def best_policy(workload: Workload, machine: Machine) -> tuple[Workload, Choice]:
    """Settle the policy: the workload's own, or for ``auto`` that of the shortest iteration.

    Args:
        workload: What runs.
        machine: Where.

    Raises:
        MachineError: A rate that is needed was not measured.
    """
    if workload.policy != "auto":
        got = _time(workload, machine, knows_model=True)
        why = f"{got.label}, as given; bound by {got.binding}"
        return workload, dataclasses.replace(got, explanation=why)
    choice = _choose(workload, machine, knows_model=True)
    chosen = dataclasses.replace(workload, policy=choice.policy, stride=choice.stride)
    return chosen, choice


def _all_resident_note(workload: Workload, machine: Machine, update_s: float) -> str:
    """Say that no state need leave the device, where it has room for all of it."""
    if not machine.gpus or not workload.offload_ratio:
        return ""
    resident = dataclasses.replace(workload, policy="ratio", offload_ratio=0.0)
    assert machine.device_memory_bytes is not None
    need = memory_of(resident, machine, resident.policy).device_bytes + CONTEXT_BYTES
    left = HEADROOM * machine.device_memory_bytes - need
    if left <= 0:
        return ""
    seconds = simulate_update(resident, machine, resident.policy).seconds
    return (
        f"all optimizer state fits on the GPU if activations, gathered parameters and gradient "
        f'buckets take less than {left / GIB:.0f} GiB: "ratio": 0 is predicted to update in '
        f"{seconds:.3f} s, {update_s / seconds:.1f} times faster; at ratio "
        f"{workload.offload_ratio:g}, "
    )


def _choose(workload: Workload, machine: Machine, knows_model: bool) -> Choice:
    """Return the candidate of which least shows; without the model nothing is hidden."""
    if not machine.gpus:
        settled = dataclasses.replace(workload, policy="all-host", stride=1)
        only = _time(settled, machine, knows_model=False)
        why = f"policy auto: all-host, predicted {only.seconds:.3f} s an update; there is no GPU"
        return dataclasses.replace(only, explanation=why)

    def time(policy: str) -> Choice:
        candidate = dataclasses.replace(workload, policy=policy, stride=1)
        return _time(candidate, machine, knows_model)

    all_host = time("all-host")
    stride = _best_stride(workload, machine, knows_model, all_host.shown_s)
    timed = [all_host, *([stride] if stride else []), time("all-device"), time("dynamic")]
    best = timed[0]
    for item in timed[1:]:
        if item.shown_s < best.shown_s * (1 - WORTH):
            best = item
    others = ", ".join(f"{item.label} {item.shown_s:.3f} s" for item in timed if item is not best)
    shown, word = "", ""
    if knows_model:
        shown = f", of which with the gradients' flush {best.shown_s:.3f} s shows,"
        word = "showing: "
    why = (
        f"policy auto: {best.label}, predicted {best.seconds:.3f} s an update{shown} on "
        f"'{machine.name}', bound by {best.binding} ({word}{others})"
    )
    if min(item.shown_s for item in timed) < best.shown_s:
        why += f"; a gain under {100 * WORTH:.0f}% is not taken"
    return dataclasses.replace(best, explanation=why)


def _best_stride(
    workload: Workload, machine: Machine, knows_model: bool, limit_s: float
) -> Choice | None:
    """Return the stride of which least shows, if that is less than ``limit_s``.

    Strides are weighed in the order of what shows of them at least: when that is no less than the
    best one found, neither is all that follows.
    """
    candidates = []
    for stride in range(2, min(len(workload.subgroups), MAX_STRIDE) + 1):
        candidate = dataclasses.replace(workload, policy="stride", stride=stride)
        candidates.append((_least_shown_s(candidate, machine, knows_model), stride, candidate))
    best = None
    for least_s, _, candidate in sorted(candidates, key=lambda item: item[:2]):
        if least_s >= limit_s:
            break
        timed = _time(candidate, machine, knows_model)
        if timed.shown_s < limit_s:
            best, limit_s = timed, timed.shown_s
    return best


def _least_shown_s(workload: Workload, machine: Machine, knows_model: bool) -> float:
    """Return what shows of a stride at least: the CPU's steps that no forward hides, the flush."""
    schedule = schedule_of(workload, workload.policy)
    moved = schedule.device_tiles | schedule.resident_tiles
    numel = sum(tile.numel for idx, tile in enumerate(schedule.tiles) if idx not in moved)
    update_s = (1 - _ROUNDING) * numel / rank_of(workload, machine).host_alone_parameters_per_s
    if not knows_model:
        return update_s
    phases = phases_of(workload, machine)
    if workload.just_in_time_forward:
        update_s = max(0.0, update_s - workload.model.layers * phases.layer_s)
    return update_s + phases.flush_s


def _time(workload: Workload, machine: Machine, knows_model: bool) -> Choice:
    """Time a workload whose policy is settled."""
    run = simulate_update(workload, machine, workload.policy)
    phases = phases_of(workload, machine) if knows_model else None
    hidden = 0.0
    # Without a GPU the forward needs the very cores that the update is on.
    if phases and workload.just_in_time_forward and machine.gpus:
        hidden = min(run.seconds, hidden_s(workload, phases, run))
        if workload.works_in_backward:
            # Flushes that outlast the forward are in the way of what the next backward begins.
            hidden = min(hidden, workload.model.layers * phases.layer_s + phases.head_s)
    flush = phases.flush_s if phases else 0.0
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
