"""What is run, and how: a point with its data and keys, and the options of every run."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from configs.errors import ConfigError
from configs.schema import Point
from configs.study import Study, default_study
from dataset.embedded import EMBEDDED
from launch.data import data_prefix, look_at, prepared, require_vocabulary
from launch.hosts import namespaces, ranks
from launch.hosts.launchers import THIS_MACHINE, Launcher
from launch.process.turn import turn
from launch.records.identity import SETUP, code_facts, code_of, data_facts, point_key, setup_key
from launch.records.provenance import machine_and_checkout
from launch.trainer.recorder import TENSORBOARD_VARIABLE
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
    trainer: Trainer = OWN_TRAINER
    hang_s: float | None = None
    """Seconds a run may make no progress; None adapts them to the run, 0 is no limit."""
    monitor_s: float = 1.0
    """Seconds between two samples of the monitor; 0 for none."""
    tensorboard: bool = False
    launcher: Launcher = THIS_MACHINE
    share: bool = False
    """Measure beside the runs of other drivers instead of taking turns with them."""
    dtype_reasons: Mapping[str, str] = field(default_factory=dict)
    """Names of points whose type this machine decided, to the reason."""

    def turn(self, point: Point, say: Callable[[str], object]) -> AbstractContextManager[None]:
        """Wait for this machine's turn to measure a point; ranks elsewhere leave it to others."""
        what = f"{self.sweep} {point.name}"
        return turn(what, say, share=self.share or self.launcher.is_far)

    @classmethod
    def of(cls, given: Namespace, sweep: str, study: Study) -> Self:
        """Read the options of :func:`launch.cli.add_run_options`.

        Raises:
            ConfigError: a package that an option needs is not installed, or options contradict
                each other.
        """
        scalar_environment(given.tensorboard)
        return cls(
            results_of(given.results_dir, study),
            sweep,
            given.timeout,
            given.echo,
            trainer_of(given, study),
            hang_s=given.hang_timeout,
            monitor_s=given.monitor_interval,
            tensorboard=given.tensorboard,
            launcher=Launcher.of(given),
            share=given.share,
        )


def results_of(results_dir: Path, study: Study) -> Path:
    """Return ``RESULTS/STUDY``, and ``RESULTS`` itself for the default study."""
    return results_dir if study is default_study() else results_dir / study.name


def scalar_environment(tensorboard: bool) -> dict[str, str]:
    """Return what the ranks' environment needs so that rank 0 writes scalars.

    Raises:
        ConfigError: the package is not installed.
    """
    if not tensorboard:
        return {}
    found = importlib.util.find_spec("tensorboard")
    # A folder of that name, as runs have one, is no package.
    if found is None or found.origin is None:
        raise ConfigError(
            "--tensorboard: the package 'tensorboard' is not installed; install it with "
            "'pip install tensorboard', or leave --tensorboard out"
        )
    return {TENSORBOARD_VARIABLE: "1"}


@dataclass(frozen=True)
class Task:
    """A point to run once."""

    point: Point
    data_prefix: str
    """Absolute prefix of Megatron's files."""
    point_key: str
    """See :mod:`launch.records.identity`."""
    setup_key: str
    setup: Mapping[str, Any]
    """What the key is of: code, versions and processors."""
    repeat: int = 1
    """Which of the point's repeats it is."""
    dtype_reason: str = ""
    """Why the point has the type that it has, where this machine decided it."""

    @classmethod
    def each(
        cls, points: Sequence[Point], options: RunOptions, makes_data: bool = True
    ) -> list[Self]:
        """Return a task of every point on this machine, and make or fetch its data.

        Without ``makes_data`` points whose data are not there yet are left out.

        Raises:
            ConfigError: a point's data is not there.
            LaunchError: the default corpus could not be made.
        """
        chosen = {point.data_prefix for point in points}
        prefixes = {given: _prefix_of(given, options.trainer, makes_data) for given in chosen}
        facts = machine_and_checkout()
        tasks = []
        for point in points:
            prefix = prefixes[point.data_prefix]
            if prefix is None:
                continue
            require_vocabulary(point, look_at(prefix))
            versions = {**facts["versions"], **options.trainer.versions}
            versions |= options.launcher.versions(point.num_ranks)
            setup = {**facts, "versions": versions, "code": _code(point, options)}
            setup = {part: setup[part] for part in SETUP}
            key = point_key(point, data_facts(prefix))
            reason = options.dtype_reasons.get(point.name, "")
            tasks.append(cls(point, prefix, key, setup_key(setup), setup, dtype_reason=reason))
        return tasks

    @property
    def keys(self) -> tuple[str, str, int]:
        """What tells it from other runs: point, setup, repeat."""
        return self.point_key, self.setup_key, self.repeat

    def repeated(self, number: int) -> Self:
        """Return the same task as another repeat."""
        return replace(self, repeat=number)

    def facts(self, command: list[str], provenance: dict[str, Any]) -> dict[str, Any]:
        """Return what ``run.json`` says of the task, apart from the point."""
        about = {**provenance, **self.setup, "data": look_at(self.data_prefix).record()}
        own = {key: value for key, value in vars(self).items() if key not in ("point", "setup")}
        return {**own, "command": command, "provenance": about}


def _prefix_of(given: str, trainer: Trainer, makes_data: bool) -> str | None:
    """Absolute prefix of data; None for those that are not there yet and are not to be made."""
    if given in trainer.own_data:
        return trainer.own_data[given](given, makes_data)
    return data_prefix(given) if given or makes_data else prepared(EMBEDDED)


def _code(point: Point, options: RunOptions) -> dict[str, Any]:
    """The code that a run of the point executes, and what the checkout makes of its fields."""
    trainer, rows = options.trainer, point.study.companions.values() if point.study else ()
    if trainer.refuse(point):
        return code_facts({}, None)
    # Where the run's folder and data lie changes nothing.
    program = trainer.program(point, Path("run"), "data")
    beside = [row for row in rows if point.value(row.field)]
    settings = [
        trainer.ds_config(point),
        program.arguments,
        trainer.environment(point) | point.row_environment,
        [row.model_dump() for row in beside],
    ]
    entries = [program.name, *(row.module for row in beside), ranks.__name__]
    entries += [namespaces.__name__] if point.link_mbit else []
    return code_facts(code_of(entries), settings)
