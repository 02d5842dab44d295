"""Rates of this machine: of the host by threads, of the GPUs, and of the CPU where there is none.

Rates of a device are measured on the engine's own lanes and with their own clock, against
:class:`~deep_optimizer_states.core.device.base.Device`, so that every line runs on the emulated
device as well. Those of the host are measured in one process and on one set of arrays: each turn
runs every pass once, so that what else the machine does meets all of them alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from deep_optimizer_states.core.cache import copy_all
from deep_optimizer_states.core.device.base import Device, Lane
from deep_optimizer_states.core.device.emulated import EmulatedDevice
from deep_optimizer_states.core.host import choose_cores, find_place
from deep_optimizer_states.core.kernels.adam import (
    AdamScalars,
    AdamTensors,
    BetaPowers,
    adam_scalars,
)
from deep_optimizer_states.core.kernels.host import HostAdam
from deep_optimizer_states.errors import KernelError

HOST_RATES = (
    "host_stream_bytes_per_s",
    "host_fused_parameters_per_s",
    "host_adam_parameters_per_s",
)
LINK_RATES = (
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
    "h2d_both_bytes_per_s",
    "d2h_both_bytes_per_s",
)
PAGEABLE_RATES = ("pageable_h2d_bytes_per_s", "pageable_d2h_bytes_per_s")
COMPUTE_RATES = ("device_flops_per_s", "device_stream_bytes_per_s")
"""Rates of what computes forward and backward: a GPU, or else the CPU."""
ADAM_RATES, GATHER_RATES = ("device_adam_parameters_per_s",), ("gather_bytes_per_s",)
GPU_RATES = (*LINK_RATES, *PAGEABLE_RATES, *ADAM_RATES, *GATHER_RATES)
"""Rates that only a GPU has."""

NUMEL = 2**25
"""Elements of each array of the host: 670 MB in all, beyond any cache."""
STREAM_BYTES = 28
"""Read and written a parameter by Adam in one pass with 16-bit gradients and weights."""
COPY_BYTES = 2**28
"""Size of one copy; a tile's state is as large."""
ADAM_NUMEL = 2**26
MATRIX_SIDE = 8192
CPU_MATRIX_SIDE = 1024
"""Where the CPU is the device."""
LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1
_BYTES_A_PARAMETER = 20
_MOST_TURNS, TURNS_S = 9, 1.5
_OP_ID = -20242  # DeepSpeed numbers its optimizers from 0
_COUNT = 12
"""Pieces of work that are timed on a lane, after one that is not."""
_GATHER_BYTES, _REPEATS = 2**26, 5

Turn = tuple[Lane, Callable[[], None]]
"""A lane, and what it does in a turn."""
Pass = tuple[Callable[[int], object], float]
"""A function that runs on n threads, and the amount that it moves a call."""


@dataclass
class Findings:
    """Rates by their names in the profile."""

    say: Callable[[str], None]  # gets a line of progress
    rates: dict[str, Any] = field(default_factory=dict)  # a number, or [(threads, rate), ...]
    notes: dict[str, str] = field(default_factory=dict)  # a remark on a rate, or why it is missing

    def attempt(
        self, what: str, names: Sequence[str], work: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Take the rates that ``work`` measures; what it cannot measure is noted as missing."""
        try:
            self.say(f"{what} ...")
            found = work()
        except Exception as error:  # noqa: BLE001 - one rate must not cost the others
            self.lack(what, names, str(error).strip() or type(error).__name__)
            return
        self.rates |= found
        for name in names:
            self.say(f"  {name}: {found[name] / 1e9:.3g} G/s")

    def lack(self, what: str, names: Sequence[str], reason: str) -> None:
        """Note, and say, why rates are not measured."""
        first = reason.splitlines()[0]
        self.notes |= dict.fromkeys(names, f"not measured: {first}")
        self.say(f"{what}: not measured: {first}")


def adam_settings() -> AdamScalars:
    """Return the scalars of a first step."""
    group = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
    powers = BetaPowers(BETAS).at(1, BETAS)
    return adam_scalars({**group, "bias_correction": True}, powers, 1.0, decoupled=True)


# The host.


def fitting_numel(free_bytes: int) -> int:
    """Return the elements of arrays that take at most a quarter of the free memory."""
    return min(NUMEL, free_bytes // (4 * _BYTES_A_PARAMETER) // 16 * 16)


def measure_host(found: Findings, numel: int, thread_counts: Sequence[int]) -> None:
    """Measure the rates of passes over arrays of ``numel`` elements, by threads."""
    passes = host_passes(numel, found)
    curves: dict[str, list[tuple[int, float]]] = {name: [] for name in passes}
    for threads in thread_counts:
        set_threads(threads)
        found.say(f"the host with {threads} thread(s) ...")
        taken = _turns(passes, threads)
        for name, (_, amount) in passes.items():
            curves[name].append((threads, amount / median(taken[name])))
        shown = (f"{name.split('_')[1]} {curves[name][-1][1] / 1e9:.3g}" for name in passes)
        found.say(f"  {threads} thread(s): {', '.join(shown)} G/s")
    found.rates |= curves


def host_passes(numel: int, found: Findings) -> dict[str, Pass]:
    """Return what can be run on this machine, by its rate; what cannot is noted in ``found``."""

    def filled(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        # All threads write, so that the pages lie near all cores.
        return torch.empty(numel, dtype=dtype).fill_(value)

    half, settings = torch.bfloat16, adam_settings()
    state = (filled(0.5), filled(0.01), filled(1e-4))
    tensors = AdamTensors(*state, filled(0.01, half), filled(0.0, half))
    passes: dict[str, Pass] = {}
    try:
        adam = HostAdam(tail_mode=1)
    except KernelError as error:
        found.lack("this engine's Adam", HOST_RATES[:2], str(error))
    else:
        stream, fused, _ = HOST_RATES
        moved = float(STREAM_BYTES * numel)
        passes[stream] = (lambda threads: adam.probe(tensors, settings, threads), moved)
        passes[fused] = (lambda n: adam.step(tensors, settings, numel, n), float(numel))
    try:
        passes[HOST_RATES[2]] = (_stock_adam(state, filled(0.01)), float(numel))
    except Exception as error:  # noqa: BLE001 - DeepSpeed's builder raises whatever its tools do
        found.lack("DeepSpeed's Adam", HOST_RATES[2:], f"cpu_adam cannot be built: {error}")
    return passes


def _stock_adam(state: Sequence[Tensor], grad: Tensor) -> Callable[[int], object]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from deepspeed.ops.op_builder import CPUAdamBuilder

        op: Any = CPUAdamBuilder().load()
    settings = (LR, *BETAS, EPS, WEIGHT_DECAY)
    op.create_adam(_OP_ID, *settings, True, False)
    master, *moments = state
    return lambda threads: op.adam_update(_OP_ID, 1, *settings, True, master, grad, *moments)


def _turns(passes: Mapping[str, Pass], threads: int) -> dict[str, list[float]]:
    """Return the seconds of each pass: a turn to warm up, then three at least."""
    taken: dict[str, list[float]] = {name: [] for name in passes}
    begin = 0.0
    for turn in range(_MOST_TURNS + 1):
        if turn == 1:
            begin = time.perf_counter()
        if turn > 3 and time.perf_counter() - begin > TURNS_S:
            break
        for name, (work, _) in passes.items():
            start = time.perf_counter()
            work(threads)
            if turn:
                taken[name].append(time.perf_counter() - start)
    return taken


def set_threads(threads: int) -> None:
    """Let torch, and every OpenMP runtime that its extensions brought along, use so many."""
    torch.set_num_threads(threads)
    for path in _openmp_runtimes(Path("/proc/self/maps").read_text(encoding="utf-8")):
        ctypes.CDLL(path).omp_set_num_threads(ctypes.c_int(threads))


def _openmp_runtimes(maps: str) -> list[str]:
    """Return the paths of the OpenMP runtimes in a process's memory map."""
    found = re.findall(r"(/\S*/lib(?:gomp|iomp5|omp)[-.][^/\n]*)$", maps, re.MULTILINE)
    return sorted(set(found))


# A device.


def lane_rates(device: Device, *work: Turn, amount: float, count: int = _COUNT) -> list[float]:
    """Measure what each lane moves a second while all of them work.

    Args:
        device: Whose lanes work.
        work: Lanes, each with a piece of work that moves ``amount``.
        amount: Bytes, parameters or operations.
        count: How many pieces each lane does, after one that is not timed.
    """
    for lane, piece in work:
        lane.submit("calibration", piece)
    device.synchronize()
    stamps = [[lane.stamp()] for lane, _ in work]
    for _ in range(count):
        for (lane, piece), taken in zip(work, stamps, strict=True):
            lane.submit("calibration", piece)
            taken.append(lane.stamp())
    device.synchronize()
    return [
        amount / median(end.seconds_since(begin) for begin, end in itertools.pairwise(taken))
        for taken in stamps
    ]


@contextlib.contextmanager
def opened(device: Device) -> Iterator[Device]:
    """Close a device after the block."""
    try:
        yield device
    finally:
        # After a fault of the GPU every call of CUDA fails, this one too; what failed is noted.
        with contextlib.suppress(RuntimeError):
            device.close()


def copy_rates(device: Device, num_bytes: int = COPY_BYTES) -> dict[str, float]:
    """Measure bytes a second of page-locked copies: each way alone, and both at once.

    Raises:
        RuntimeError: The host memory could not be page-locked.
    """
    numel = num_bytes // 4
    source, target = (device.empty_host(numel, torch.float32).zero_() for _ in range(2))
    if torch.cuda.is_available() and not source.is_pinned():
        raise RuntimeError("host memory could not be page-locked; see how much is free")
    inside, outside = (device.empty_device(numel, torch.float32) for _ in range(2))
    down, up = (device.h2d, _copy(inside, source)), (device.d2h, _copy(target, outside))
    alone = [lane_rates(device, way, amount=num_bytes)[0] for way in (down, up)]
    return dict(
        zip(LINK_RATES, alone + lane_rates(device, down, up, amount=num_bytes), strict=True)
    )


def pageable_rates(device: Device, num_bytes: int = COPY_BYTES) -> dict[str, float]:
    """Measure bytes a second of copies from and to memory that is not page-locked.

    What goes to the device are 16-bit weights, as stock DeepSpeed makes them of fp32 ones: torch
    casts them on the host, into memory that it takes for every copy.
    """
    host, numel = torch.zeros(num_bytes // 4), num_bytes // 4
    inside = device.empty_device(numel, torch.float32)
    weights = device.empty_device(numel, torch.bfloat16)
    down, up = (device.h2d, _copy(weights, host)), (device.d2h, _copy(host, inside))
    ways = (down, 2 * numel), (up, 4 * numel)
    rates = [lane_rates(device, way, amount=amount, count=4)[0] for way, amount in ways]
    return dict(zip(PAGEABLE_RATES, rates, strict=True))


def adam_rate(device: Device, numel: int = ADAM_NUMEL) -> dict[str, float]:
    """Measure parameters a second of the device's Adam."""
    half = torch.bfloat16
    state = [device.empty_device(numel, torch.float32) for _ in range(3)]
    grad, weights = (device.empty_device(numel, half) for _ in range(2))
    tensors = AdamTensors(state[0], state[1], state[2], grad, weights)
    settings = adam_settings()

    def fill() -> None:
        for tensor in vars(tensors).values():
            tensor.fill_(0.01)

    device.compute.submit("calibration", fill)
    step = (device.compute, lambda: device.adam(tensors, settings, numel))
    return {"device_adam_parameters_per_s": lane_rates(device, step, amount=numel)[0]}


def matrix_rate(device: Device, side: int = MATRIX_SIDE) -> dict[str, float]:
    """Measure floating-point operations a second of bf16 matrix products."""
    half = torch.bfloat16
    a, b, c = (device.empty_device(side * side, half).view(side, side) for _ in range(3))

    def fill() -> None:
        a.normal_()
        b.normal_()

    def product() -> None:
        torch.mm(a, b, out=c)

    device.compute.submit("calibration", fill)
    (rate,) = lane_rates(device, (device.compute, product), amount=2 * side**3)
    return {"device_flops_per_s": rate}


def stream_rate(device: Device, num_bytes: int = COPY_BYTES) -> dict[str, float]:
    """Measure bytes a second of the device's own memory, read and written."""
    source, target = (device.empty_device(num_bytes // 4, torch.float32) for _ in range(2))
    (rate,) = lane_rates(device, (device.compute, _copy(target, source)), amount=2 * num_bytes)
    return {"device_stream_bytes_per_s": rate}


def _copy(target: Tensor, source: Tensor) -> Callable[[], None]:
    return lambda: copy_all([target], [source])


def gather_rate(gpus: int) -> dict[str, float]:
    """Measure bytes a second that each GPU receives in an all-gather between all of this node.

    Raises:
        RuntimeError: torch has no NCCL.
    """
    from torch.cuda import nccl

    numel, half = _GATHER_BYTES // 2, torch.bfloat16
    shares = [torch.ones(numel, dtype=half, device=f"cuda:{i}") for i in range(gpus)]
    wholes = [torch.empty(numel * gpus, dtype=half, device=f"cuda:{i}") for i in range(gpus)]
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
        # No deadline: one collective is measured, and NCCL's watchdog ends what hangs.
        torch.cuda.synchronize(gpu)


# The processors of this machine.


def why_no_cuda() -> str:
    """Return why there is no GPU to measure; empty when there is one."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    return "" if torch.cuda.is_available() else "no CUDA device found"


def measure_cuda(found: Findings) -> None:
    """Measure the rates of the GPUs, and of page-locking, into ``found``."""
    from deep_optimizer_states.core.device.cuda import CudaDevice

    with opened(CudaDevice(tail_mode=1)) as device:
        place = find_place(0, device.pci_address)
        # As a rank that has the machine to itself.
        device.cpu_affinity = choose_cores(place, [place])
        found.attempt("page-locked copies", LINK_RATES, lambda: copy_rates(device))
        found.attempt("copies of ordinary memory", PAGEABLE_RATES, lambda: pageable_rates(device))
        found.attempt("16-bit matrix products", COMPUTE_RATES[:1], lambda: matrix_rate(device))
        found.attempt("device memory", COMPUTE_RATES[1:], lambda: stream_rate(device))
        found.attempt("Adam on the device", ADAM_RATES, lambda: adam_rate(device))
    gpus = torch.cuda.device_count()
    if gpus > 1:
        found.attempt("gathering between GPUs", GATHER_RATES, lambda: gather_rate(gpus))
    else:
        found.lack("gathering", GATHER_RATES, "one GPU has nothing to gather from")


def measure_cpu_as_device(found: Findings) -> None:
    """Measure the CPU where it is what computes forward and backward."""
    adam, side = HostAdam(tail_mode=1), CPU_MATRIX_SIDE
    words = "16-bit matrix products of the CPU"
    with opened(EmulatedDevice(adam)) as device:
        found.attempt(words, COMPUTE_RATES[:1], lambda: matrix_rate(device, side))
        found.attempt("memory, as the CPU's", COMPUTE_RATES[1:], lambda: stream_rate(device))
    for name in COMPUTE_RATES:
        found.notes.setdefault(name, "of the CPU, which is the device here")
