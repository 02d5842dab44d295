"""A checkout of Megatron-DeepSpeed, the user's own."""

from __future__ import annotations

import functools
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from configs.errors import ConfigError
from configs.files import last_lines
from configs.schema import Point
from launch.fit import Machine, probe_machine, runs_on_gpu
from launch.hosts.ranks import Program
from launch.records.provenance import git_state
from launch.records.run_folder import RunFolder
from launch.trainers.megatron_flags import (
    MegatronFiles,
    flag_limits,
    megatron_ds_config,
    megatron_flags,
)
from launch.trainers.protocol import Trainer

_SCRIPT = Path(__file__).with_name("run_megatron.py")
_CONSUMED = re.compile(r"\| consumed samples:\s*(\d+) \|")


@dataclass(frozen=True)
class MegatronDeepSpeed(Trainer):
    """The script ``pretrain_gpt.py`` of a checkout that the user names."""

    name: ClassVar[str] = "megatron-deepspeed"
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "--megatron-dir": {
            "type": Path,
            "metavar": "DIR",
            "help": "a checkout of Megatron-DeepSpeed",
        },
        "--paper-keys": {
            "action": "store_true",
            "help": "for the paper's fork of DeepSpeed, installed by the user",
        },
        "--megatron-flag": {
            "action": "append",
            "default": [],
            "metavar": "WORD",
            "help": "one more word of pretrain_gpt.py's flags: --megatron-flag=--use-flash-attn-v2",
        },
    }
    writes_metrics: ClassVar[bool] = False
    end_mark: ClassVar[str] = "last iteration in the log"

    megatron_dir: Path
    """The checkout; it is compiled in part when it is run, so it must be writable."""
    paper_keys: bool = False
    """Ask for the engine in the keys of the paper's fork of DeepSpeed, which must be installed."""
    more_flags: tuple[str, ...] = ()
    """Added to the checkout's flags."""

    @classmethod
    def of(cls, given: Namespace) -> Self:
        """From the command line's options.

        Raises:
            ConfigError: the checkout is missing or is none.
        """
        if given.megatron_dir is None:
            raise ConfigError(f"--trainer {cls.name} needs --megatron-dir DIR, its checkout")
        directory = given.megatron_dir.resolve()
        if not (directory / "pretrain_gpt.py").is_file():
            raise ConfigError(
                f"--megatron-dir {str(given.megatron_dir)!r}: no pretrain_gpt.py there; "
                "`make third-party NAME=megatron-deepspeed` makes a checkout"
            )
        return cls(directory, given.paper_keys, tuple(given.megatron_flag))

    @property
    def versions(self) -> dict[str, str]:
        """The checkout's commit with a digest of local changes, and the flags added."""
        state = git_state(self.megatron_dir) or {}
        commit = state.get("commit", "no git checkout")
        changes = state.get("changes_sha256", "")[:16]
        text = f"{commit}+{changes}" if changes else str(commit)
        flags = " ".join([*(["--paper-keys"] if self.paper_keys else []), *self.more_flags])
        return {self.name: text, **({"megatron-flags": flags} if flags else {})}

    def refuse(self, point: Point) -> list[str]:
        """Why this trainer cannot run a point."""
        return super().refuse(point) + flag_limits(point, self.paper_keys)

    def ds_config(self, point: Point) -> dict[str, Any]:
        """DeepSpeed's config of a run; optimizer and schedule come from flags."""
        return megatron_ds_config(point, self.paper_keys)

    def program(self, point: Point, folder: Path, data_prefix: str) -> Program:
        """What every rank runs."""
        files = MegatronFiles(data_prefix, folder / "ds_config.json", folder / "index-cache")
        flags = megatron_flags(point, files, runs_on_gpu(point, _machine()))
        words = (str(self.megatron_dir), *flags, *self.more_flags)
        return Program(str(_SCRIPT), words, folder / "run.json", is_module=False)

    def environment(self, point: Point) -> dict[str, str]:
        """The accelerator, where DeepSpeed would choose another."""
        return {} if runs_on_gpu(point, _machine()) else {"DS_ACCELERATOR": "cpu"}

    def has_ended(self, folder: RunFolder, point: Point) -> bool:
        """Whether the log has the last iteration's line."""
        found = (_CONSUMED.search(line) for line in last_lines(folder.log, 2000, 2**20))
        consumed = max((int(match[1]) for match in found if match), default=0)
        return consumed >= point.iterations * point.global_batch_size


_machine: Callable[[], Machine] = functools.cache(probe_machine)
"""Asked once: it may start a process that loads torch."""
