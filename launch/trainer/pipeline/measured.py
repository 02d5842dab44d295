"""What all ranks measured of an iteration, brought together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from launch.trainer.pipeline.stage import PHASES, Rank
from optimus_cc import Kind


@dataclass(frozen=True)
class Measured:
    """Times and sent bytes of an iteration.

    Stages wait for each other in different calls: the first for gradients, the last for
    activations. No single rank stands for the pipeline, so that the iteration and its phases are
    means over all ranks, which add up as those of one rank do.
    """

    seconds: float
    """The iteration."""
    phases_ms: dict[str, float]
    """``compute_ms`` and so on, in the order of :data:`PHASES`."""
    stages_ms: dict[str, list[float]]
    """The same phases, without ``_ms``, of each stage: means over its ranks, in microseconds'
    precision."""
    sent_bytes: dict[str, int]
    """``forward_bytes`` and so on, of all ranks together."""


def measure(rank: Rank, seconds: float) -> Measured:
    """Bring together what the ranks measured; every rank calls it after an iteration.

    It is one all-reduce of some numbers, outside of what is timed. After it all ranks begin the
    next iteration together.

    Args:
        rank: this one.
        seconds: how long the iteration took here.
    """
    sent = [rank.traffic.sent[kind].sent_bytes for kind in Kind]
    table = torch.zeros(rank.point.pp, 1 + len(PHASES), dtype=torch.float64)
    mine = [1e3 * seconds, *rank.phases_ms().values()]
    table[rank.part.index] = torch.tensor(mine, dtype=torch.float64)
    # Numbers of bytes are exact in this type up to 2^53.
    total = torch.cat([torch.tensor(sent, dtype=torch.float64), table.flatten()]).to(rank.device)
    dist.all_reduce(total)
    bytes_of_all, times = total[: len(sent)].tolist(), total[len(sent) :].cpu()
    by_stage = times.view_as(table) / (rank.point.tp * rank.point.dp)
    iteration_ms, *phases = by_stage.mean(0).tolist()
    return Measured(
        seconds=iteration_ms / 1e3,
        phases_ms={f"{name}_ms": ms for name, ms in zip(PHASES, phases, strict=True)},
        stages_ms={
            name: [round(ms, 3) for ms in column]
            for name, column in zip(PHASES, by_stage.T[1:].tolist(), strict=True)
        },
        sent_bytes={f"{kind}_bytes": int(n) for kind, n in zip(Kind, bytes_of_all, strict=True)},
    )
