"""The calls that compress messages and gradients, on made-up tensors, and the memory they take."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, distributed as dist
from torch.profiler import ProfilerActivity, profile

from optimus_cc import Settings, Traffic
from optimus_cc.backpropagation import BackwardCompressor
from optimus_cc.memory import held_bytes
from optimus_cc.selective import compressor

SIGNAL_RANK = 8
NOISE = 0.1
_CPU = [ProfilerActivity.CPU]


def made_up(shape: torch.Size, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """A tensor of low rank with noise in it, as gradients are.

    Args:
        shape: of at least two dimensions, of which the last are the columns.
        dtype: of the result.
        device: of the result.
        seed: of its numbers.

    Returns:
        A product of normal matrices of :data:`SIGNAL_RANK`, its elements of variance 1, and normal
        noise of :data:`NOISE` times that size.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        numbers: Tensor = torch.randn(sizes, generator=generator, device=device)
        return numbers

    columns = shape[-1]
    signal = normal(shape.numel() // columns, SIGNAL_RANK) @ normal(SIGNAL_RANK, columns)
    noisy = signal / SIGNAL_RANK**0.5 + NOISE * normal(*signal.shape)
    made: Tensor = noisy.view(shape).to(dtype)
    return made


class Message:
    """An activation gradient, as it is sent and as it is received."""

    def __init__(self, settings: Settings, message: Tensor) -> None:
        """Keep the message, (sequence, micro-batch, hidden), and compress it once."""
        self._message = message
        self._compressor = BackwardCompressor(settings)
        self._packed = self._compressor.compress(message, in_epilogue=True)

    def compress(self) -> None:
        """What the sender does."""
        self._packed = self._compressor.compress(self._message, in_epilogue=True)

    def restore(self) -> None:
        """What the receiver does."""
        self._compressor.restore(self._packed, self._message.shape, in_epilogue=True)

    @property
    def sent_bytes(self) -> int:
        """Of the compressed message."""
        return self._packed.nbytes

    @property
    def state_bytes(self) -> int:
        """What the sender keeps for the next message."""
        return held_bytes(self._compressor.state_dict())


class Gradients:
    """Equal matrices on the only rank of a group, so that averaging is compression alone."""

    def __init__(self, settings: Settings, matrices: Tensor, group: dist.ProcessGroup) -> None:
        """Keep copies of the matrices, (number, rows, columns)."""
        self._together, self._apart = ([m.clone() for m in matrices] for _ in range(2))
        self._traffic = Traffic()
        self._one = compressor(settings, group, self._traffic)
        self._each = [compressor(settings, group, self._traffic) for _ in matrices]

    def at_once(self) -> None:
        """Compress and restore all of them as one stack."""
        self._one.average(self._together)

    def one_by_one(self) -> None:
        """Compress and restore one after the other."""
        for one, matrix in zip(self._each, self._apart, strict=True):
            one.average([matrix])

    @property
    def state_bytes(self) -> int:
        """What a rank keeps for the next iteration."""
        return held_bytes(self._one.state_dict())


@contextlib.contextmanager
def _silent_profiler() -> Iterator[None]:
    """Throw away what torch's profiler prints by itself whenever it starts and stops."""
    kept = os.dup(2)
    try:
        with Path(os.devnull).open("w") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def most_allocated_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Most bytes of tensors that a call has allocated at one time, those of before left out."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with _silent_profiler(), profile(activities=_CPU, profile_memory=True) as recorded:
            work()
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    held = most = 0
    for event in sorted(changes, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return most
