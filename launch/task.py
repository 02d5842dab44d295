"""A run that is to be done: a point with its data and keys, and how runs are started."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from configs.schema import Point
from configs.study import Study
from dataset.embedded import EMBEDDED
from launch import identity, launchers
from launch.backends import OWN_TRAINER, trainer_of
from launch.backends.protocol import Trainer
from launch.data import data_prefix, data_record, is_embedded, prepared, require_vocabulary
from launch.launchers import THIS_MACHINE, Launcher
from launch.process.machine_lock import turn
from launch.records import results_of


@dataclass(frozen=True)
class RunOptions:
    """How runs are started, whatever they are."""

    results_dir: Path
    """Folder of all results of the study."""
    sweep: str
    """Folder inside it."""
    timeout_s: float | None = None
    """Seconds a run may take; None for no limit."""
    raw: bool = False
    """Show the runs' logs in place of a line that tells how they fare."""
    trainer: Trainer = OWN_TRAINER
    hang_s: float | None = None
    """Seconds a run may make no progress; None adapts them to the run, 0 is no limit."""
    monitor_s: float = 1.0
    """Seconds between two samples of the monitor; 0 for none."""
    launcher: Launcher = THIS_MACHINE
    share: bool = False
    """Measure beside the runs of other drivers instead of taking turns with them."""
    dtype_reasons: Mapping[str, str] = field(default_factory=dict)
    """Names of points whose type this machine decided, to the reason."""

    @classmethod
    def of(cls, given: Namespace, sweep: str, study: Study) -> Self:
        """Read the options of :func:`launch.cli.add_run_options`.

        Raises:
            ConfigError: options contradict each other.
        """
        return cls(
            results_of(given.results_dir, study),
            sweep,
            given.timeout,
            given.raw,
            trainer_of(given, study),
            hang_s=given.hang_timeout,
            monitor_s=given.monitor_interval,
            launcher=Launcher.of(given),
            share=given.share,
        )

    def turn(self, say: Callable[[str], object]) -> AbstractContextManager[None]:
        """Wait for this machine's turn to measure; ranks elsewhere leave it to others."""
        return turn(say, share=self.share or self.launcher.is_far)


@dataclass(frozen=True)
class Task:
    """A point to run once."""

    point: Point
    data_prefix: str
    """Absolute prefix of Megatron's files."""
    point_key: str
    """See :mod:`launch.identity`."""
    setup_key: str
    setup: Mapping[str, Any]
    """Code, versions and processors, of which the key is made."""
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
        """
        chosen = {point.data_prefix for point in points}
        prefixes = {given: _prefix_of(given, options.trainer, makes_data) for given in chosen}
        facts = identity.machine_and_checkout()
        tasks = []
        for point in points:
            prefix = prefixes[point.data_prefix]
            if prefix is None:
                continue
            require_vocabulary(point, prefix)
            versions = {**facts["versions"], **options.trainer.versions}
            versions |= options.launcher.versions(point.num_ranks)
            setup = {**facts, "versions": versions, "code": _code(point, options)}
            setup = {part: setup[part] for part in identity.SETUP}
            key = identity.point_key(point, identity.data_facts(prefix))
            setup_key = identity.setup_key(setup)
            reason = options.dtype_reasons.get(point.name, "")
            tasks.append(cls(point, prefix, key, setup_key, setup, dtype_reason=reason))
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
        about = {**provenance, **self.setup, "data": data_record(self.data_prefix)}
        own = {key: value for key, value in vars(self).items() if key not in ("point", "setup")}
        return {**own, "command": command, "provenance": about}


def _prefix_of(given: str, trainer: Trainer, makes_data: bool) -> str | None:
    """Absolute prefix of data; None for those that are not there yet and are not to be made."""
    if given in trainer.own_data:
        return trainer.own_data[given](given, makes_data)
    return prepared(EMBEDDED) if is_embedded(given) and not makes_data else data_prefix(given)


def _code(point: Point, options: RunOptions) -> dict[str, Any]:
    """The code that a run of the point executes, and what the checkout makes of its fields."""
    trainer = options.trainer
    if trainer.refuse(point):
        return identity.code_facts({}, None)
    # Where the run's folder and data lie changes nothing.
    program = trainer.program(point, Path("run"), "data")
    beside = [row for row in point.study.companions.values() if point.value(row.field)]
    settings = [
        trainer.ds_config(point),
        program.arguments,
        trainer.environment(point),
        [row.model_dump() for row in beside],
    ]
    entries = [program.name, *(row.module for row in beside), launchers.__name__]
    return identity.code_facts(identity.code_of(entries), settings)
