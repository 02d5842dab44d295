"""What this machine has, whether a point can run on it, and how long that will take.

Memory is that of the model of memory, and somewhat more: a run that is let through should not die
of memory after an hour. A run that the model does not know is let through, which is said.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from configs.errors import ConfigError
from configs.files import read_json, write_json
from configs.schema import Point
from configs.study import GPU, TWO_RANKS
from deep_optimizer_states.core.host import free_host_bytes, usable_cores
from deep_optimizer_states.predict.machine import Machine as Profile, load_machine
from deep_optimizer_states.predict.memory import peaks_of, with_share_for_host
from deep_optimizer_states.predict.predict import predict
from deep_optimizer_states.predict.workload import WorkloadError
from deep_optimizer_states.units import GIB
from launch import links
from launch.identity import settings_key, what_chooses_kernels
from launch.launchers import TORCHRUN
from launch.records import Record
from launch.simulate.workloads import workload_of

if TYPE_CHECKING:  # trainers ask this module where their ranks run
    from launch.backends.protocol import Trainer
    from launch.task import RunOptions

MARGIN = 1.1
"""A run takes up to this much more than the model's figure, which is that of a usual run."""
USABLE = 0.95
"""Share of the free memory that a run may count on."""
GPU_PROFILE, CPU_PROFILE = "h200x1", "cpu-only"
"""Shipped profiles that stand for a machine with GPUs, and for one without."""
HALF_TYPES = frozenset({"bf16", "fp16"})
"""Types of 16 bits, which not every processor multiplies natively."""
_TYPES_FILE = "half-types.json"
"""In the environment: for which of them torch has a native product here."""
FAST = "fp32"
"""Type that every processor multiplies natively."""
NO_PRODUCT = "torch has no native bf16 matrix product on this processor"
GPU_START_S, CPU_START_S = 45.0, 7.0
"""From the launch to the first iteration; on a CPU of each rank that has a core to itself."""
MICRO_BATCH_S = 0.02
"""What Python and DeepSpeed take in a micro-batch on a CPU, which small models wait for most."""
SLOW_BF16 = 12.0
"""How much longer a bf16 matrix product takes where torch has no native one: the middle of 2.4 to
66 times as long as in fp32, by the matrices' size, on a processor restricted to AVX2 (measured)."""
AS_BEFORE = "as it took before"
"""What :attr:`Estimate.how` says of a time that an earlier run took."""

_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_ASK_MEMORY = """
import json, torch
free = [torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]
print(json.dumps(free))
"""
_ASK_TYPES = """
import json, torch
def multiplies(name):
    try:
        return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")())
    except (AttributeError, RuntimeError):
        return False  # a torch without oneDNN multiplies both in loops of its own
# oneDNN counts bf16 as supported from AVX-512 on, but without one of these it computes in fp32 and
# converts: three times as long as fp32.
processor = getattr(getattr(torch, "cpu", None), "get_capabilities", dict)()
has_bf16 = any(map(processor.get, ("avx512_bf16", "amx_bf16", "avx_ne_convert")))
emulates = processor.get("architecture") == "x86_64" and not has_bf16
types = [name for name in ("bf16", "fp16") if multiplies(name)]
print(json.dumps([name for name in types if not (name == "bf16" and emulates)]))
"""


@dataclass(frozen=True)
class Host:
    """Free memory of the host and of each GPU that torch can use, and what its processor can do."""

    host_free_bytes: int
    """Memory that new processes can have, within the container's limit."""
    gpu_free_bytes: tuple[int, ...] = ()
    """Free memory of each GPU; empty without one."""
    half_types: Callable[[], frozenset[str]] = lambda: HALF_TYPES
    """Return the types of 16 bits for which torch has a native matrix product on the processor.

    A function, because asking torch takes seconds and few commands need the answer."""


def machine_of(profile: Profile) -> Host:
    """Return a machine of a profile on which nothing else runs."""
    gpus = (int(profile.device_memory_bytes or 0),) * profile.gpus
    return Host(int(profile.host_memory_bytes), gpus)


def probe_machine() -> Host:
    """Look at this machine. Torch is asked in a process of its own, and only where a GPU can be."""
    gpus: tuple[int, ...] = ()
    if any(Path(name).exists() for name in _DEVICE_FILES):
        # No torch, a torch for CPUs, or a driver that does not answer: the ranks would see none.
        gpus = tuple(_asked_of_torch(_ASK_MEMORY) or ())
    return Host(free_host_bytes(), gpus, ask_half_types)


@functools.cache
def ask_half_types() -> frozenset[str]:
    """Ask torch, in a process of its own, which types of 16 bits the processor multiplies natively.

    Variables that restrict torch's kernels count, since the ranks get them too. Without an answer
    nothing is known against either type. The environment keeps the answer, as long as torch, the
    processor and these variables are the same: to import torch takes two seconds.
    """
    path, asked = Path(sys.prefix) / _TYPES_FILE, {**what_chooses_kernels(), "question": _ASK_TYPES}
    known = read_json(path)
    if known.get("asked") == asked and isinstance(known.get("types"), list):
        return HALF_TYPES.intersection(known["types"])
    found = _asked_of_torch(_ASK_TYPES)
    if found is None:
        return HALF_TYPES
    with contextlib.suppress(OSError):  # another user's environment
        write_json(path, {"asked": asked, "types": found})
    return frozenset(found)


def _asked_of_torch(program: str) -> list[Any] | None:
    """The list that a program prints as JSON; None where it fails."""
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ}  # as the ranks number them
    command = [sys.executable, "-c", program]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=True
        )
        return list(json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, IndexError):
        return None


def runs_on_gpu(point: Point, machine: Host) -> bool:
    """Return whether the point's ranks use CUDA on this machine."""
    return point.device == "cuda" or (point.device == "auto" and bool(machine.gpu_free_bytes))


def needed_bytes(point: Point, machine: Host, trainer: Trainer) -> tuple[int, int]:
    """Predict the memory that a point needs: of the host for all ranks, and of the fullest GPU.

    Without GPUs the host holds everything, and the second is 0.

    Raises:
        WorkloadError: the model of memory does not know such a run; names the setting.
    """
    on_gpu, gpus = runs_on_gpu(point, machine), machine.gpu_free_bytes
    workload = trainer.workload(point)
    if on_gpu and gpus:
        free = machine.host_free_bytes, min(gpus[: point.num_ranks])
        host, device = (USABLE / MARGIN * one for one in free)
        workload = with_share_for_host(workload, host, device, point.num_ranks)
    peaks = peaks_of(workload, on_gpu)
    taken = peaks.device_bytes if on_gpu else 0
    return int(MARGIN * peaks.host_bytes * point.num_ranks), int(MARGIN * taken)


def shortages(point: Point, machine: Host, trainer: Trainer) -> list[str]:
    """Return what the point needs and this machine lacks of GPUs and memory, a line each.

    Empty where there is enough, or where the point's memory is not predicted.
    """
    on_gpu, gpus = runs_on_gpu(point, machine), machine.gpu_free_bytes
    if on_gpu and len(gpus) < point.num_ranks:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        fewer = len(gpus) // (point.tp * point.pp)
        return [
            f"tp {point.tp} x pp {point.pp} x dp {point.dp} needs {point.num_ranks} GPUs, "
            f"{len(gpus)} found"
            + (f" (CUDA_VISIBLE_DEVICES={hidden})" if hidden is not None else "")
            + f"; give {f'--dp {fewer} or ' if fewer else ''}--device cpu, or more machines"
        ]
    try:
        host, device = needed_bytes(point, machine, trainer)
    except WorkloadError:
        return []
    asked = [("host memory", host, machine.host_free_bytes)]
    if on_gpu:
        asked.append(("GPU memory", device, min(gpus[: point.num_ranks])))
    return [
        f"about {need_bytes / GIB:.1f} GiB of {what} needed, {free_bytes / GIB:.1f} GiB free; "
        "a smaller model, more ranks or a smaller micro-batch need less, and --no-memory-check "
        "starts it all the same"
        for what, need_bytes, free_bytes in asked
        if need_bytes > USABLE * free_bytes
    ]


def memory_text(point: Point, machine: Host, trainer: Trainer) -> str:
    """Say what memory the point needs and whether it is there, or why it is not predicted."""
    on_gpu = runs_on_gpu(point, machine)
    short = "; ".join(shortages(point, machine, trainer))
    try:
        host, device = needed_bytes(point, machine, trainer)
    except WorkloadError as error:
        return f"not predicted: {error}{short and f'; {short}'}"
    text = f"predicted host {host / GIB:.1f} GiB, each GPU {device / GIB:.1f} GiB"
    if on_gpu and not machine.gpu_free_bytes:
        return f"{text} (as on a GPU of profile {GPU_PROFILE}; none here)"
    return f"{text}: {short or 'fits this machine'}"


def largest_model_that_fits(
    names: Sequence[str],
    points_of: Callable[[str], Sequence[Point]],
    machine: Host,
    trainer: Trainer,
) -> str:
    """Return the name of the largest model, the smallest first, all of whose points fit.

    Raises:
        ConfigError: not even the smallest fits.
    """
    for name in reversed(names):
        if not any(shortages(point, machine, trainer) for point in points_of(name)):
            return name
    short = next(p for p in points_of(names[0]) if shortages(p, machine, trainer))
    raise ConfigError(f"{names[0]} does not fit: {'; '.join(shortages(short, machine, trainer))}")


def lacks(point: Point, machine: Host, options: RunOptions) -> list[str]:
    """Return why the point cannot run here with these options, a line each; empty when it can.

    Of hosts that are not this one it is not known what they have.
    """
    far = options.launcher.is_far
    needs = [need for need in point.row.needs if need == TWO_RANKS or not far]
    found = [_lack(need, point, machine) for need in needs]
    own, chosen = point.row.trainer, options.trainer.name
    if own not in ("", chosen):
        found.append(f"needs --trainer {own}, and {chosen} was chosen")
    found += options.trainer.refuse(point)
    if not far and not any(found):
        found.append(_fp16_lack(point, machine, options))
    found.append(_link_lack(point, machine, options))
    options.launcher.versions(point.num_ranks)  # refuses a number of ranks that hosts cannot run
    return [text for text in found if text]


def why_not_here(
    point: Point, machine: Host, options: RunOptions, memory_check: bool = True
) -> str:
    """Say what a point needs that this machine lacks; empty when it can be run."""
    reasons = lacks(point, machine, options)
    if memory_check and not reasons:
        reasons = shortages(point, machine, options.trainer)
    return "; ".join(reasons)


def refuse_what_cannot_run(
    point: Point, machine: Host, options: RunOptions, memory_check: bool = True
) -> None:
    """Stop before a run that cannot be, or cannot end well.

    Raises:
        ConfigError: the machine, the software or the options lack what the point needs.
    """
    if reason := why_not_here(point, machine, options, memory_check):
        raise ConfigError(f"{point.model.name} with engine '{point.engine}': {reason}")


def _lack(need: str, point: Point, machine: Host) -> str:
    if need == GPU:
        on_gpu = runs_on_gpu(point, machine) and machine.gpu_free_bytes
        return "" if on_gpu else "needs a GPU, and this run has none"
    if need == TWO_RANKS:
        few = point.num_ranks < 2
        return "needs two ranks or more, and tp x pp x dp is one" if few else ""
    package = Requirement(need)
    try:
        version = metadata.version(package.name)
    except metadata.PackageNotFoundError:
        shipped = "`make setup-tests` installs what shipped studies need"
        return f"needs {need}, and {package.name} is not installed; {shipped}"
    if package.specifier.contains(version, prereleases=True):
        return ""
    return f"needs {need}, and {version} is installed"


def _fp16_lack(point: Point, machine: Host, options: RunOptions) -> str:
    if point.dtype != "fp16" or runs_on_gpu(point, machine):
        return ""
    has_block = options.trainer.ds_config(point).get("fp16", {}).get("enabled")
    if not has_block or "fp16" in machine.half_types():
        return ""
    return "dtype = 'fp16': DeepSpeed has no fp16 on this processor; give 'bf16' or 'fp32'"


def _link_lack(point: Point, machine: Host, options: RunOptions) -> str:
    if not point.link_mbit:
        return ""
    if point.num_ranks == 1:
        reason = "one rank has no link to another; give a dp or pp above 1"
    elif options.launcher.is_far or options.launcher.kind != TORCHRUN:
        reason = (
            "links are shaped between ranks that torchrun starts on one machine; leave out "
            "--launcher, --hostfile and --nnodes"
        )
    elif runs_on_gpu(point, machine):
        reason = "GPUs of one machine exchange through its memory; give device = 'cpu'"
    else:
        reason = links.unavailable()
    as_they_are = "link_mbit = 0 leaves links as they are"
    return f"link_mbit = {point.link_mbit}: {reason}; {as_they_are}" if reason else ""


def in_fast_type(
    points: Sequence[Point], machine: Host, options: RunOptions
) -> tuple[list[Point], dict[str, str]]:
    """Give points of the small form whose type nobody chose the one that is fast here.

    The small form computes in bf16, the type that people train in. A processor without a bf16
    matrix product spends minutes on each of its runs, so that there it computes in fp32. All
    points change or none does, so that engines are compared in one type. Torch is asked only if a
    point is open. Of other hosts it is not known what they multiply.

    Returns:
        The points, and the reason by the names of those that changed.
    """
    changed = {
        point.name: point.model_copy(update={"dtype": FAST})
        for point in points
        if not options.launcher.is_far
        and point.model.name == point.study.small_model
        and "dtype" not in point.model_fields_set
        and not runs_on_gpu(point, machine)
    }
    if not changed or "bf16" in machine.half_types():
        return list(points), {}
    # DeepSpeed's JSON of the user's own, a checkpoint or another trainer may ask for bf16.
    refuse = options.trainer.refuse
    if any(refuse(changed[p.name]) and not refuse(p) for p in points if p.name in changed):
        return list(points), {}
    return [changed.get(p.name, p) for p in points], dict.fromkeys(changed, NO_PRODUCT)


DTYPE_TEXT = f"type: {FAST} in place of bf16, since {NO_PRODUCT}; --dtype bf16 asks for it"
"""Says in a line which type :func:`in_fast_type` chose."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of a whole run."""

    seconds: float | None
    """None where neither an earlier run nor the performance model tells."""
    how: str
    """:data:`AS_BEFORE`, ``rough, from the rates of NAME``, or why it is not known."""


def estimate(point: Point, machine: Host, records: Sequence[Record] = ()) -> Estimate:
    """Estimate the seconds that a point will take, after earlier runs, the newest last."""
    key = settings_key(point)
    for record in reversed(records):
        same = record.point_key.startswith(key) and record.status == "ok"
        if same and record.seconds:
            return Estimate(record.seconds, AS_BEFORE)
    if not runs_on_gpu(point, machine):
        return Estimate(_seconds_on_cpu(point, machine), "rough, from the model's size")
    try:
        seconds = GPU_START_S + point.iterations * _iteration_on_gpus(point)
    except WorkloadError as error:
        return Estimate(None, f"not predicted: {error}")
    return Estimate(seconds, f"rough, from the rates of {GPU_PROFILE}")


def _iteration_on_gpus(point: Point) -> float:
    profile = load_machine(GPU_PROFILE)
    profile = replace(profile, cores=usable_cores(), gpus=point.num_ranks)
    return predict(workload_of(point), profile).iteration_s


def _seconds_on_cpu(point: Point, machine: Host) -> float:
    """Return the seconds of a run: its start, its matrix products, and calls of Python."""
    profile, cores = load_machine(CPU_PROFILE), usable_cores()
    assert profile.rates.device_flops_per_s
    passes = 8 if point.activation_checkpointing else 6
    tokens = point.global_batch_size * point.model.seq_length
    operations = float(passes * point.model.num_parameters(point.tp) * tokens)
    if point.dtype == "bf16" and "bf16" not in machine.half_types():
        operations *= SLOW_BF16
    products_s = operations / (profile.rates.device_flops_per_s * cores / profile.cores)
    ranks_a_core = max(1.0, point.num_ranks / cores)
    calls_s = MICRO_BATCH_S * point.accumulation * ranks_a_core
    return CPU_START_S * ranks_a_core + point.iterations * (products_s + calls_s)
