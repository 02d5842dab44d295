"""Loggers of the field beside ``metrics.jsonl``: names, packages, and what they are told of a run.

The GPT's trainer has DeepSpeed write them (its blocks ``tensorboard``, ``wandb``, ``csv_monitor``),
the program of film reviews Lightning. This file writes nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from configs.errors import explain

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "csv": ""}
"""Names of loggers to the package that each needs; empty for none."""
PROJECT = "deep-optimizer-states"
"""W&B's project, where ``WANDB_PROJECT`` names no other."""
FOLDER = "loggers"
"""Folder inside a run's that they write into."""
_BLOCKS = {"tensorboard": "tensorboard", "wandb": "wandb", "csv": "csv_monitor"}
"""DeepSpeed's names for its blocks."""
_MODE, _PLACE, _PROJECT = "WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT"


def log_to(text: str) -> str:
    """Check ``--log-to``, names with commas between them, and return them without spaces.

    Raises:
        ArgumentTypeError: a name is unknown, or its package is not installed.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PACKAGES:
            raise argparse.ArgumentTypeError(explain.unknown("logger", name, list(PACKAGES)))
        package = PACKAGES[name]
        if package and importlib.util.find_spec(package) is None:
            raise argparse.ArgumentTypeError(
                f"{name!r} needs a package that is not installed: pip install {package}"
            )
    return ",".join(dict.fromkeys(names))


OPTION: Mapping[str, Any] = {
    "type": log_to,
    "metavar": "NAMES",
    "help": f"write {', '.join(PACKAGES)} too, into each run's folder {FOLDER}: one or several, "
    "with commas between; wandb offline unless WANDB_MODE says online",
}
"""The option ``--log-to`` of the trainers that have it."""


def program_words(names: str) -> tuple[str, ...]:
    """Return what a trainer's program is told of ``--log-to``."""
    return ("--log-to", names) if names else ()


def monitor_blocks(
    names: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return the blocks of DeepSpeed's monitor.

    Args:
        names: Loggers, of :data:`PACKAGES`.
        folder: The run's.
        environment: Variables that may name W&B's project.
    """
    place = {"output_path": str(folder / FOLDER)}
    blocks: dict[str, Any] = {}
    for name in names:
        own = {"project": environment.get(_PROJECT, PROJECT), "group": folder.parent.name}
        own = own if name == "wandb" else {**place, "job_name": name}
        blocks[_BLOCKS[name]] = {"enabled": True, **own}
    return blocks


def set_wandb(names: Sequence[str], folder: Path, environment: MutableMapping[str, str]) -> None:
    """Have W&B write into the run's folder, and to nobody's account unless the user says so."""
    if "wandb" in names:
        (folder / FOLDER).mkdir(exist_ok=True)
        environment.setdefault(_PLACE, str(folder / FOLDER))
        environment.setdefault(_MODE, "offline")


def of_lightning(names: Sequence[str], folder: Path, environment: Mapping[str, str]) -> list[Any]:
    """Return Lightning's own loggers; arguments as for :func:`monitor_blocks`."""
    from lightning.pytorch import loggers

    place = folder / FOLDER
    project = environment.get(_PROJECT, PROJECT)

    def wandb() -> Any:
        return loggers.WandbLogger(name=folder.name, save_dir=place, project=project)

    makers = {
        "csv": lambda: loggers.CSVLogger(place, name="csv", version=""),
        "tensorboard": lambda: loggers.TensorBoardLogger(place, name="tensorboard", version=""),
        "wandb": wandb,
    }
    return [makers[name]() for name in names]
