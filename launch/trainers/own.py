"""The harness's own trainer: megatron-core's GPT under DeepSpeed."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from configs.schema import Point
from launch.hosts.ranks import TRAINER_MODULE, Program
from launch.records.run_folder import RunFolder
from launch.trainer.checkpoint_files import Checkpoint, find_checkpoint
from launch.trainers.protocol import Trainer


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
        "--trainer-module": {"help": argparse.SUPPRESS},
    }
    writes_metrics: ClassVar[bool] = True
    end_mark: ClassVar[str] = "'end' line in metrics.jsonl"

    module: str = TRAINER_MODULE
    """What the ranks run; tests put another in its place."""
    checkpoint: Checkpoint | None = None
    """Where runs begin; None for initial weights."""

    default_module: ClassVar[str] = TRAINER_MODULE
    """What the ranks run by default."""

    @classmethod
    def of(cls, given: Namespace) -> Self:
        """From the command line's options.

        Raises:
            ConfigError: there is no checkpoint to begin at.
        """
        checkpoint = None if given.continue_from is None else find_checkpoint(given.continue_from)
        return cls(given.trainer_module or cls.default_module, checkpoint)

    @property
    def versions(self) -> dict[str, str]:
        """Nothing, but for a run that begins at a checkpoint: it lacks the first iterations."""
        return {} if self.checkpoint is None else {"continued-from": str(self.checkpoint.path)}

    def refuse(self, point: Point) -> list[str]:
        """Why this trainer cannot run a point."""
        return super().refuse(point) + (
            self.checkpoint.differences(point) if self.checkpoint else []
        )

    def program(self, point: Point, folder: Path, data_prefix: str) -> Program:
        """What every rank runs; point and data stand in the folder."""
        run_json = folder / "run.json"
        more = () if self.checkpoint is None else ("--continue-from", str(self.checkpoint.path))
        return Program(self.module, (str(run_json), *more), run_json)

    def has_ended(self, folder: RunFolder, point: Point) -> bool:
        """Whether the trainer wrote its last line."""
        return folder.has_ended()
