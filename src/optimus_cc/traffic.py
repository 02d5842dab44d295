"""Counts and times the communication of this rank, by kind."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from optimus_cc.sizes import ring_bytes


class Kind(StrEnum):
    """Kinds of communication, as in the paper's breakdown of an iteration."""

    FORWARD = "forward"
    """Activations to the next pipeline stage."""
    BACKWARD = "backward"
    """Activation gradients to the previous pipeline stage."""
    GRADIENTS = "gradients"
    """Gradients over the data-parallel ranks."""
    EMBEDDING = "embedding"
    """The tied embedding's gradient over the first and the last stage."""


COMPRESSION = "compression"
"""Beside the kinds, what is timed too: making compressed messages and gradients, restoring them."""


@dataclass
class Sent:
    """Sums over the messages of one kind."""

    messages: int = 0
    compressed: int = 0
    """How many of the messages, or of the tensors reduced, were compressed."""
    sent_bytes: int = 0


class Traffic:
    """Counts at the calls that send, and times those calls where it was given a device.

    **What a time is.** From the call to its end on this rank, waiting for the other side included:
    a stage that waits for a message waits for its neighbour's computing too, which is the
    pipeline's bubble, and a reduction begins when its last rank is there. So a time says what a
    rank loses at that kind of communication, not how long the bytes were on the wire; faster links
    take away only part of it. Sent bytes are exact, and what compression saves in time is the
    difference between two runs.

    On a CPU the calls themselves wait. On CUDA they wait on the device: events are recorded around
    them on the current stream, and the process waits for them in :meth:`seconds` alone, so that
    measuring does not put off what follows.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """Start from nothing.

        Args:
            device: of this rank, whose calls are timed; None counts and does not time.
        """
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Start from nothing, such as after an iteration."""
        self.sent = {kind: Sent() for kind in Kind}
        self._seconds: dict[str, float] = dict.fromkeys((*map(str, Kind), COMPRESSION), 0.0)
        self._open: list[str] = []
        self._spans: list[tuple[str, str | None, Any, Any]] = []

    def message(self, kind: Kind, tensor: Tensor, compressed: bool = False) -> None:
        """Count a tensor sent to one other rank."""
        self._count(kind, tensor.nbytes, compressed)

    def all_reduce(
        self, kind: Kind, tensor: Tensor, num_ranks: int, compressed: bool = False
    ) -> None:
        """Count an all-reduce: a ring sends each rank's tensor 2 (n - 1) / n times."""
        self._count(kind, ring_bytes(tensor.nbytes, num_ranks), compressed)

    def _count(self, kind: Kind, sent_bytes: int, compressed: bool) -> None:
        sent = self.sent[kind]
        sent.messages += 1
        sent.compressed += compressed
        sent.sent_bytes += sent_bytes

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time of the body to a part, which is a kind or ``COMPRESSION``.

        Bodies may lie in each other, as a reduction lies in the compression of gradients: the time
        of the inner one is not the outer one's.
        """
        if self._device is None:
            yield
            return
        outer = self._open[-1] if self._open else None
        self._open.append(part)
        begin = self._mark()
        try:
            yield
        finally:
            self._open.pop()
            self._spans.append((part, outer, begin, self._mark()))

    def seconds(self) -> dict[str, float]:
        """Return each part's time since the last reset; on CUDA, wait until the device is there."""
        for part, outer, begin, end in self._spans:
            elapsed_s = self._elapsed_s(begin, end)
            self._seconds[part] += elapsed_s
            if outer is not None:
                self._seconds[outer] -= elapsed_s
        self._spans.clear()
        return dict(self._seconds)

    def _mark(self) -> Any:
        if self._device is None or self._device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _elapsed_s(self, begin: Any, end: Any) -> float:
        if isinstance(begin, float):
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
