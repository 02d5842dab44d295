"""Time and memory of one iteration: what plans, simulates and advises.

Forward and backward are in closed form. A layer's forward takes ``flops / device_flops + bytes /
device_stream``, since matrix products and elementwise work run one after the other, and what its
kernels and hooks cost however few tokens there are. Backward is two forwards, and one more where
activations are recomputed. Beside that, gathered parameters and gradients pass through the device's
own memory a few times: that is work for each parameter, not for each token, so a larger micro-batch
does not repeat it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

from deep_optimizer_states.core.policies import BOTH, CPU_ALONE
from deep_optimizer_states.predict.machine import Machine
from deep_optimizer_states.predict.memory import (
    Memory,
    memory_of,
    shortages,
    with_device_share,
)
from deep_optimizer_states.predict.simulated_update import UpdateRun, rank_of, simulate_update
from deep_optimizer_states.predict.workload import Workload, WorkloadError

HIDDEN_PASSES = 8
"""Elementwise passes over a layer's hidden state in one forward: norms, rotary, residuals."""
FFN_PASSES = 4
"""Over its inner state: both halves of SwiGLU read and written, and their product."""
SCORE_PASSES = 4
"""Over its attention scores where they are materialised: written, softmax, read."""
LOGIT_BYTES = 16
"""A logit: fp32 copy, softmax and loss."""
GRAD_PASSES = 7
"""Over the gradients of the whole model in every backward, however few tokens: copied into the
bucket and laid out by rank, both of which read and write, averaged in place, read to be reduced."""
GATHERED_PASSES = 3
"""Over the gathered parameters of the whole model in every forward and backward: written by the
gather, then put together, which reads and writes. A single rank uses its parameters in place."""
SUM_PASSES = 3
"""Over the gradients where they are summed on the device before they are reduced: both are read,
the sum is written. Below stage 2 that is every backward of a window but the first."""
LAYERS_BACK = 2
"""A layer's backward in forwards."""
DISK = "no rate of a disk"
LAYERS = (
    "GPTs with SwiGLU, RMSNorm and no bias, and models of Hugging Face's whose layers each take "
    "every token"
)
_ON_THE_HOST = {
    "copies to the GPU": "copies within host memory",
    "link to the GPU": "copies within host memory",
    "link to and from the GPU": "copies within host memory",
    "device Adam": "host Adam",
}
"""Names, on a machine without a GPU, of what is named after one."""


@dataclass(frozen=True)
class Phases:
    """Phases of one iteration, in seconds."""

    forward_s: float  # all forwards
    backward_s: float  # all backwards, with what gradients cost
    computed_s: float  # computing alone, of all forwards and backwards
    layer_s: float  # one layer's forward, of one micro-batch
    head_s: float  # the output layer's and the loss, the same
    flush_s: float  # part of backward_s that gradients on their way to host memory add
    outside_s: float  # outside all phases


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
    device_share: float = 0.0  # of the state, what stays on the device from step to step

    @property
    def fits(self) -> bool:
        """Return whether the machine has the memory."""
        return not self.shortages


@dataclass(frozen=True)
class Choice:
    """A policy for this package's engine, and what is predicted of it."""

    policy: str  # all-host, ratio, stride, all-device or dynamic
    stride: int  # for policy stride
    seconds: float  # of the update phase
    hidden_s: float  # part of the update that runs behind the next forward
    flush_s: float  # what gradients add to backward
    binding: str  # what the update waits for
    explanation: str = ""  # why it was chosen, in a line

    @property
    def exposed_s(self) -> float:
        """Return what the update and the flush of gradients add to an iteration."""
        return self.seconds - self.hidden_s + self.flush_s

    @property
    def label(self) -> str:
        """Return its name in the log."""
        return f"stride {self.stride}" if self.policy == "stride" else self.policy


def predict(workload: Workload, machine: Machine) -> Prediction:
    """Predict one iteration of a workload on a machine.

    Raises:
        MachineError: The profile lacks a rate; says what measures it.
        WorkloadError: The performance model does not know such a run, or the machine cannot have
            it; names field and value.
    """
    _refuse_unknown(workload)
    workload = with_device_share(workload, machine)
    if _is_open(workload):
        choice = _open_choice(workload, machine)
        words = choice.explanation
        if not machine.gpus:  # with one, what both ways need is taken
            workload = dataclasses.replace(workload, policy=choice.policy)
    else:
        choice = _time(workload, machine)
        words = f"{choice.label}, as given; bound by {choice.binding}"
        if workload.software is not None:
            where = "on the GPU" if machine.gpus else "in the device's place, in host memory"
            told = workload.software.words if workload.host_share else f"all of it {where}"
            words = told.format(stride=workload.stride, where=where)
    phases, memory = phases_of(workload, machine), memory_of(workload, machine)
    total = phases.forward_s + phases.backward_s + phases.outside_s
    total += choice.seconds - choice.hidden_s
    bound_update = bound_update_s(workload, machine, with_flush=True)
    binding = choice.binding if machine.gpus else _ON_THE_HOST.get(choice.binding, choice.binding)
    kept_s = _kept_s(workload, machine) if machine.gpus else 0.0
    keeps_some = workload.software is None and workload.optimizer_at == "cpu" and machine.gpus > 0
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
        bound_s=min(total, both((phases.computed_s + kept_s, bound_update))),
        policy=words,
        device_share=1 - workload.passing_share if keeps_some else 0.0,
    )


def _is_open(workload: Workload) -> bool:
    return workload.software is None and workload.policy == "auto"


def _refuse_unknown(workload: Workload) -> None:
    model, stage, is_stock = workload.model, workload.stage, workload.software is not None
    is_fp32 = {workload.masters, workload.moments} == {"fp32"}
    offloads = workload.optimizer_at == "cpu"
    for field, value, is_known, known in (
        ("model", model.name, model.has_time, LAYERS),
        ("offload_optimizer.device", workload.optimizer_at, workload.optimizer_at != "nvme", DISK),
        ("offload_param.device", workload.weights_at, workload.weights_at != "nvme", DISK),
        ("zero_optimization.stage", stage, stage or not offloads, "no offload at stage 0"),
        (
            "offload_param.device",
            workload.weights_at,
            stage == 3 or not workload.weights_on_host,
            "weights in host memory at ZeRO stage 3 alone",
        ),
        (
            "offload_optimizer.ratio",
            workload.offload_ratio,
            stage == 3 or not is_stock or workload.offload_ratio == 1.0,
            "shares of the state at ZeRO stage 3 alone",
        ),
        ("type of states", workload.masters, is_fp32 or not is_stock, "fp32 states of stock alone"),
    ):
        if not is_known:
            raise WorkloadError(f"{field} = {value!r}: the performance model knows {known}")


def num_nodes(workload: Workload, machine: Machine) -> int:
    """Return the number of nodes that the ranks need.

    Raises:
        WorkloadError: Tensor-parallel ranks would lie on several nodes.
    """
    if not machine.gpus:
        return 1
    if workload.tp > machine.gpus:
        raise WorkloadError(
            f"tp = {workload.tp}: machine '{machine.name}' has {machine.gpus} GPUs a node"
        )
    return math.ceil(workload.ranks / machine.gpus)


def phases_of(workload: Workload, machine: Machine) -> Phases:
    """Return forward and backward of one iteration, in closed form.

    Raises:
        MachineError: A rate that is needed was not measured.
        WorkloadError: The performance model does not know such a run, the machine cannot hold the
            tensor-parallel ranks, or its profile does not say how fast it computes in the
            workload's dtype.
    """
    _refuse_unknown(workload)
    num_nodes(workload, machine)
    if machine.gpus and workload.dtype == "fp32":
        raise WorkloadError(
            f"dtype = 'fp32': machine '{machine.name}' has a rate for 16-bit matrix products only "
            "(device_flops_per_s); use bf16 or fp16"
        )
    free = 1.0 - workload.hog_share
    if not machine.gpus:
        free /= workload.ranks  # which share the host's cores
    flops_per_s = machine.rate("device_flops_per_s") * free
    stream = machine.rate("device_stream_bytes_per_s") * free
    costs, model = machine.costs, workload.model
    layer = _layer_s(workload, flops_per_s, stream) + launch_s(workload, machine)
    logits = workload.tokens * model.padded_vocab_size(workload.tp) / workload.tp
    head = 2 * logits * model.hidden / flops_per_s + LOGIT_BYTES * logits / stream
    whole = workload.numel * workload.weight_bytes
    is_cut = workload.stage == 3
    gathered = GATHERED_PASSES * whole / stream if is_cut and workload.dp > 1 else 0.0
    gather = _gather_s(workload, machine) if is_cut else 0.0
    # Gathers run ahead of the layers that use them; reduce-scatters behind.
    computed = model.layers * layer + head + gathered
    forward = max(computed, gather) + model.layers * costs.layer_s * is_cut
    again = LAYERS_BACK + (1 if workload.activation_checkpointing else 0)
    layer_back = layer * again + (costs.grads_s if workload.stage in (1, 2) else 0.0)
    computed_back = model.layers * layer_back + LAYERS_BACK * head + gathered
    times = workload.accumulation
    passes = GRAD_PASSES * times if workload.stage >= 2 else GRAD_PASSES + SUM_PASSES * (times - 1)
    computed_back = times * computed_back + passes * whole / stream
    back = _with_reductions(workload, machine, computed_back, times * 2 * gather)
    flush = _flush_s(workload, machine, back / times)
    forward_more_s, outside_more_s = 0.0, 0.0
    if workload.software:
        forward_more_s = workload.software.forward_s.get(machine.name, 0.0)
        outside_more_s = workload.software.outside_s.get(machine.name, 0.0)
    return Phases(
        forward_s=times * forward + forward_more_s,
        backward_s=back + flush,
        computed_s=times * computed + back,
        layer_s=layer + costs.layer_s * is_cut,
        head_s=head,
        flush_s=flush,
        outside_s=costs.iteration_s + times * costs.micro_batch_s + outside_more_s,
    )


def launch_s(workload: Workload, machine: Machine) -> float:
    """Return what a layer costs in every pass however few tokens there are.

    ZeRO-3's hooks run around every module; stages 0 to 2 have none of them.
    """
    return machine.costs.launch_s - (0.0 if workload.stage == 3 else machine.costs.hooks_s)


def _layer_s(workload: Workload, flops_per_s: float, stream: float) -> float:
    """Return the products and the elementwise passes of one layer's forward."""
    model, tokens, tp = workload.model, workload.tokens, workload.tp
    layer_numel = model.layer_numel(tp)
    # Scores times values and queries times keys; causal masks do not save work here.
    attention_flops = 4 * workload.sequence * model.hidden / tp
    flops = tokens * (2 * layer_numel + attention_flops)
    scores = model.heads * workload.sequence / tp if workload.materialized_attention else 0.0
    passes = HIDDEN_PASSES * model.hidden + FFN_PASSES * model.ffn / tp + SCORE_PASSES * scores
    return flops / flops_per_s + tokens * passes * workload.weight_bytes / stream


def _with_reductions(
    workload: Workload, machine: Machine, computed_s: float, gathers_s: float
) -> float:
    """Return the backwards of an iteration with what moves between the ranks meanwhile.

    Below stage 3 whole gradients are summed on all ranks, which moves them twice, on the stream
    that computes: at stage 2 in every backward, else after the last one.
    """
    if workload.stage == 3:
        return max(computed_s, gathers_s)
    sums = workload.accumulation if workload.stage == 2 else 1
    reduced_s = 2 * sums * _gather_s(workload, machine)
    return max(computed_s, reduced_s) if workload.overlaps else computed_s + reduced_s


def _gather_s(workload: Workload, machine: Machine) -> float:
    """Return the time to move all parameters of the model to this rank once."""
    if not machine.gpus:
        return 0.0
    gather, whole_bytes = 0.0, workload.numel * workload.weight_bytes
    if workload.dp > 1:
        moved = whole_bytes * (workload.dp - 1) / workload.dp
        gather = moved / machine.rate("gather_bytes_per_s")
    if workload.weights_on_host:
        # Each rank brings its own share over its own link, and then the ranks exchange shares.
        gather += whole_bytes / workload.dp / machine.rate("h2d_bytes_per_s")
    return gather


def _flush_s(workload: Workload, machine: Machine, back_s: float) -> float:
    """Return what gradients add to backward on their way to host memory."""
    if not machine.gpus or not workload.host_share:
        return 0.0
    if workload.stage < 3:
        return _flat_flush_s(workload, machine, back_s)
    numel = sum(workload.subgroups) * workload.passing_share
    if not numel:
        return 0.0
    software = workload.software
    num_bytes = software.flush_bytes if software else workload.weight_bytes
    if software and not software.hides_flush:
        return numel * num_bytes / machine.rate("pageable_d2h_bytes_per_s")
    flush = numel * num_bytes / machine.rate("d2h_bytes_per_s")
    last = min(1.0, workload.bucket_numel / (workload.dp * numel))
    return max(flush - back_s, flush * last)


def flat_copies(workload: Workload) -> tuple[float, float]:
    """Return the bytes of a gradient that stages 1 and 2 copy to the host, and back, an iteration.

    DeepSpeed makes these copies whoever updates. A gradient goes home once it is whole, stock's in
    fp32, unless its state stays on the device. Stage 2 reduces it in every backward before that
    too: the 16-bit sum goes home each time, and comes back to be added to; at stage 1 it stays on
    the device till the last.
    """
    sums = workload.accumulation if workload.stage == 2 and workload.accumulation > 1 else 0
    size = workload.weight_bytes
    last = workload.final_grad_bytes * (1 - workload.device_share)
    return last + sums * size, max(0, sums - 1) * size


def _flat_flush_s(workload: Workload, machine: Machine, back_s: float) -> float:
    """Return what those copies add: they are page-locked, on the stream that computes.

    This package's engine sends the last one behind backward; at stage 1 it comes after.
    """
    numel = sum(workload.subgroups) * workload.host_share
    home, back = flat_copies(workload)
    rate = machine.rate("d2h_bytes_per_s")
    seconds = home / rate + (back / machine.rate("h2d_bytes_per_s") if back else 0.0)
    if workload.overlaps:
        return max(0.0, numel * seconds - workload.accumulation * back_s)
    hidden = 0.0
    if workload.software is None and workload.stage == 2:
        last = workload.final_grad_bytes * numel * (1 - workload.device_share) / rate
        shown = min(1.0, workload.bucket_numel / (workload.dp * numel)) if numel else 0.0
        hidden = min(back_s, last * (1 - shown))
    return numel * seconds - hidden


def bound_update_s(workload: Workload, machine: Machine, with_flush: bool = False) -> float:
    """Return the seconds below which no schedule of this package's kernels updates.

    The device's share is chosen freely, and nothing but the resources themselves costs time. 16-bit
    weights cross the link if they live on its other side: the CPU sends its own to the device, or
    the device its own to host memory.

    Args:
        workload: What runs.
        machine: Where it runs.
        with_flush: Count gradients on their way to host memory too, which use the same links in
            every iteration, whenever that is.
    """
    rank = rank_of(workload, machine)
    numel, weight = sum(workload.subgroups) * workload.passing_share, workload.weight_bytes
    state, grad = workload.state_bytes, workload.final_grad_bytes
    to_device, to_host = (0, weight) if workload.weights_on_host else (weight, 0)
    flush = grad if with_flush and machine.gpus else 0

    def seconds(share: float) -> float:
        return numel * max(
            (1 - share) / rank.host_alone_parameters_per_s,
            (to_device * (1 - share) + (state + grad) * share) / rank.links["h2d"],
            ((state + to_host) * share + flush) / rank.links["d2h"],
            share / rank.device_parameters_per_s,
            ((2 * state + grad) * share + rank.host_bytes * (1 - share) + flush)
            / rank.host_bytes_per_s,
        )

    return min(seconds(step / 200) for step in range(201))


def _open_choice(workload: Workload, machine: Machine) -> Choice:
    """Return what policy ``auto`` becomes by its own measurements: that of which less shows."""
    ways = [CPU_ALONE, BOTH] if machine.gpus else [CPU_ALONE]
    timed = [_time(dataclasses.replace(workload, policy=way), machine) for way in ways]
    best = min(timed, key=lambda choice: choice.exposed_s)
    shown = " and ".join(f"{one.policy} {one.exposed_s:.3f} s" for one in timed)
    why = f"policy auto, which becomes {best.policy} (update and flush that show: {shown})"
    return dataclasses.replace(best, explanation=why)


def _time(workload: Workload, machine: Machine) -> Choice:
    """Time a workload whose policy is settled."""
    run, phases, hidden = simulate_update(workload, machine), phases_of(workload, machine), 0.0
    # Without a GPU the forward needs the very cores that the update is on.
    is_in_time = workload.software is None and workload.just_in_time_forward
    # Below stage 3 step() ends with a gather of all weights, where there is somebody else.
    is_in_time = is_in_time and (workload.stage == 3 or workload.dp == 1)
    if is_in_time and machine.gpus:
        hidden = min(run.seconds, _hidden_s(workload, phases, run))
        hidden = max(0.0, hidden - _kept_s(workload, machine))
    seconds = run.seconds
    if workload.stage in (1, 2):  # all weights that were updated elsewhere
        seconds += _gather_s(workload, machine)
    return Choice(workload.policy, workload.stride, seconds, hidden, phases.flush_s, run.binding)


def _kept_s(workload: Workload, machine: Machine) -> float:
    """Return what the device needs to step the state that lives or stays there.

    It reads its memory at full speed meanwhile, which a forward that runs beside it needs as well.
    """
    numel = sum(workload.subgroups) * (1 - workload.passing_share)
    return numel / rank_of(workload, machine).device_parameters_per_s


def _hidden_s(workload: Workload, phases: Phases, run: UpdateRun) -> float:
    """Return the seconds of an update that do not show.

    The forward goes layer by layer; each layer begins when its own tiles are on the device.
    """
    blocks = workload.model.blocks(workload.tp)
    sizes = (sum(-(-numel // workload.dp) for numel in block) for block in blocks)
    ends = list(itertools.accumulate(sizes))
    ends[-1] = sum(workload.subgroups)  # what lies behind the model's own tensors is waited for too
    last, clock, needed, first, tile = len(ends) - 1, 0.0, 0.0, 0, 0
    tiles = workload.schedule.tiles
    for layer, end in enumerate(ends):
        while tile < len(tiles) and first < end:
            needed = max(needed, run.ready_s[tile])
            first += tiles[tile].numel
            tile += 1
        clock = max(clock, needed) + (phases.layer_s if 0 < layer < last else 0.0)
    clock += phases.head_s
    alone = workload.model.layers * phases.layer_s + phases.head_s
    return max(0.0, run.seconds + alone - clock)
