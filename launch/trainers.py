"""What a run's ranks run: the harness's own trainer, or a checkout of Megatron-DeepSpeed."""

from __future__ import annotations

import functools
import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from configs.errors import ConfigError
from configs.schema import Point
from launch.ds_json import deepspeed_config
from launch.fit.capacity import runs_on_gpu
from launch.fit.machine import Machine, probe_machine
from launch.hosts.ranks import TRAINER_MODULE, Program
from launch.megatron_flags import MegatronFiles, megatron_ds_config, megatron_flags
from launch.records.files import ROOT, last_lines, write_json
from launch.records.provenance import git_state
from launch.records.run_folder import RunFolder

OWN, MEGATRON = "megatron-core", "megatron-deepspeed"
TRAINERS = (OWN, MEGATRON)
_CONSUMED = re.compile(r"\| consumed samples:\s*(\d+) \|")


@dataclass(frozen=True)
class Trainer:
    """What the ranks run, and what it leaves behind."""

    module: str = TRAINER_MODULE
    """Module of the harness's own trainer."""
    megatron_dir: Path | None = None
    """Checkout of Megatron-DeepSpeed to run in its place; it is compiled in part when it is run, so
    it must be writable."""
    paper_keys: bool = False
    """Ask for the engine in the keys of the paper's fork of DeepSpeed, which must be installed."""
    more_flags: tuple[str, ...] = ()
    """Added to the checkout's flags."""

    @classmethod
    def of(cls, given: Namespace) -> Self:
        """From the options of :func:`launch.hosts.options.add_launch_options`.

        Raises:
            ConfigError: the checkout is missing or is none.
        """
        if given.trainer == OWN:
            for name in ("megatron_dir", "paper_keys", "megatron_flag"):
                if getattr(given, name):
                    flag = "--" + name.replace("_", "-")
                    raise ConfigError(f"{flag} goes with --trainer {MEGATRON}")
            return cls(module=given.trainer_module)
        if given.megatron_dir is None:
            raise ConfigError(f"--trainer {MEGATRON} needs --megatron-dir DIR, its checkout")
        directory = given.megatron_dir.resolve()
        if not (directory / "pretrain_gpt.py").is_file():
            raise ConfigError(
                f"--megatron-dir {str(given.megatron_dir)!r}: no pretrain_gpt.py there; "
                "`make third-party NAME=megatron-deepspeed` makes a checkout"
            )
        return cls(
            megatron_dir=directory,
            paper_keys=given.paper_keys,
            more_flags=tuple(given.megatron_flag),
        )

    @property
    def name(self) -> str:
        """As ``--trainer`` takes it."""
        return OWN if self.megatron_dir is None else MEGATRON

    @property
    def versions(self) -> dict[str, str]:
        """What tells runs of this trainer from others; nothing for the harness's own."""
        if self.megatron_dir is None:
            return {}
        state = git_state(self.megatron_dir) or {}
        commit = state.get("commit", "no git checkout")
        changes = state.get("changes_sha256", "")[:16]
        text = f"{commit}+{changes}" if changes else str(commit)
        flags = " ".join([*(["--paper-keys"] if self.paper_keys else []), *self.more_flags])
        return {MEGATRON: text, **({"megatron-flags": flags} if flags else {})}

    def ds_config(self, point: Point) -> dict[str, Any]:
        """DeepSpeed's config of a run.

        Raises:
            ConfigError: the engine cannot be had with the paper's keys.
        """
        if self.megatron_dir is None:
            return deepspeed_config(point)
        return megatron_ds_config(point, self.paper_keys)

    def program(self, point: Point, folder: Path, data_prefix: str) -> Program:
        """What every rank runs.

        Args:
            point: the run.
            folder: its folder.
            data_prefix: absolute prefix of Megatron's files.

        Raises:
            ConfigError: the checkout's flags cannot say what the point asks for.
        """
        run_json = folder / "run.json"
        if self.megatron_dir is None:
            return Program.trainer(self.module, run_json)
        files = MegatronFiles(data_prefix, folder / "ds_config.json", folder / "index-cache")
        flags = megatron_flags(point, files, runs_on_gpu(point, _machine()))
        script = str(ROOT / "launch" / "run_megatron.py")
        words = (str(self.megatron_dir), *flags, *self.more_flags)
        return Program(script, words, run_json, is_module=False)

    def environment(self, point: Point) -> dict[str, str]:
        """Variables that this trainer needs, over those of every run."""
        if self.megatron_dir is None or runs_on_gpu(point, _machine()):
            return {}
        return {"DS_ACCELERATOR": "cpu"}

    def write_config(self, folder: RunFolder, point: Point) -> None:
        """Put this trainer's ``ds_config.json`` in place of the harness's own trainer's."""
        if self.megatron_dir is not None:
            write_json(folder.path / "ds_config.json", self.ds_config(point))

    @property
    def writes_metrics(self) -> bool:
        """Whether a run has a ``metrics.jsonl``."""
        return self.megatron_dir is None

    @property
    def end_mark(self) -> str:
        """What shows that a run came to its end."""
        return "'end' line in metrics.jsonl" if self.writes_metrics else "last iteration in the log"

    def has_ended(self, folder: RunFolder, point: Point) -> bool:
        """Whether a run came to its end, whatever its exit code."""
        if self.writes_metrics:
            return folder.has_ended()
        found = (_CONSUMED.search(line) for line in last_lines(folder.log, 2000, 2**20))
        consumed = max((int(match[1]) for match in found if match), default=0)
        return consumed >= point.iterations * point.global_batch_size


OWN_TRAINER = Trainer()

_machine: Callable[[], Machine] = functools.cache(probe_machine)
"""Asked once: it may start a process that loads torch."""
