"""One run: ``python -m launch.run POINT.toml [--field value ...]``.

POINT is a file, or the name of one in ``configs/points``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from configs.errors import ConfigError, explain
from configs.overrides import apply_overrides
from configs.schema import CONFIGS_DIR, Point, make_point, read_toml
from deep_optimizer_states.predict.memory_need import GIB
from launch import cli
from launch.data import data_prefix
from launch.fit.capacity import PROFILES, predict, refuse_if_short, runs_on_gpu, shortages
from launch.fit.estimate import estimate
from launch.fit.machine import Machine, probe_machine
from launch.hosts.launchers import THIS_MACHINE, Commands, Launcher
from launch.hosts.meeting import join_meeting
from launch.live import duration_text
from launch.process.beside import hogs, monitoring, scalar_environment
from launch.process.extension_locks import clear_stale_locks
from launch.process.job import Job, Limits
from launch.process.outcome import judge
from launch.process.supervise import supervise
from launch.records.driver import Driver
from launch.records.ending import disk_is_full, record_status
from launch.records.files import ROOT, last_lines
from launch.records.identity import data_facts, point_key, setup_key
from launch.records.ledger import read_records
from launch.records.provenance import machine_and_checkout, provenance
from launch.records.run_folder import (
    Inputs,
    RunFolder,
    Status,
    create_run_folder,
    next_run_path,
    sweep_dir,
)
from launch.trainers import OWN_TRAINER, require_runnable, trainer_of
from launch.trainers.protocol import Trainer

SINGLE_RUNS = "single"
"""Sweep folder of runs started one by one."""


@dataclass(frozen=True)
class RunOptions:
    """How runs are started, whatever they are."""

    results_dir: Path
    """Folder of all results."""
    sweep: str = SINGLE_RUNS
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
    def of(cls, given: Namespace, sweep: str) -> Self:
        """From the options of :func:`launch.cli.add_run_options`.

        Raises:
            ConfigError: a package that an option needs is not installed, or options contradict
                each other.
        """
        scalar_environment(given.tensorboard, given.wandb)
        return cls(
            given.results_dir,
            sweep,
            given.timeout,
            given.echo,
            trainer_of(given),
            hang_s=given.hang_timeout,
            monitor_s=given.monitor_interval,
            tensorboard=given.tensorboard,
            wandb_project=given.wandb,
            launcher=Launcher.of(given),
        )


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
        prefixes = {given: data_prefix(given) for given in {p.data_prefix for p in points}}
        facts = machine_and_checkout()
        tasks = []
        for point in points:
            prefix = prefixes[point.data_prefix]
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
            {**provenance, "data": data_facts(self.data_prefix)},
        )


Watch = Callable[[RunFolder], AbstractContextManager[object]]
"""Opened while a run lasts, to look at its files."""


def _unwatched(_folder: RunFolder) -> AbstractContextManager[object]:
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    folder: RunFolder
    """Where everything about it lies."""
    status: Status
    """As in ``status.json``."""
    stop_signal: int | None = None
    """Signal that asked the harness to stop; None when nobody did."""


def execute(task: Task, options: RunOptions, watch: Watch = _unwatched) -> Outcome:
    """Run a task in a new folder, to its end.

    Args:
        task: what to run.
        options: how.
        watch: opened on the run's folder while its ranks run.

    Raises:
        ConfigError: the results folder cannot be made.
    """
    point = task.point
    folder = create_run_folder(options.results_dir, options.sweep, point)
    commands, environment = _prepare(task, options, folder)
    command = commands.started_by(folder.path)
    facts = provenance(environment)
    facts["versions"] = {**facts["versions"], **options.versions(point)}
    folder.write_inputs(task.inputs(command, facts), options.trainer.ds_config(point))
    metrics = folder.metrics if options.trainer.writes_metrics else None
    job = Job(command, ROOT, environment, folder.log, metrics, hogs(point, folder.path))
    beside = monitoring(point, environment, folder.path / "monitor.jsonl", options.monitor_s)
    status = Status("failed", cause="the launcher itself ended before the run did")
    folder.write_status(Status("running", driver=Driver.this_process(job.token)))
    clear_stale_locks(Path(environment["TORCH_EXTENSIONS_DIR"]))
    try:
        with watch(folder):
            limits = Limits(options.timeout_s, options.hang_s)
            ending = supervise(job, limits, beside, options.echo)
        lines = last_lines(folder.log, 2000, 2**20)
        trainer = options.trainer
        has_ended, is_full = trainer.has_ended(folder, point), disk_is_full(folder.path)
        status = judge(ending, lines, has_ended, is_full, trainer.end_mark)
    except (KeyboardInterrupt, SystemExit):  # a signal just before or after the ranks
        status = Status("interrupted", cause="the launcher was stopped")
        raise
    finally:
        status = record_status(folder, status)
    return Outcome(folder, status, ending.stop_signal)


def _prepare(task: Task, options: RunOptions, folder: RunFolder) -> tuple[Commands, dict[str, str]]:
    """What a run starts, and in which environment."""
    point, launcher = task.point, options.launcher
    program = options.trainer.program(point, folder.path, task.data_prefix)
    port = launcher.port()
    environment = launcher.environment(os.environ, point.num_ranks, port)
    environment |= scalar_environment(options.tensorboard, options.wandb_project)
    environment |= options.trainer.environment(point)
    return launcher.commands(program, point.num_ranks, port), environment


def describe(point: Point, machine: Machine, options: RunOptions) -> str:
    """What a run of ``point`` would be: folder, command, memory, time and DeepSpeed's JSON.

    Raises:
        ConfigError: the point's own data is not there, or the hosts cannot run so many ranks.
    """
    expected = estimate(point, machine, read_records(sweep_dir(options.results_dir, options.sweep)))
    stem = point.log_name.removesuffix(".log")
    path = next_run_path(sweep_dir(options.results_dir, options.sweep) / stem)
    # The embedded corpus would be made; files of the user's own must be there.
    prefix = data_prefix(point.data_prefix) if point.data_prefix else "(the embedded corpus)"
    program = options.trainer.program(point, path, prefix)
    port = options.launcher.master_port or 0
    commands = options.launcher.commands(program, point.num_ranks, port)
    on_gpu = runs_on_gpu(point, machine)
    need = predict(point, on_gpu)
    as_if = f" (as on a GPU of profile {PROFILES[True]}; none here)"
    against = [*options.trainer.refuse(point), *shortages(point, machine)]
    verdict = "; ".join(against) or "fits this machine"
    return "\n".join(
        [
            f"point    {point.name or stem}",
            f"folder   {path}",
            commands.describe(),
            f"model    {point.model.num_parameters(point.tp):,} parameters, "
            f"{point.num_ranks} rank(s), {point.iterations} iterations",
            f"memory   predicted host {need.host_bytes / GIB:.1f} GiB, "
            f"each GPU {need.device_bytes / GIB:.1f} GiB"
            f"{as_if if on_gpu and not machine.gpu_free_bytes else ''}: {verdict}",
            f"time     about {duration_text(expected.seconds)} ({expected.how})",
            f"DeepSpeed {json.dumps(options.trainer.ds_config(point), indent=2)}",
        ]
    )


def find_point_file(name_or_path: str) -> Path:
    """The file of a point: a path, or a name in ``configs/points``.

    Raises:
        ConfigError: neither; the nearest name is given.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    shipped = {file.stem: file for file in (CONFIGS_DIR / "points").glob("*.toml")}
    if name_or_path in shipped:
        return shipped[name_or_path]
    if path.suffix == ".toml":
        raise ConfigError(f"{name_or_path}: no such file")
    raise ConfigError(explain.unknown("point", name_or_path, sorted(shipped)))


def run_point(point: Point, options: RunOptions, dry_run: bool, memory_check: bool) -> int:
    """Check the machine, prepare the data, run; the exit code is the run's own."""
    machine = probe_machine()
    if dry_run:
        cli.say(describe(point, machine, options))
        return 0
    require_runnable(options.trainer, point)
    if options.launcher.node_rank:
        return join(point, options)
    if memory_check and not options.launcher.is_far:
        refuse_if_short(point, machine)
    outcome = execute(Task.each([point], options)[0], options)
    cli.say(f"{outcome.status.status}: {outcome.folder.path}")
    if outcome.status.cause:
        sys.stderr.write(f"{outcome.status.status}: {outcome.status.cause}\n")
    return outcome.status.exit_code or 0


def join(point: Point, options: RunOptions) -> int:
    """Run this node's part of a run whose folder node 0 makes; the exit code is the launcher's.

    Raises:
        ConfigError: node 0 does not answer, or runs another point.
    """
    launcher = options.launcher
    port, node = launcher.port(), launcher.node_rank or 0
    run_json = join_meeting(launcher.master_addr or "", port, node, point)
    prefix = json.loads(run_json.read_text(encoding="utf-8"))["data_prefix"]
    program = options.trainer.program(point, run_json.parent, prefix)
    command = launcher.commands(program, point.num_ranks, port).nodes[0]
    environment = launcher.environment(os.environ, point.num_ranks, port)
    environment |= options.trainer.environment(point)
    job = Job(command, ROOT, environment, run_json.parent / f"node-{node}.log")
    ending = supervise(job, Limits(options.timeout_s, 0), echo=options.echo)
    return 128 + ending.stop_signal if ending.stop_signal else ending.exit_code


def build_parser() -> cli.Parser:
    """Options of ``launch.run``."""
    parser = cli.Parser("python -m launch.run", "Run one point.")
    parser.add_argument("point", metavar="POINT", help="a TOML file, or a name in configs/points")
    parser.add_argument("--sweep", default=SINGLE_RUNS, help="results folder [default single]")
    cli.add_run_options(parser, echo=True)
    cli.add_field_options(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run one point from the command line.

    Raises:
        ConfigError: an option, the file or a field is wrong, or the machine is too small.
    """
    parser = build_parser()
    given = parser.read(argv)
    path = find_point_file(given.point)
    overrides = cli.field_overrides(given)
    table = apply_overrides(read_toml(path), overrides)
    options_too = f" with {', '.join(overrides)} from the command line" if overrides else ""
    point = make_point(table, source=f"{path}{options_too}")
    return run_point(
        point, RunOptions.of(given, given.sweep), given.dry_run, not given.no_memory_check
    )


if __name__ == "__main__":
    raise SystemExit(cli.run_command(lambda: main(sys.argv[1:])))
