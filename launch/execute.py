"""A task's run: prepared, started, watched, judged, recorded."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from configs.cli import say
from configs.files import ROOT, last_lines
from configs.schema import Point
from launch import identity
from launch.backends.protocol import Trainer
from launch.feasibility import probe_machine, runs_on_gpu
from launch.launchers import EXTENSIONS_VARIABLE, extensions_folder
from launch.ops import ready_extensions
from launch.postprocess import with_verdict
from launch.process.live import LiveLine
from launch.process.monitor import Gpus, look_around, monitoring
from launch.process.outcome import judge
from launch.process.supervise import Companion, Ending, Members, ProcessSpec, supervise
from launch.records import (
    INTERRUPTED,
    Driver,
    RunFolder,
    Status,
    create_run_folder,
    disk_is_full,
    runs_of_this_process,
)
from launch.task import RunOptions, Task


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    folder: RunFolder
    """Where everything about it lies."""
    status: Status
    """As in ``status.json``."""
    stop_signal: int | None = None
    """Signal that asked the harness to stop; None when nobody did."""


def execute(task: Task, options: RunOptions, live: LiveLine | None = None) -> Outcome:
    """Run a task in a new folder, to its end, and show meanwhile how it fares.

    With ``options.raw`` that is its log, as it grows, else the line ``live``.

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
    try:
        runs_of_this_process.add(job.token)
        shown = None if options.raw or live is None else live
        ending = supervise(job, monitor if options.monitor_s else None, options.raw, shown)
        status = _judged(ending, folder, task.point, options.trainer)
    except (KeyboardInterrupt, SystemExit):  # a signal just before or after the ranks
        status = Status(INTERRUPTED, cause="the launcher was stopped")
        raise
    finally:
        try:
            status = folder.record_end(status)
        finally:  # whatever the status comes to say: the next call must not wait for this run
            runs_of_this_process.discard(job.token)
    return Outcome(folder, status, ending.stop_signal)


def prepare(task: Task, options: RunOptions, folder: RunFolder, extensions: Path) -> ProcessSpec:
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
    return ProcessSpec(command, ROOT, environment, folder.log, metrics, beside, *limits)


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
