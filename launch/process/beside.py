"""What runs beside the ranks: a monitor, the co-process of a hogged run, scalars if asked for."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from configs.errors import ConfigError
from configs.schema import Point
from launch.fit.capacity import runs_on_gpu
from launch.fit.machine import probe_machine
from launch.process.job import Companion
from launch.process.members import Members
from launch.process.monitor import Monitor
from launch.process.nvml import Gpus
from launch.process.supervise import Beside
from launch.trainer.scalars import TENSORBOARD_VARIABLE, WANDB_VARIABLE


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


def hogs(point: Point, run_dir: Path) -> tuple[Companion, ...]:
    """Co-processes that take the point's share of every device that its ranks use here.

    The first reports to ``hog.json``, that of GPU N > 0 to ``hog-N.json``.
    """
    if not point.hog_share:
        return ()
    num_gpus = 0
    if point.device != "cpu":
        machine = probe_machine()
        if runs_on_gpu(point, machine):
            num_gpus = min(point.num_ranks, len(machine.gpu_free_bytes))
    devices = [f"cuda:{number}" for number in range(num_gpus)] or ["cpu"]
    return tuple(
        _hog(
            point.hog_share, device, run_dir / ("hog.json" if not number else f"hog-{number}.json")
        )
        for number, device in enumerate(devices)
    )


def _hog(share: float, device: str, report: Path) -> Companion:
    options = [f"--share={share}", f"--device={device}", f"--out={report}"]
    return Companion(f"the hog of {device}", [sys.executable, "-m", "launch.hog", *options], report)


def monitoring(
    point: Point, environment: Mapping[str, str], path: Path, interval_s: float
) -> Beside | None:
    """Opens a monitor on a run's processes; None when ``interval_s`` is 0.

    Args:
        point: its ranks use the first GPUs that they see.
        environment: the ranks'.
        path: ``monitor.jsonl``.
        interval_s: seconds between two samples.
    """
    if not interval_s:
        return None

    def follow(members: Members) -> AbstractContextManager[object]:
        count = 0 if point.device == "cpu" else point.num_ranks
        gpus = Gpus(environment.get("CUDA_VISIBLE_DEVICES"), count)
        return Monitor(members, path, interval_s, gpus)

    return follow
