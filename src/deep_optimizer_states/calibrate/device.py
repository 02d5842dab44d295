"""Rates of a device, measured on the engine's own lanes and with their own clock.

Written against :class:`~deep_optimizer_states.device.base.Device`, so that every line runs on the
emulated device as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from deep_optimizer_states.calibrate.host import adam_settings
from deep_optimizer_states.device.base import Device, Lane
from deep_optimizer_states.executor import copy_all
from deep_optimizer_states.kernels.tensors import AdamTensors
from deep_optimizer_states.timeline import Recorder, Span

COPY_BYTES = 2**28
"""Of one copy; a tile's state is of this size."""
ADAM_NUMEL = 2**26
MATRIX_SIDE = 8192
CPU_MATRIX_SIDE = 1024
"""Where the CPU is the device."""
_COUNT = 12
"""Pieces of work that are timed, after one that is not."""
_PROBES = 8
"""Passes of the host's probe beside copies of both ways."""


Turn = tuple[Lane, Callable[[], None]]
"""A lane, and what it does in a turn."""


class Bench:
    """Runs work on a device's lanes and gives its spans.

    Args:
        device: Made with ``recorder``.
        recorder: Gets its spans.
    """

    def __init__(self, device: Device, recorder: Recorder) -> None:
        self.device = device
        self._recorder = recorder

    def spans(
        self,
        *work: Turn,
        count: int = _COUNT,
        beside: Callable[[], object] = lambda: None,
    ) -> list[Span]:
        """Spans of ``count`` turns, each lane's work submitted in every turn.

        Args:
            work: Lanes and what each does in a turn.
            count: Turns.
            beside: Called once while the lanes work.
        """
        self._run(work, 1, lambda: None)
        self.device.set_clock()
        return self._run(work, count, beside)

    def _run(
        self,
        work: Sequence[Turn],
        count: int,
        beside: Callable[[], object],
    ) -> list[Span]:
        for _ in range(count):
            for lane, piece in work:
                lane.submit("calibration", piece)
        beside()
        self.device.synchronize()
        return self._recorder.take()


def copy_rates(bench: Bench, num_bytes: int = COPY_BYTES) -> dict[str, float]:
    """Bytes a second of page-locked copies: each way alone, and both at once.

    Raises:
        RuntimeError: The host memory could not be page-locked.
    """
    device = bench.device
    down, up = _copies_both_ways(device, num_bytes)
    both = bench.spans(down, up)
    return {
        "h2d_bytes_per_s": _rate(bench.spans(down), num_bytes),
        "d2h_bytes_per_s": _rate(bench.spans(up), num_bytes),
        "h2d_both_bytes_per_s": rate_beside(both, device.h2d.name, num_bytes),
        "d2h_both_bytes_per_s": rate_beside(both, device.d2h.name, num_bytes),
    }


def busy_memory_rate(
    bench: Bench, probe: Callable[[], object], probe_bytes: float, num_bytes: int = COPY_BYTES
) -> dict[str, float]:
    """Bytes a second that host memory gives the cores and both ways of the link together.

    Args:
        bench: Whose device copies.
        probe: Streams through host memory on the cores.
        probe_bytes: What one call of it reads and writes.
        num_bytes: Of one copy.

    Raises:
        RuntimeError: The host memory could not be page-locked, or nothing worked side by side.
    """
    device, probes = bench.device, []

    def run_probes() -> None:
        for _ in range(_PROBES):
            begin_s = time.perf_counter()
            probe()
            probes.append(Span("CPU", "probe", begin_s, time.perf_counter()))

    # Copies enough to last as long as the probes do on a machine with slow memory.
    copies = bench.spans(*_copies_both_ways(device, num_bytes), count=4 * _COUNT, beside=run_probes)
    amounts = {device.h2d.name: num_bytes, device.d2h.name: num_bytes, "CPU": probe_bytes}
    total = sum(rate_beside([*copies, *probes], *moved) for moved in amounts.items())
    return {"busy_memory_bytes_per_s": total}


def _copies_both_ways(device: Device, num_bytes: int) -> tuple[Turn, Turn]:
    """A page-locked copy to the device and one from it, each with its lane."""
    numel = num_bytes // 4
    source, target = (device.empty_host(numel, torch.float32).zero_() for _ in range(2))
    if torch.cuda.is_available() and not source.is_pinned():
        raise RuntimeError("host memory could not be page-locked; see how much is free")
    inside, outside = (device.empty_device(numel, torch.float32) for _ in range(2))
    return (device.h2d, _copy(inside, source)), (device.d2h, _copy(target, outside))


def pageable_rates(bench: Bench, num_bytes: int = COPY_BYTES) -> dict[str, float]:
    """Bytes a second of copies from and to memory that is not page-locked."""
    device, host = bench.device, torch.zeros(num_bytes // 4)
    inside = device.empty_device(num_bytes // 4, torch.float32)
    down = bench.spans((device.h2d, _copy(inside, host)), count=4)
    up = bench.spans((device.d2h, _copy(host, inside)), count=4)
    return {
        "pageable_h2d_bytes_per_s": _rate(down, num_bytes),
        "pageable_d2h_bytes_per_s": _rate(up, num_bytes),
    }


def adam_rate(bench: Bench, numel: int = ADAM_NUMEL) -> dict[str, float]:
    """Parameters a second of the device's Adam."""
    device, half = bench.device, torch.bfloat16
    state = [device.empty_device(numel, torch.float32) for _ in range(3)]
    grad, weights = (device.empty_device(numel, half) for _ in range(2))
    tensors = AdamTensors(state[0], state[1], state[2], grad, weights)
    settings = adam_settings()

    def fill() -> None:
        for tensor in vars(tensors).values():
            tensor.fill_(0.01)

    device.compute.submit("calibration", fill)
    spans = bench.spans((device.compute, lambda: device.adam(tensors, settings, numel)))
    return {"device_adam_parameters_per_s": _rate(spans, numel)}


def matrix_rate(bench: Bench, side: int = MATRIX_SIDE) -> dict[str, float]:
    """Floating-point operations a second of bf16 matrix products."""
    device, half = bench.device, torch.bfloat16
    a, b, c = (device.empty_device(side * side, half).view(side, side) for _ in range(3))

    def fill() -> None:
        a.normal_()
        b.normal_()

    def product() -> None:
        torch.mm(a, b, out=c)

    device.compute.submit("calibration", fill)
    spans = bench.spans((device.compute, product))
    return {"device_flops_per_s": _rate(spans, 2 * side**3)}


def stream_rate(bench: Bench, num_bytes: int = COPY_BYTES) -> dict[str, float]:
    """Bytes a second of the device's own memory, read and written."""
    device = bench.device
    source, target = (device.empty_device(num_bytes // 4, torch.float32) for _ in range(2))
    spans = bench.spans((device.compute, _copy(target, source)))
    return {"device_stream_bytes_per_s": _rate(spans, 2 * num_bytes)}


def rate_beside(spans: Sequence[Span], lane: str, amount: float) -> float:
    """What a lane moves a second while every other lane of ``spans`` works too.

    Args:
        spans: Of several lanes, each busy without a gap.
        lane: Whose rate.
        amount: Moved by each of its spans.

    Raises:
        RuntimeError: The lanes never worked at the same time.
    """
    lanes = {span.lane for span in spans}
    own = [[span for span in spans if span.lane == name] for name in lanes]
    begin_s = max(min(span.begin_s for span in one) for one in own)
    end_s = min(max(span.end_s for span in one) for one in own)
    if end_s <= begin_s:
        raise RuntimeError("copies of both ways did not overlap")
    shares = (
        max(0.0, min(span.end_s, end_s) - max(span.begin_s, begin_s)) / (span.end_s - span.begin_s)
        for span in spans
        if span.lane == lane
    )
    return amount * sum(shares) / (end_s - begin_s)


def _copy(target: Tensor, source: Tensor) -> Callable[[], None]:
    return lambda: copy_all([target], [source])


def _rate(spans: Sequence[Span], amount: float) -> float:
    return amount / median(span.end_s - span.begin_s for span in spans)
