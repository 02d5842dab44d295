"""What one rank gets of its machine, when all ranks of the node work at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deep_optimizer_states.predict.machine import Machine
from deep_optimizer_states.predict.workload import Workload, WorkloadError

STOCK_HOST_BYTES = 48
"""Host bytes a parameter that DeepSpeed's own update moves: gradient, unscale, Adam, downcast."""
FUSED_HOST_BYTES = 28
"""Of this engine's one pass: state read and written, gradient read, 16-bit weight written."""
UNSCALE_BYTES = 8
"""Stock multiplies the fp32 gradient in a pass of its own: read and written."""


@dataclass(frozen=True)
class Rank:
    """Rates of one rank, of copies in bytes and of Adam in parameters a second."""

    ranks_a_node: int  # ranks that share the node
    host_bytes_per_s: float  # its share of the host's memory bandwidth
    host_parameters_per_s: float  # its host lane alone, with the kernel of whoever updates
    host_bytes: int  # that this kernel moves in host memory, a parameter
    h2d_bytes_per_s: float  # page-locked, alone
    d2h_bytes_per_s: float
    h2d_both_bytes_per_s: float  # while the other way is busy
    d2h_both_bytes_per_s: float
    device_parameters_per_s: float  # Adam on the device
    blocking_bytes_per_s: float  # copies to the device that a host thread waits for

    @property
    def host_alone_parameters_per_s(self) -> float:
        """Rate of the host lane when nothing else uses host memory."""
        return min(self.host_parameters_per_s, self.host_bytes_per_s / self.host_bytes)


def rank_of(workload: Workload, machine: Machine) -> Rank:
    """Return what one rank of ``workload`` gets of ``machine``.

    Raises:
        MachineError: A rate that is needed was not measured.
    """
    per_node = min(workload.ranks, machine.gpus) if machine.gpus else workload.ranks
    threads = max(1.0, machine.cores / per_node)
    host = machine.curve("host_stream_bytes_per_s", machine.cores) / per_node
    stream = min(machine.curve("host_stream_bytes_per_s", threads), host)
    if workload.software is None:
        adam = machine.curve("host_fused_parameters_per_s", threads)
        num_bytes = FUSED_HOST_BYTES
    else:
        alone = machine.curve("host_adam_parameters_per_s", threads)
        adam = 1.0 / (1.0 / alone + UNSCALE_BYTES / stream)
        num_bytes = STOCK_HOST_BYTES
    if machine.gpus:
        h2d, d2h = machine.rate("h2d_bytes_per_s"), machine.rate("d2h_bytes_per_s")
        h2d_both = machine.rates.h2d_both_bytes_per_s or h2d
        d2h_both = machine.rates.d2h_both_bytes_per_s or d2h
        device = machine.rate("device_adam_parameters_per_s") * (1.0 - workload.hog_share)
        rate = workload.software.blocking_rate if workload.software else "h2d_bytes_per_s"
        blocking = getattr(machine.rates, rate) or h2d
    else:
        # Without a GPU the "device" is the host's own memory: its copies are copies of the host.
        h2d = d2h = h2d_both = d2h_both = stream / 2
        device, blocking = adam, stream / 2
    links = (h2d, d2h, h2d_both, d2h_both)
    return Rank(per_node, host, adam, num_bytes, *links, device, blocking)


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
