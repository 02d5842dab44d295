"""What an engine needs that a machine may lack, as its row of the study says."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement

from configs.errors import ConfigError
from configs.schema import Point
from configs.study import GPU, TWO_RANKS
from launch.fit.capacity import runs_on_gpu
from launch.fit.machine import Machine
from launch.hosts import links
from launch.task import RunOptions


def lacks(point: Point, machine: Machine, options: RunOptions) -> list[str]:
    """Why the point cannot run here, with this trainer, a line each; empty when it can.

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
    found += options.launcher.lacks(point)
    found += links.lacks(point, machine, options.launcher, options.wandb_project)
    return [text for text in found if text]


def refuse_if_lacking(point: Point, machine: Machine, options: RunOptions) -> None:
    """Stop before a run that cannot be.

    Raises:
        ConfigError: the machine, the software or the options lack what the engine needs.
    """
    if lacking := lacks(point, machine, options):
        raise ConfigError(f"engine '{point.engine}': {'; '.join(lacking)}")


def _fp16_lack(point: Point, machine: Machine, options: RunOptions) -> str:
    """Return why DeepSpeed refuses fp16 on this processor; empty where it does not."""
    if point.dtype != "fp16" or runs_on_gpu(point, machine):
        return ""
    has_block = options.trainer.ds_config(point).get("fp16", {}).get("enabled")
    if not has_block or "fp16" in machine.half_types():
        return ""
    return "dtype = 'fp16': DeepSpeed has no fp16 on this processor; give 'bf16' or 'fp32'"


def _lack(need: str, point: Point, machine: Machine) -> str:
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
        return f"needs {need}, and {package.name} is not installed"
    if package.specifier.contains(version, prereleases=True):
        return ""
    return f"needs {need}, and {version} is installed"
