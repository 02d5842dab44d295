"""Time and memory of one iteration, predicted: the entry of all that plans, simulates, advises."""

from __future__ import annotations

from dataclasses import dataclass

from deep_optimizer_states.predict.machine import Machine
from deep_optimizer_states.predict.memory.offload import Memory, memory_of, shortages
from deep_optimizer_states.predict.phases import phases_of
from deep_optimizer_states.predict.policy import best_policy
from deep_optimizer_states.predict.rank import rank_of
from deep_optimizer_states.predict.update import simulate_update
from deep_optimizer_states.predict.workload import STATE_BYTES, Workload

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


def predict(workload: Workload, machine: Machine) -> Prediction:
    """Predict one iteration of a workload on a machine.

    Raises:
        MachineError: The profile lacks a rate; says what measures it.
        WorkloadError: The machine cannot run it at all.
    """
    if workload.software is None:
        workload, choice = best_policy(workload, machine)
        update, hidden, binding = choice.seconds, choice.hidden_s, choice.binding
        words = choice.explanation
    else:
        run = simulate_update(workload, machine)
        update, hidden, binding = run.seconds, 0.0, run.binding
        where = "on the GPU" if machine.gpus else "in the device's place, in host memory"
        words = workload.software.words.format(stride=workload.stride, where=where)
    phases = phases_of(workload, machine)
    memory = memory_of(workload, machine, workload.policy)
    total = phases.forward_s + phases.backward_s + update - hidden + phases.outside_s
    bound_update = bound_update_s(workload, machine, with_flush=True)
    # Without a GPU both are work of the same cores, and neither hides the other.
    both = max if machine.gpus else sum
    return Prediction(
        iteration_s=total,
        forward_s=phases.forward_s,
        backward_s=phases.backward_s,
        update_s=update,
        outside_s=phases.outside_s,
        hidden_s=hidden,
        memory=memory,
        shortages=shortages(workload, machine, memory),
        binding=binding if machine.gpus else _ON_THE_HOST.get(binding, binding),
        bound_s=min(total, both((phases.computed_s, bound_update))),
        policy=words,
    )
