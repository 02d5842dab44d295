"""Rates of the first CUDA device, and of gathering between all of them; of the CPU without one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import torch

from deep_optimizer_states.calibrate.device import (
    CPU_MATRIX_SIDE,
    Bench,
    adam_rate,
    busy_memory_rate,
    copy_rates,
    matrix_rate,
    pageable_rates,
    stream_rate,
)
from deep_optimizer_states.calibrate.findings import Findings
from deep_optimizer_states.cores import choose_cores, find_place
from deep_optimizer_states.device.base import Device
from deep_optimizer_states.device.emulated import EmulatedDevice
from deep_optimizer_states.kernels.torch_adam import make_host_adam
from deep_optimizer_states.timeline import Recorder

LINK_RATES = (
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
    "h2d_both_bytes_per_s",
    "d2h_both_bytes_per_s",
)
PAGEABLE_RATES = ("pageable_h2d_bytes_per_s", "pageable_d2h_bytes_per_s")
COMPUTE_RATES = ("device_flops_per_s", "device_stream_bytes_per_s")
"""Of what computes forward and backward: a GPU, or else the CPU."""
ADAM_RATES, GATHER_RATES = ("device_adam_parameters_per_s",), ("gather_bytes_per_s",)
BUSY_RATES = ("busy_memory_bytes_per_s",)
LOCK_RATES = ("page_lock_bytes_per_s",)
GPU_RATES = (
    *(*LINK_RATES, *PAGEABLE_RATES, *ADAM_RATES, *GATHER_RATES),
    *(*LOCK_RATES, *BUSY_RATES),
)
"""What there is on a GPU alone."""
_LOCK_BYTES = 2**29
_GATHER_BYTES = 2**26
_REPEATS = 5


def why_no_cuda() -> str:
    """Why there is nothing to measure; empty when there is."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    return "" if torch.cuda.is_available() else "no CUDA device found"


def num_cuda_steps() -> int:
    """Measurements that a machine with GPUs makes of them, gathering where there are several."""
    return 8 if torch.cuda.device_count() > 1 else 7


@contextlib.contextmanager
def open_bench(make: Callable[[Recorder], Device]) -> Iterator[Bench]:
    """A device for a while, with the recorder of its spans."""
    recorder = Recorder()
    device = make(recorder)
    try:
        yield Bench(device, recorder)
    finally:
        # After a fault of the GPU every call of CUDA fails, this one too; what failed is noted.
        with contextlib.suppress(RuntimeError):
            device.close()


def _cuda_device(recorder: Recorder) -> Device:
    from deep_optimizer_states.device.cuda import CudaDevice

    return CudaDevice(tail_mode=1, recorder=recorder)


def measure_cuda(found: Findings) -> None:
    """Measure the rates of the GPUs, and of page-locking, into ``found``."""
    with open_bench(_cuda_device) as bench:
        place = find_place(0, bench.device.pci_address)
        bench.device.near = choose_cores(place, [place])  # as a rank that has the machine to itself
        found.attempt("page-locked copies", LINK_RATES, lambda: copy_rates(bench))
        found.attempt("copies of ordinary memory", PAGEABLE_RATES, lambda: pageable_rates(bench))
        found.attempt("16-bit matrix products", COMPUTE_RATES[:1], lambda: matrix_rate(bench))
        found.attempt("device memory", COMPUTE_RATES[1:], lambda: stream_rate(bench))
        found.attempt("Adam on the device", ADAM_RATES, lambda: adam_rate(bench))
        found.attempt("page-locking", LOCK_RATES, lambda: lock_rate(bench.device))
    gpus = torch.cuda.device_count()
    if gpus > 1:
        found.attempt("gathering between GPUs", GATHER_RATES, lambda: gather_rate(gpus))
    else:
        found.lack("gathering", GATHER_RATES, "one GPU has nothing to gather from")


def measure_busy_memory(found: Findings, probe: Callable[[], object], probe_bytes: float) -> None:
    """Measure host memory while ``probe``, which moves ``probe_bytes``, and both links use it."""

    def measure() -> Mapping[str, float]:
        with open_bench(_cuda_device) as bench:
            return busy_memory_rate(bench, probe, probe_bytes)

    found.attempt("host memory beside copies of both ways", BUSY_RATES, measure)


def measure_cpu_as_device(found: Findings) -> None:
    """Measure the CPU where it is what computes forward and backward."""
    adam, side = make_host_adam(tail_mode=1), CPU_MATRIX_SIDE
    words = "16-bit matrix products of the CPU"
    with open_bench(lambda recorder: EmulatedDevice(adam, recorder=recorder)) as bench:
        found.attempt(words, COMPUTE_RATES[:1], lambda: matrix_rate(bench, side))
        found.attempt("memory, as the CPU's", COMPUTE_RATES[1:], lambda: stream_rate(bench))
    found.notes |= dict.fromkeys(COMPUTE_RATES, "of the CPU, which is the device here")


def lock_rate(device: Device) -> dict[str, float]:
    """Bytes a second of taking page-locked memory as the engine does: fresh pages, registered.

    Raises:
        RuntimeError: CUDA did not lock them.
    """
    seconds = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        tensor = device.empty_host(_LOCK_BYTES // 4, torch.float32)
        seconds.append(time.perf_counter() - begin)
        if not tensor.is_pinned():
            raise RuntimeError("host memory could not be page-locked; see how much is free")
        del tensor
    return {"page_lock_bytes_per_s": _LOCK_BYTES / median(seconds)}


def gather_rate(gpus: int) -> Mapping[str, Any]:
    """Bytes a second that each GPU receives in an all-gather between all of this node.

    Raises:
        RuntimeError: torch has no NCCL.
    """
    from torch.cuda import nccl

    numel = _GATHER_BYTES // 2
    shares = [torch.ones(numel, dtype=torch.bfloat16, device=f"cuda:{i}") for i in range(gpus)]
    wholes = [
        torch.empty(numel * gpus, dtype=torch.bfloat16, device=f"cuda:{i}") for i in range(gpus)
    ]
    if not nccl.is_available(shares):  # type: ignore[no-untyped-call, unused-ignore]
        raise RuntimeError("this torch has no NCCL")
    seconds = []
    for _ in range(_REPEATS + 1):
        _wait_for_all(gpus)
        begin = time.perf_counter()
        nccl.all_gather(shares, wholes)
        _wait_for_all(gpus)
        seconds.append(time.perf_counter() - begin)
    return {"gather_bytes_per_s": _GATHER_BYTES * (gpus - 1) / median(seconds[1:])}


def _wait_for_all(gpus: int) -> None:
    for gpu in range(gpus):
        torch.cuda.synchronize(gpu)
