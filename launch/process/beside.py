"""What runs beside the ranks: a monitor, the study's companions, scalars if asked for."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.schema import Point
from configs.study import Companion as CompanionRow
from launch.fit.capacity import runs_on_gpu
from launch.fit.machine import probe_machine
from launch.process.busy import look_around
from launch.process.job import Companion
from launch.process.members import Members
from launch.process.monitor import Monitor
from launch.process.nvml import Gpus
from launch.process.supervise import Beside
from launch.trainer.recorder import TENSORBOARD_VARIABLE, WANDB_VARIABLE


def scalar_environment(tensorboard: bool, wandb_project: str | None) -> dict[str, str]:
    """What the ranks' environment needs so that rank 0 writes scalars.

    Raises:
        ConfigError: a package is not installed.
    """
    environment = {}
    if tensorboard:
        _require("tensorboard", "--tensorboard")
        environment[TENSORBOARD_VARIABLE] = "1"
    if wandb_project:
        _require("wandb", "--wandb")
        environment[WANDB_VARIABLE] = wandb_project
    return environment


def _require(package: str, option: str) -> None:
    found = importlib.util.find_spec(package)
    # A folder of that name, as the package itself makes in a working directory, is no package.
    if found is None or found.origin is None:
        raise ConfigError(
            f"{option}: the package '{package}' is not installed; install it with "
            f"'pip install {package}', or leave {option} out"
        )


def companions(point: Point, run_dir: Path) -> tuple[Companion, ...]:
    """Processes that the study puts beside the ranks, one for every device that they use here.

    The first of a kind reports to ``NAME.json``, that of GPU N > 0 to ``NAME-N.json``.
    """
    rows = {} if point.study is None else point.study.companions
    wanted = {name: row for name, row in rows.items() if point.value(row.field)}
    if not wanted:
        return ()
    num_gpus = 0
    if point.device != "cpu":
        machine = probe_machine()
        if runs_on_gpu(point, machine):
            num_gpus = min(point.num_ranks, len(machine.gpu_free_bytes))
    devices = [f"cuda:{number}" for number in range(num_gpus)] or ["cpu"]
    return tuple(
        _companion(row, point, device, run_dir / f"{name}{f'-{number}' if number else ''}.json")
        for name, row in wanted.items()
        for number, device in enumerate(devices)
    )


def _companion(row: CompanionRow, point: Point, device: str, report: Path) -> Companion:
    values = {**point.values, "device": device, "out": report}
    words = [word.format_map(values) for word in row.arguments]
    command = [sys.executable, "-m", row.module, *words]
    return Companion(row.name.format_map(values), command, report)


def monitoring(
    point: Point, environment: Mapping[str, str], path: Path, interval_s: float
) -> Beside | None:
    """Opens a monitor on a run's processes; None when ``interval_s`` is 0.

    Args:
        point: what runs.
        environment: the ranks'.
        path: ``monitor.jsonl``.
        interval_s: seconds between two samples.
    """
    if not interval_s:
        return None

    def follow(members: Members) -> AbstractContextManager[object]:
        return Monitor(members, path, interval_s, _gpus(point, environment))

    return follow


def before(point: Point, environment: Mapping[str, str]) -> dict[str, Any]:
    """How busy this machine is before a run is started, see :func:`look_around`."""
    gpus = _gpus(point, environment)
    try:
        return look_around(gpus)
    finally:
        gpus.close()


def _gpus(point: Point, environment: Mapping[str, str]) -> Gpus:
    """The first GPUs that the ranks see."""
    count = 0 if point.device == "cpu" else point.num_ranks
    return Gpus(environment.get("CUDA_VISIBLE_DEVICES"), count)
