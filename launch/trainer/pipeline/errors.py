"""What compressed messages left out: a rank's statistics become those of each link and of a run."""

from __future__ import annotations

from typing import Self

import torch
import torch.distributed as dist

from launch.trainer.metrics import finite_or_none
from launch.trainer.pipeline.stage import Rank
from optimus_cc.error_statistics import STATISTICS, ErrorStatistics


class MessageErrors:
    """Statistics of every link, over its copies and the micro-batches of an iteration."""

    def __init__(self, statistics: ErrorStatistics, rank: Rank) -> None:
        """Keep where this rank's statistics come from."""
        self._statistics = statistics
        self._rank = rank
        num_links = rank.point.pp - 1
        self._run = torch.zeros(2, num_links, len(STATISTICS), dtype=torch.float64)

    @classmethod
    def of(cls, rank: Rank) -> Self | None:
        """Those of a rank, if it was asked for them."""
        statistics: ErrorStatistics | None = rank.communicator.compressor.statistics
        return cls(statistics, rank) if statistics is not None else None

    def of_iteration(self) -> dict[str, float | None]:
        """Means over an iteration's compressed messages, ``link_R_STATISTIC``; all ranks call it.

        Link ``R`` ends at stage ``R``. A link without such messages, or without one that another
        micro-batch followed, has no fields for what is missing.
        """
        rank = self._rank
        everything = torch.zeros_like(self._run, device=rank.device)
        mine = self._statistics.take()
        if not rank.part.is_first:
            everything[:, rank.part.index - 1] = mine.to(rank.device)
        dist.all_reduce(everything)
        sums, counts = everything.cpu()
        means = sums / counts
        # Averages over a run are of sizes: links and iterations must not cancel each other out.
        known = counts > 0
        self._run += torch.stack([torch.where(known, means.abs(), 0.0), known.double()])
        return {
            f"link_{link}_{name}": finite_or_none(means[link, index].item())
            for link in range(len(means))
            for index, name in enumerate(STATISTICS)
            if counts[link, index]
        }

    def of_run(self) -> dict[str, float | None]:
        """Means of the sizes of each statistic over links and iterations."""
        sums, counts = self._run.sum(1)
        return {
            name: finite_or_none((sums[index] / counts[index]).item())
            for index, name in enumerate(STATISTICS)
        }
