"""Waits of DeepSpeed's own calls while an update is in flight.

[Note: synchronising] DeepSpeed waits for the whole device in places where its own work is all there
is: its throughput timer before every forward and after every step, and the gather of persistent
parameters at the end of ``step()``. With an update in flight that would wait for every tile on the
device, and forward would overlap with none of them. There the caller's own stream is waited for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from deepspeed.accelerator import get_accelerator


@contextlib.contextmanager
def own_stream_alone() -> Iterator[None]:
    """Make DeepSpeed's ``synchronize`` wait for the current stream, see [Note: synchronising]."""
    accelerator = get_accelerator()
    stock = accelerator.__dict__.get("synchronize")

    def synchronize(*_args: Any) -> None:
        stream = accelerator.current_stream()
        if stream is not None:  # a CPU has none
            stream.synchronize()

    accelerator.synchronize = synchronize
    try:
        yield
    finally:
        if stock is None:
            del accelerator.synchronize
        else:
            accelerator.synchronize = stock


def time_own_stream(timer: Any) -> None:
    """Make DeepSpeed's throughput timer wait for the caller's stream, see [Note: synchronising].

    Args:
        timer: The engine's. One whose ``timers.throughput.synchronized`` the user set stays as it
            is.
    """
    if "synchronized" not in timer.config.model_fields_set:
        for name in ("start", "stop"):
            setattr(timer, name, own_stream_alone()(getattr(timer, name)))
