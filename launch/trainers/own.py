"""The harness's own trainer: megatron-core's GPT under DeepSpeed."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from configs.errors import ConfigError
from configs.schema import Point
from launch.hosts.ranks import TRAINER_MODULE, Program
from launch.records.run_folder import RunFolder
from launch.trainer.checkpoint_files import Checkpoint, find_checkpoint
from launch.trainers.protocol import Trainer
from launch.trainers.user_json import read_user_json, with_user_json


@dataclass(frozen=True)
class OwnTrainer(Trainer):
    """megatron-core's GPT under DeepSpeed, by :mod:`launch.pretrain_gpt`."""

    name: ClassVar[str] = "megatron-core"
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "--continue-from": {
            "type": Path,
            "metavar": "RUN_FOLDER",
            "help": "begin a new run at the last checkpoint of this one (or at a checkpoint's "
            "folder)",
        },
        "--deepspeed-config": {
            "type": Path,
            "metavar": "FILE",
            "help": "DeepSpeed's JSON, laid over what the harness makes of every run; what a field "
            "of the point says must agree with it, and 'auto' leaves it to the field",
        },
        "--trainer-module": {"help": argparse.SUPPRESS},
    }
    writes_metrics: ClassVar[bool] = True
    end_mark: ClassVar[str] = "'end' line in metrics.jsonl"

    module: str = TRAINER_MODULE
    """What the ranks run; tests put another in its place."""
    checkpoint: Checkpoint | None = None
    """Where runs begin; None for initial weights."""
    user_json: Path | None = None
    """DeepSpeed's JSON of the user's own; None without one."""

    default_module: ClassVar[str] = TRAINER_MODULE
    """What the ranks run by default."""

    @classmethod
    def of(cls, given: Namespace) -> Self:
        """From the command line's options.

        Raises:
            ConfigError: there is no checkpoint to begin at, or the user's JSON is wrong.
        """
        checkpoint = None if given.continue_from is None else find_checkpoint(given.continue_from)
        if given.deepspeed_config is not None:
            read_user_json(given.deepspeed_config)
        return cls(given.trainer_module or cls.default_module, checkpoint, given.deepspeed_config)

    @property
    def versions(self) -> dict[str, str]:
        """Nothing, but for a run that begins at a checkpoint: it lacks the first iterations."""
        return {} if self.checkpoint is None else {"continued-from": str(self.checkpoint.path)}

    def refuse(self, point: Point) -> list[str]:
        """Why this trainer cannot run a point."""
        reasons = super().refuse(point)
        if self.checkpoint:
            reasons += self.checkpoint.differences(point)
        try:
            self.ds_config(point)
        except ConfigError as error:
            reasons.append(str(error))
        return reasons

    def ds_config(self, point: Point) -> dict[str, Any]:
        """DeepSpeed's config of a run, with the user's JSON over it.

        Raises:
            ConfigError: that contradicts the point.
        """
        config = super().ds_config(point)
        if self.user_json is None:
            return config
        return with_user_json(config, read_user_json(self.user_json), point, self.user_json)

    def program(self, point: Point, folder: Path, data_prefix: str) -> Program:
        """What every rank runs; point and data stand in the folder."""
        run_json = folder / "run.json"
        more = () if self.checkpoint is None else ("--continue-from", str(self.checkpoint.path))
        return Program(self.module, (str(run_json), *more), run_json)

    def has_ended(self, folder: RunFolder, point: Point) -> bool:
        """Whether the trainer wrote its last line."""
        return folder.has_ended()
