"""A run's life: described, prepared, started, watched, judged, recorded."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from configs.cli import say
from configs.fields import shaped_links
from configs.files import ROOT, last_lines
from configs.schema import Point
from deep_optimizer_states.stale_locks import locks_watched
from launch.data import data_prefix, embedded_words, look_at
from launch.estimate import estimate
from launch.fit import Machine, lacks, memory_text, probe_machine, runs_on_gpu
from launch.hosts.launchers import tuned_config
from launch.process.extensions import extensions_folder, ready_extensions
from launch.process.members import Members
from launch.process.monitor import Gpus, Monitor, look_around
from launch.process.outcome import judge
from launch.process.supervise import Companion, Ending, Job, Limits, supervise
from launch.process.watch import add_note, duration_text
from launch.records.ledger import read_records
from launch.records.provenance import provenance
from launch.records.run_folder import (
    Driver,
    RunFolder,
    Status,
    create_run_folder,
    disk_is_full,
    next_run_path,
    sweep_dir,
)
from launch.task import RunOptions, Task, scalar_environment
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
    """Run a task in a new folder, to its end; ``watch`` is opened while its ranks run.

    Raises:
        ConfigError: the results folder cannot be made, or that of compiled ops not written.
    """
    point = task.point
    extensions = extensions_folder(os.environ)
    for line in ready_extensions(extensions):
        say(line)
    folder = create_run_folder(options.results_dir, options.sweep, point)
    job = prepare(task, options, folder)
    status = Status("failed", cause="the launcher itself ended before the run did")
    folder.write_status(Status("running", driver=Driver.this_process(job.token)))
    try:
        # A build that the ranks wait for may be killed meanwhile.
        with watch(folder), locks_watched(extensions, partial(add_note, folder.log)):
            limits = Limits(options.timeout_s, options.hang_s)
            monitor = partial(_monitor, job, point, folder, options.monitor_s)
            ending = supervise(job, limits, monitor if options.monitor_s else None, options.echo)
        status = _judged(ending, folder, point, options)
    except (KeyboardInterrupt, SystemExit):  # a signal just before or after the ranks
        status = Status("interrupted", cause="the launcher was stopped")
        raise
    finally:
        status = folder.record_end(status)
    return Outcome(folder, status, ending.stop_signal)


def prepare(task: Task, options: RunOptions, folder: RunFolder) -> Job:
    """Write what the ranks read, and return what is to be started."""
    point, trainer, launcher = task.point, options.trainer, options.launcher
    command, environment = start_of(point, options, folder.path, task.data_prefix)
    launcher.export(environment, folder.path)
    for line in launcher.elsewhere(command, environment):
        say(f"start on another machine: {line}")
    gpus = _gpus(point, environment)
    try:
        before = look_around(gpus)
    finally:
        gpus.close()
    facts = task.facts(command, {**provenance(environment), "before": before})
    config = trainer.ds_config(point)
    if launcher.autotuning:
        config = tuned_config(config, folder.path)
    folder.write_inputs(point, facts, config)
    metrics = folder.metrics if trainer.writes_metrics else None
    return Job(command, ROOT, environment, folder.log, metrics, companions(point, folder.path))


def start_of(
    point: Point, options: RunOptions, run_dir: Path, data_prefix: str
) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts the ranks of a run, and its environment."""
    launcher, trainer = options.launcher, options.trainer
    program = trainer.program(point, run_dir, data_prefix)
    port = launcher.port()
    environment = launcher.environment(os.environ, point.num_ranks, port)
    environment |= scalar_environment(options.tensorboard)
    environment |= trainer.environment(point)
    environment |= point.row_environment
    return launcher.command(program, point.num_ranks, port, point.link_mbit), environment


def companions(point: Point, run_dir: Path) -> tuple[Companion, ...]:
    """Return the processes that the study puts beside the ranks, one for each device used here.

    The first of a kind reports to ``NAME.json``, that of GPU N > 0 to ``NAME-N.json``.
    """
    rows = {} if point.study is None else point.study.companions
    wanted = {name: row for name, row in rows.items() if point.value(row.field)}
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


def _gpus(point: Point, environment: dict[str, str]) -> Gpus:
    """The first GPUs that the ranks see."""
    count = 0 if point.device == "cpu" else point.num_ranks
    return Gpus(environment.get("CUDA_VISIBLE_DEVICES"), count)


def _monitor(
    job: Job, point: Point, folder: RunFolder, interval_s: float, members: Members
) -> Monitor:
    gpus = _gpus(point, dict(job.environment))
    return Monitor(members, folder.path / "monitor.jsonl", interval_s, gpus)


def _judged(ending: Ending, folder: RunFolder, point: Point, options: RunOptions) -> Status:
    lines = last_lines(folder.log, 2000, 2**20)
    trainer = options.trainer
    has_ended, is_full = trainer.has_ended(folder, point), disk_is_full(folder.path)
    status = judge(ending, lines, has_ended, is_full, trainer.end_mark)
    return with_verdict(status, folder)


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
    elif point.data_prefix:
        prefix = data_prefix(point.data_prefix)
        data = look_at(prefix).words
    else:
        prefix, data = "(the embedded corpus)", embedded_words()
    program, launcher = options.trainer.program(point, path, prefix), options.launcher
    port = launcher.port() if launcher.rdzv_endpoint else 0
    command = launcher.command(program, point.num_ranks, port, point.link_mbit)
    seconds = expected.seconds
    time = expected.how if seconds is None else f"about {duration_text(seconds)} ({expected.how})"
    lines = [
        f"point    {point.name or stem}",
        *more,
        f"folder   {path}",
        f"command  {shlex.join(command)}",
        f"model    {point.model.num_parameters(point.tp):,} parameters, "
        f"{point.num_ranks} rank(s), {point.iterations} iterations",
        *([f"links    {links}"] if (links := shaped_links([point.link_mbit])) else []),
        f"data     {data}",
        f"memory   {memory_text(point, machine, options.trainer)}",
        f"time     {time}",
        f"DeepSpeed {json.dumps(options.trainer.ds_config(point), indent=2)}",
    ]
    if lacking := lacks(point, machine, options):
        lines.insert(1, f"skipped  {'; '.join(lacking)}")
    return "\n".join(lines)
