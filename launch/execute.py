"""A run's life: prepared, started, watched, judged, recorded."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from configs.files import ROOT, last_lines
from configs.schema import Point
from deep_optimizer_states.stale_locks import locks_watched
from launch import cli
from launch.hosts.autotuning import tuned_config
from launch.hosts.launchers import Commands
from launch.process.beside import before, companions, monitoring, scalar_environment
from launch.process.extensions import extensions_folder, ready_extensions
from launch.process.job import Ending, Job, Limits
from launch.process.outcome import judge
from launch.process.stacks import add_note
from launch.process.supervise import Beside, supervise
from launch.records.driver import Driver
from launch.records.provenance import provenance
from launch.records.run_folder import RunFolder, Status, create_run_folder, disk_is_full
from launch.task import RunOptions, Task
from launch.verdict import with_verdict

Watch = Callable[[RunFolder], AbstractContextManager[object]]
"""Opened while a run lasts, to look at its files."""


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    folder: RunFolder
    """Where everything about it lies."""
    status: Status
    """As in ``status.json``."""
    stop_signal: int | None = None
    """Signal that asked the harness to stop; None when nobody did."""


def execute(task: Task, options: RunOptions, watch: Watch = contextlib.nullcontext) -> Outcome:
    """Run a task in a new folder, to its end.

    Args:
        task: what to run.
        options: how.
        watch: opened on the run's folder while its ranks run.

    Raises:
        ConfigError: the results folder cannot be made, or that of compiled ops not written.
    """
    extensions = extensions_folder(os.environ)
    for line in ready_extensions(extensions):
        cli.say(line)
    folder = create_run_folder(options.results_dir, options.sweep, task.point)
    job, beside = prepare(task, options, folder)
    status = Status("failed", cause="the launcher itself ended before the run did")
    folder.write_status(Status("running", driver=Driver.this_process(job.token)))
    try:
        # A build that the ranks wait for may be killed meanwhile.
        with watch(folder), locks_watched(extensions, partial(add_note, folder.log)):
            limits = Limits(options.timeout_s, options.hang_s)
            ending = supervise(job, limits, beside, options.echo)
        status = _judged(ending, folder, task.point, options)
    except (KeyboardInterrupt, SystemExit):  # a signal just before or after the ranks
        status = Status("interrupted", cause="the launcher was stopped")
        raise
    finally:
        status = folder.record_end(status)
    return Outcome(folder, status, ending.stop_signal)


def prepare(task: Task, options: RunOptions, folder: RunFolder) -> tuple[Job, Beside | None]:
    """Write what the ranks read; say what is to be started, and what looks at it meanwhile."""
    point, trainer = task.point, options.trainer
    commands, environment = start_of(point, options, folder.path, task.data_prefix)
    command = commands.started_by(folder.path)
    about = {**provenance(environment), "before": before(point, environment)}
    facts = task.facts(command, about)
    config = trainer.ds_config(point)
    if options.launcher.autotuning:
        config = tuned_config(config, folder.path)
    folder.write_inputs(point, facts, config)
    metrics = folder.metrics if trainer.writes_metrics else None
    job = Job(command, ROOT, environment, folder.log, metrics, companions(point, folder.path))
    samples = folder.path / "monitor.jsonl"
    return job, monitoring(point, environment, samples, options.monitor_s)


def start_of(
    point: Point, options: RunOptions, run_dir: Path, data_prefix: str
) -> tuple[Commands, dict[str, str]]:
    """What the ranks of a run are started by, and their environment."""
    launcher, trainer = options.launcher, options.trainer
    program = trainer.program(point, run_dir, data_prefix)
    port = launcher.port()
    environment = launcher.environment(os.environ, point.num_ranks, port)
    environment |= scalar_environment(options.tensorboard, options.wandb_project)
    environment |= trainer.environment(point)
    environment |= point.row_environment
    commands = launcher.commands(program, point.num_ranks, port, point.link_mbit)
    return commands, environment


def _judged(ending: Ending, folder: RunFolder, point: Point, options: RunOptions) -> Status:
    """How the run ended, from what it left behind."""
    lines = last_lines(folder.log, 2000, 2**20)
    trainer = options.trainer
    has_ended, is_full = trainer.has_ended(folder, point), disk_is_full(folder.path)
    status = judge(ending, lines, has_ended, is_full, trainer.end_mark)
    return with_verdict(status, folder)
