"""Waits of DeepSpeed's own calls while an update is in flight.

[Note: synchronising] DeepSpeed waits for the whole device in places where its own work is all there
is: its throughput timer before every forward and after every step, and the gather of persistent
parameters at the end of ``step()``. With an update in flight that would wait for every tile on the
device, and forward would overlap with none of them. There the caller's own stream is waited for.

DeepSpeed has no setting for the gather, which asks the accelerator of the process. So ``install``
wraps that accelerator's ``synchronize``, and a thread says for how long it means its own stream:
other threads, and the same one outside of these places, wait for the device as ever.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


class _Here(threading.local):
    depth = 0


_here = _Here()


@contextlib.contextmanager
def own_stream_alone() -> Iterator[None]:
    """Let this thread's ``synchronize`` wait for its current stream, see [Note: synchronising]."""
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1


def synchronize(original: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Wait for the device as DeepSpeed's accelerator does, or for the current stream alone.

    Args:
        original: The accelerator's own method.
        accelerator: DeepSpeed's, of this process.
        args: Its arguments.
        kwargs: More of them.
    """
    if not _here.depth:
        return original(accelerator, *args, **kwargs)
    stream = accelerator.current_stream()
    # No deadline: DeepSpeed's own wait, for less than it would wait for.
    return None if stream is None else stream.synchronize()  # a CPU has none


def time_own_stream(timer: Any) -> None:
    """Make DeepSpeed's throughput timer wait for the caller's stream, see [Note: synchronising].

    Args:
        timer: The engine's. One whose ``timers.throughput.synchronized`` the user set stays as it
            is.
    """
    if "synchronized" not in timer.config.model_fields_set:
        for name in ("start", "stop"):
            setattr(timer, name, own_stream_alone()(getattr(timer, name)))
