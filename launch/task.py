"""What is run, and how: a point with its data and keys, and the options of every run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from configs.schema import Point
from configs.study import Study, default_study
from launch.data import data_prefix, look_at, require_vocabulary
from launch.hosts.launchers import THIS_MACHINE, Launcher
from launch.process.beside import scalar_environment
from launch.records.identity import data_facts, point_key, setup_key
from launch.records.provenance import machine_and_checkout
from launch.records.run_folder import Inputs
from launch.trainers import OWN_TRAINER, trainer_of
from launch.trainers.protocol import Trainer


@dataclass(frozen=True)
class RunOptions:
    """How runs are started, whatever they are."""

    results_dir: Path
    """Folder of all results of the study."""
    sweep: str
    """Folder inside it."""
    timeout_s: float | None = None
    """Seconds a run may take; None for no limit."""
    echo: bool = False
    """Copy the log to the terminal."""
    trainer: Trainer = OWN_TRAINER
    """What the ranks run."""
    hang_s: float | None = None
    """Seconds a run may make no progress; None adapts them to the run, 0 is no limit."""
    monitor_s: float = 1.0
    """Seconds between two samples of the monitor; 0 for none."""
    tensorboard: bool = False
    """Write scalars for TensorBoard."""
    wandb_project: str | None = None
    """Send scalars to this project of Weights & Biases."""
    launcher: Launcher = THIS_MACHINE
    """Where the ranks run, and who starts them."""

    def versions(self, point: Point) -> dict[str, str]:
        """What tells such runs from those with other options."""
        return {**self.trainer.versions, **self.launcher.versions(point.num_ranks)}

    @classmethod
    def of(cls, given: Namespace, sweep: str, study: Study) -> Self:
        """From the options of :func:`launch.cli.add_run_options`.

        Raises:
            ConfigError: a package that an option needs is not installed, or options contradict
                each other.
        """
        scalar_environment(given.tensorboard, given.wandb)
        return cls(
            results_of(given.results_dir, study),
            sweep,
            given.timeout,
            given.echo,
            trainer_of(given, study),
            hang_s=given.hang_timeout,
            monitor_s=given.monitor_interval,
            tensorboard=given.tensorboard,
            wandb_project=given.wandb,
            launcher=Launcher.of(given),
        )


def results_of(results_dir: Path, study: Study) -> Path:
    """Folder of a study's results: ``RESULTS/STUDY``, and ``RESULTS`` for the default study."""
    return results_dir if study is default_study() else results_dir / study.name


@dataclass(frozen=True)
class Task:
    """A point to run once."""

    point: Point
    data_prefix: str
    """Absolute prefix of Megatron's files."""
    point_key: str
    """See :mod:`launch.records.identity`."""
    setup_key: str
    repeat: int = 1
    """Which of the point's repeats it is."""

    @classmethod
    def each(cls, points: Sequence[Point], options: RunOptions) -> list[Self]:
        """A task of every point on this machine; prepares the data.

        Raises:
            ConfigError: a point's data is not there.
            LaunchError: the default corpus could not be made.
        """
        own = options.trainer.own_data
        asked = {point.data_prefix for point in points}
        prefixes = {given: own.get(given, data_prefix)(given) for given in asked}
        facts = machine_and_checkout()
        tasks = []
        for point in points:
            prefix = prefixes[point.data_prefix]
            require_vocabulary(point, look_at(prefix))
            versions = {**facts["versions"], **options.versions(point)}
            setup = setup_key({**facts, "versions": versions})
            tasks.append(cls(point, prefix, point_key(point, data_facts(prefix)), setup))
        return tasks

    @property
    def keys(self) -> tuple[str, str, int]:
        """What tells it from other runs: point, setup, repeat."""
        return self.point_key, self.setup_key, self.repeat

    def repeated(self, number: int) -> Self:
        """The same as another repeat."""
        return replace(self, repeat=number)

    def inputs(self, command: list[str], provenance: dict[str, Any]) -> Inputs:
        """What ``run.json`` is to say."""
        return Inputs(
            self.point,
            self.point_key,
            self.setup_key,
            self.repeat,
            self.data_prefix,
            command,
            {**provenance, "data": look_at(self.data_prefix).record()},
        )
