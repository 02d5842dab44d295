"""What happens around DeepSpeed's own calls while an update is in flight.

[Note: synchronising] DeepSpeed waits for the whole device in places where its own work is all there
is: its throughput timer before every forward and after every step, and the gather of persistent
parameters at the end of ``step()``. With an update in flight that would wait for every tile on the
device, and forward would overlap with none of them. There the caller's own stream is waited for.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from deepspeed.accelerator import get_accelerator

Handler = Callable[[int, FrameType | None], Any]
_HELD_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


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


@contextlib.contextmanager
def signals_held_back() -> Iterator[None]:
    """Call Python's signal handlers after the block, and not in the middle of it.

    Ctrl-C between an update and the counters that belong to it would leave an engine whose next
    checkpoint is wrong. A second signal of the same number is let through at once: something hangs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run on the main thread alone
        return
    held: dict[int, FrameType | None] = {}
    handlers: dict[int, Handler] = {}
    number: int

    def hold(number: int, frame: FrameType | None) -> None:
        if number in held:
            handlers[number](number, frame)
        else:
            held[number] = frame

    for number in _HELD_BACK:
        handler = signal.getsignal(number)
        if callable(handler):
            handlers[number] = handler
            signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is hold:
                signal.signal(number, handler)
        for number, frame in held.items():
            handlers[number](number, frame)
