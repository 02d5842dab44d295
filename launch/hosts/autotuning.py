"""What DeepSpeed's autotuner needs of a run that its launcher starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.files import ROOT
from launch.hosts.ranks import Program

CONFIG_FILE = "ds_config.json"
"""In a run folder: the config that the autotuner varies."""


def tuned(program: Program) -> Program:
    """The program as the autotuner can start it: a script, with its config among the arguments.

    Its experiments are started without ``--module``, and with another config in place of this one.
    """
    name = program.name
    if program.is_module:
        name = str(ROOT / Path(*name.split(".")).with_suffix(".py"))
    config = ("--deepspeed_config", str(program.run_json.with_name(CONFIG_FILE)))
    return replace(program, name=name, is_module=False, arguments=(*program.arguments, *config))


def tuned_config(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """DeepSpeed's config with the autotuner on, all of whose files go into the run's folder."""
    folders = {f"{name}_dir": str(folder / f"autotuning-{name}") for name in ("exps", "results")}
    return {**config, "autotuning": {"enabled": True, **folders, **config.get("autotuning", {})}}
