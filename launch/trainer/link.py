"""Bytes that the kernel says a rank sent over its link, beside those that the trainer counted."""

from __future__ import annotations

import psutil
import torch
import torch.distributed as dist

from configs.errors import ConfigError
from configs.schema import Point
from launch.hosts.namespaces import INTERFACE


class LinkBytes:
    """What the kernel counts on this rank's own link, headers and acknowledgements included.

    Of links as they are there is nothing to count: ranks of one machine share an interface with
    everything else on it.
    """

    def __init__(self, point: Point) -> None:
        self._mbit = point.link_mbit
        self._begin = self._sent = 0

    def begin(self) -> None:
        """Count from here.

        Raises:
            ConfigError: this rank has no link of its own.
        """
        self._begin = self._now()

    def end(self) -> None:
        """Count up to here; call it when what was sent has arrived, such as after an all-reduce."""
        self._sent += self._now() - self._begin

    def results(self, device: torch.device) -> dict[str, float]:
        """Sum over all ranks, in MiB; every rank calls it. Empty of links as they are."""
        if not self._mbit:
            return {}
        total = torch.tensor(self._sent, device=device)
        dist.all_reduce(total)
        return {"kernel_sent_mib": total.item() / 2**20}

    def _now(self) -> int:
        if not self._mbit:
            return 0
        links = psutil.net_io_counters(pernic=True, nowrap=False)
        if INTERFACE not in links:
            raise ConfigError(
                f"link_mbit = {self._mbit}: this rank is behind no link; start it with "
                "python -m launch.run, or give link_mbit = 0"
            )
        sent: int = links[INTERFACE].bytes_sent
        return sent
