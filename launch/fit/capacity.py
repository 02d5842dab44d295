"""Whether a machine has the memory that a run needs, asked beforehand.

The figures are those of the model of memory, and somewhat more: a run that is let through should
not die of memory after an hour. A run that the model does not know is let through, which is said.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from configs.errors import ConfigError
from configs.schema import Point
from deep_optimizer_states.predict.memory.peaks import GIB, peaks_of
from deep_optimizer_states.predict.workload import WorkloadError
from launch.fit.machine import Machine

if TYPE_CHECKING:  # trainers ask this module where their ranks run
    from launch.trainers.protocol import Trainer

MARGIN = 1.1
"""A run takes up to this much more than the model's figure, which is that of a usual run."""
USABLE = 0.95
"""Share of the free memory that a run may count on."""
PROFILES = {True: "h200x1", False: "cpu-only"}
"""Shipped profiles that stand for a machine with GPUs and for one without."""


@dataclass(frozen=True)
class Need:
    """Memory a point needs."""

    host_bytes: int
    """All ranks together."""
    device_bytes: int
    """On the GPU that holds most; 0 on a CPU, where the host holds everything."""
    stages: tuple[int, ...] = ()
    """Bytes of a rank of each stage of a pipeline: on its GPU, or without one on the host."""


def runs_on_gpu(point: Point, machine: Machine) -> bool:
    """Return whether the point's ranks use CUDA on this machine."""
    return point.device == "cuda" or (point.device == "auto" and bool(machine.gpu_free_bytes))


def predict(point: Point, on_gpu: bool, trainer: Trainer) -> Need:
    """Predict the memory that ``point`` needs on GPUs or on a CPU alone.

    Raises:
        WorkloadError: The model of memory does not know such a run; names the setting.
    """
    every = [peaks_of(setting, on_gpu) for setting in trainer.settings(point, on_gpu)]
    host = sum(peaks.host_bytes for peaks in every) * point.num_ranks / len(every)
    each = [peaks.device_bytes if on_gpu else peaks.host_bytes for peaks in every]
    return Need(
        int(MARGIN * host),
        int(MARGIN * max(each)) if on_gpu else 0,
        tuple(int(MARGIN * stage) for stage in each) if point.pp > 1 else (),
    )


def shortages(point: Point, machine: Machine, trainer: Trainer) -> list[str]:
    """Return why the point cannot run here, a line each; none if it can, or is not predicted."""
    on_gpu = runs_on_gpu(point, machine)
    gpus, hidden = machine.gpu_free_bytes, os.environ.get("CUDA_VISIBLE_DEVICES")
    if on_gpu and len(gpus) < point.num_ranks:
        return [
            f"tp {point.tp} x pp {point.pp} x dp {point.dp} needs {point.num_ranks} GPUs, "
            f"{len(gpus)} found"
            + (f" (CUDA_VISIBLE_DEVICES={hidden})" if hidden is not None else "")
        ]
    try:
        need = predict(point, on_gpu, trainer)
    except WorkloadError:
        return []
    lines = []
    if need.host_bytes > USABLE * machine.host_free_bytes:
        lines.append(_short("host memory", need.host_bytes, machine.host_free_bytes))
    if on_gpu and need.device_bytes > USABLE * min(gpus[: point.num_ranks]):
        lines.append(_short("GPU memory", need.device_bytes, min(gpus[: point.num_ranks])))
    return lines


def _short(what: str, need_bytes: int, free_bytes: int) -> str:
    return f"about {need_bytes / GIB:.1f} GiB of {what} needed, {free_bytes / GIB:.1f} GiB free"


def memory_text(point: Point, machine: Machine, trainer: Trainer) -> str:
    """Say what memory the point needs and whether it is there, or why it is not predicted."""
    on_gpu = runs_on_gpu(point, machine)
    short = "; ".join(shortages(point, machine, trainer))
    try:
        need = predict(point, on_gpu, trainer)
    except WorkloadError as error:
        return f"not predicted: {error}{short and f'; {short}'}"
    without = on_gpu and not machine.gpu_free_bytes
    as_if = f" (as on a GPU of profile {PROFILES[True]}; none here)" if without else ""
    stages = ", ".join(f"{num_bytes / GIB:.1f}" for num_bytes in need.stages)
    stages = stages and f" (a rank of each stage: {stages} GiB)"
    return (
        f"predicted host {need.host_bytes / GIB:.1f} GiB, each GPU "
        f"{need.device_bytes / GIB:.1f} GiB{stages}{as_if}: {short or 'fits this machine'}"
    )


def refuse_if_short(point: Point, machine: Machine, trainer: Trainer) -> None:
    """Stop before a run that cannot end well.

    Raises:
        ConfigError: memory or GPUs are missing; says how much is needed and free.
    """
    lines = shortages(point, machine, trainer)
    if lines:
        raise ConfigError(
            f"{point.model.name} with engine {point.engine} does not fit: "
            f"{'; '.join(lines)}. {_remedy(point, machine)}"
        )


def _remedy(point: Point, machine: Machine) -> str:
    gpus = len(machine.gpu_free_bytes)
    if runs_on_gpu(point, machine) and gpus < point.num_ranks:
        fewer = gpus // (point.tp * point.pp)
        ways = [f"--dp {fewer}"] if fewer else []
        return f"Give {' or '.join([*ways, '--device cpu'])}, or start it on more machines"
    return "Choose a smaller model, more ranks or a smaller micro-batch, or pass --no-memory-check"


def unused_gpus(point: Point, machine: Machine) -> str:
    """Say how to use all GPUs of this machine; empty where all are used."""
    gpus, alone = len(machine.gpu_free_bytes), point.tp * point.pp
    if not runs_on_gpu(point, machine) or gpus <= point.num_ranks:
        return ""
    more = gpus // alone
    batch = more * point.micro_batch_size
    return (
        f"{point.num_ranks} of {gpus} GPUs used (tp {point.tp} x pp {point.pp} x dp {point.dp}); "
        f"--dp {more} with --global-batch-size a multiple of {batch} uses {more * alone}"
    )


def largest_model_that_fits(
    names: Sequence[str],
    points_of: Callable[[str], Sequence[Point]],
    machine: Machine,
    trainer: Trainer,
) -> str:
    """Return the name of the largest model all of whose points fit the machine.

    Args:
        names: the models, smallest first.
        points_of: the points to run with a model of this name.
        machine: what is free.
        trainer: what the ranks run.

    Raises:
        ConfigError: not even the smallest fits.
    """
    for name in reversed(names):
        if not any(shortages(point, machine, trainer) for point in points_of(name)):
            return name
    for point in points_of(names[0]):
        refuse_if_short(point, machine, trainer)
    raise AssertionError("a model that does not fit was not refused")
