"""A run of a point with its data and keys: prepared, started, watched, judged, recorded."""

from __future__ import annotations

import json
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from configs.cli import say
from configs.errors import ConfigError
from configs.fields import shaped_links
from configs.files import ROOT, last_lines
from configs.schema import Point
from configs.study import Study
from dataset.embedded import EMBEDDED
from deep_optimizer_states.op_locks import locks_of_ops
from launch import identity, launchers
from launch.data import (
    data_prefix,
    data_record,
    data_words,
    is_embedded,
    prepared,
    require_vocabulary,
)
from launch.derive import with_verdict
from launch.fit import Machine, estimate, lacks, memory_text, probe_machine, runs_on_gpu
from launch.launchers import (
    EXTENSIONS_VARIABLE,
    THIS_MACHINE,
    Launcher,
    extensions_folder,
)
from launch.process.monitor import Gpus, look_around, monitoring
from launch.process.outcome import judge
from launch.process.supervise import Companion, Ending, Job, Members, supervise
from launch.process.turn import turn
from launch.process.watch import duration_text
from launch.records import (
    INTERRUPTED,
    Driver,
    RunFolder,
    Status,
    create_run_folder,
    disk_is_full,
    next_run_path,
    read_records,
    results_of,
    runs_of_this_process,
    sweep_dir,
)
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
            given.echo,
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


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    folder: RunFolder
    """Where everything about it lies."""
    status: Status
    """As in ``status.json``."""
    stop_signal: int | None = None
    """Signal that asked the harness to stop; None when nobody did."""


def execute(task: Task, options: RunOptions) -> Outcome:
    """Run a task in a new folder, to its end.

    Raises:
        ConfigError: the results folder cannot be made, or that of compiled ops not written.
    """
    extensions = ready_extensions(extensions_folder(os.environ))
    folder = create_run_folder(options.results_dir, options.sweep, task.point)
    job = prepare(task, options, folder, extensions)

    def monitor(members: Members) -> AbstractContextManager[None]:
        gpus = _gpus(task.point, job.environment)
        return monitoring(members, folder.path / "monitor.jsonl", options.monitor_s, gpus)

    status = Status("failed", cause="the launcher itself ended before the run did")
    folder.write_status(Status("running", driver=Driver.this_process(job.token)))
    runs_of_this_process.add(job.token)
    try:
        ending = supervise(job, monitor if options.monitor_s else None, options.echo)
        status = _judged(ending, folder, task.point, options.trainer)
    except (KeyboardInterrupt, SystemExit):  # a signal just before or after the ranks
        status = Status(INTERRUPTED, cause="the launcher was stopped")
        raise
    finally:
        # Whatever the status comes to say: the next call must not wait for this run.
        runs_of_this_process.discard(job.token)
        status = folder.record_end(status)
    return Outcome(folder, status, ending.stop_signal)


def ready_extensions(folder: Path) -> Path:
    """Make the folder of compiled ops ready: there, open to writing, without an old lock.

    torch makes a lock file beside every op that it loads, built or not, and waits for one that it
    finds. Locks are said. Where one is old, ops are built in a folder beside this one instead.

    Returns:
        The folder for the ranks.

    Raises:
        ConfigError: this user cannot write there.
    """
    place, number = folder, 1
    while True:
        _require_writable(place)
        locks = locks_of_ops(place)
        for lock in locks:
            say(str(lock))
        if not any(lock.is_old for lock in locks):
            break
        number += 1
        place = folder.with_name(f"{folder.name}-{number}")
    if place != folder:
        say(f"meanwhile ops are built and looked for in {place}")
    return place


def _require_writable(folder: Path) -> None:
    about = f"{EXTENSIONS_VARIABLE} = {str(folder)!r}"
    remedy = f"name a folder of your own in {EXTENSIONS_VARIABLE}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{about}: {error.strerror}; {remedy}") from None
    for place in (folder, *(path for path in folder.glob("*") if path.is_dir())):
        if not os.access(place, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{about}: you cannot write into {str(place)!r}, where torch locks an op while it "
                f"loads it; {remedy}"
            )


def prepare(task: Task, options: RunOptions, folder: RunFolder, extensions: Path) -> Job:
    """Write what the ranks read, and return what is to be started.

    ``extensions`` is the folder of their compiled ops.
    """
    point, trainer, launcher = task.point, options.trainer, options.launcher
    program, port = trainer.program(point, folder.path, task.data_prefix), launcher.port()
    command = launcher.command(program, point.num_ranks, port, point.link_mbit)
    base = {**os.environ, EXTENSIONS_VARIABLE: str(extensions)}
    environment = launcher.environment(base, point.num_ranks, port)
    environment |= trainer.environment(point)
    launcher.export(environment, folder.path)
    for line in launcher.elsewhere(command, environment):
        say(f"start on another machine: {line}")
    gpus = _gpus(point, environment)
    try:
        before = look_around(gpus)
    finally:
        gpus.close()
    facts = task.facts(command, {**identity.provenance(environment), "before": before})
    folder.write_inputs(point, facts, trainer.ds_config(point))
    metrics = folder.metrics if trainer.writes_metrics else None
    beside = companions(point, folder.path)
    limits = (options.timeout_s, options.hang_s)
    return Job(command, ROOT, environment, folder.log, metrics, beside, *limits)


def companions(point: Point, run_dir: Path) -> tuple[Companion, ...]:
    """Return the processes that the study puts beside the ranks, one for each device used here.

    The first of a kind reports to ``NAME.json``, that of GPU N > 0 to ``NAME-N.json``.
    """
    rows = point.study.companions.items()
    wanted = {name: row for name, row in rows if point.value(row.field)}
    if not wanted:
        return ()
    num_gpus, machine = 0, probe_machine()
    if runs_on_gpu(point, machine):
        num_gpus = min(point.num_ranks, len(machine.gpu_free_bytes))
    devices = [f"cuda:{number}" for number in range(num_gpus)] or ["cpu"]
    found = []
    for name, row in wanted.items():
        for number, device in enumerate(devices):
            report = run_dir / f"{name}{f'-{number}' if number else ''}.json"
            values = {**point.values, "device": device, "out": report}
            words = [word.format_map(values) for word in row.arguments]
            command = [sys.executable, "-m", row.module, *words]
            found.append(Companion(row.name.format_map(values), command, report))
    return tuple(found)


def _gpus(point: Point, environment: Mapping[str, str]) -> Gpus:
    """The first GPUs that the ranks see."""
    count = 0 if point.device == "cpu" else point.num_ranks
    return Gpus(environment.get("CUDA_VISIBLE_DEVICES"), count)


def _judged(ending: Ending, folder: RunFolder, point: Point, trainer: Trainer) -> Status:
    lines = last_lines(folder.log, 2000, 2**20)
    has_ended, is_full = trainer.has_ended(folder, point), disk_is_full(folder.path)
    return with_verdict(judge(ending, lines, has_ended, is_full, trainer.end_mark), folder)


def describe(point: Point, machine: Machine, options: RunOptions, more: Sequence[str] = ()) -> str:
    """Say what a run of ``point`` would be: folder, command, memory, time and DeepSpeed's JSON.

    The lines ``more`` come after its name.

    Raises:
        ConfigError: the point's own data is not there, or the hosts cannot run so many ranks.
    """
    folder = sweep_dir(options.results_dir, options.sweep)
    expected = estimate(point, machine, read_records(folder))
    stem = point.log_name.removesuffix(".log")
    path = next_run_path(folder / stem)
    # The embedded corpus would be made; files of the user's own must be there.
    if point.data_prefix in options.trainer.own_data:
        prefix = f"({point.data_prefix})"
        data = f"{point.data_prefix}, made or fetched when they are first needed"
    else:
        prefix, data = "(the embedded corpus)", data_words(point.data_prefix)
        if not is_embedded(point.data_prefix):
            prefix = data_prefix(point.data_prefix)
            require_vocabulary(point, prefix)
    program, launcher = options.trainer.program(point, path, prefix), options.launcher
    port = launcher.port() if launcher.rdzv_endpoint else 0
    command = launcher.command(program, point.num_ranks, port, point.link_mbit)
    seconds = expected.seconds
    time = expected.how if seconds is None else f"about {duration_text(seconds)} ({expected.how})"
    lacking, links = lacks(point, machine, options), shaped_links([point.link_mbit])
    lines = [
        f"point    {point.name or stem}",
        *([f"skipped  {'; '.join(lacking)}"] if lacking else []),
        *more,
        f"folder   {path}",
        f"command  {shlex.join(command)}",
        f"model    {point.model.num_parameters(point.tp):,} parameters, "
        f"{point.num_ranks} rank(s), {point.iterations} iterations",
        *([f"links    {links}"] if links else []),
        f"data     {data}",
        f"memory   {memory_text(point, machine, options.trainer)}",
        f"time     {time}",
        f"DeepSpeed {json.dumps(options.trainer.ds_config(point), indent=2)}",
    ]
    return "\n".join(lines)
