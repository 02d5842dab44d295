"""One run: ``python -m launch.run POINT.toml [--field value ...]``.

POINT is a file, or the name of one in ``configs/points``.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.errors import ConfigError, explain
from configs.overrides import apply_overrides
from configs.schema import CONFIGS_DIR, Point, make_point, read_toml
from launch import cli
from launch.capacity import GIB, predict, refuse_if_short, runs_on_gpu, shortages
from launch.data import data_prefix
from launch.ds_json import deepspeed_config
from launch.extension_locks import clear_stale_locks
from launch.files import ROOT, last_lines
from launch.machine import Machine, probe_machine
from launch.outcome import judge
from launch.provenance import provenance
from launch.ranks import TRAINER_MODULE, free_port, ranks_command, ranks_environment
from launch.run_folder import (
    RunFolder,
    Status,
    create_run_folder,
    next_run_path,
    sweep_dir,
)
from launch.supervise import supervise

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
    trainer_module: str = TRAINER_MODULE
    """Module the ranks run on ``run.json``."""


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    folder: RunFolder
    """Where everything about it lies."""
    status: Status
    """As in ``status.json``."""
    stop_signal: int | None = None
    """Signal that asked the harness to stop; None when nobody did."""


def execute(point: Point, prefix: str, options: RunOptions) -> Outcome:
    """Run ``point`` on the data at ``prefix`` in a new folder, to its end.

    Raises:
        ConfigError: the results folder cannot be made.
    """
    folder = create_run_folder(options.results_dir, options.sweep, point)
    port = free_port()
    command = ranks_command(folder.run_json, point.num_ranks, port, options.trainer_module)
    environment = ranks_environment(os.environ, point.num_ranks, port)
    folder.write_inputs(point, prefix, command, provenance(environment))
    status = Status("failed", cause="the launcher itself ended before the run did")
    folder.write_status(Status("running"))
    clear_stale_locks(Path(environment["TORCH_EXTENSIONS_DIR"]))
    try:
        ending = supervise(command, ROOT, environment, folder.log, options.timeout_s, options.echo)
        status = judge(ending, last_lines(folder.log, 2000, 2**20), folder.has_ended())
    finally:
        folder.write_status(status)
    return Outcome(folder, status, ending.stop_signal)


def describe(point: Point, machine: Machine, options: RunOptions) -> str:
    """What a run of ``point`` would be: folder, command, memory and DeepSpeed's JSON."""
    stem = point.log_name.removesuffix(".log")
    path = next_run_path(sweep_dir(options.results_dir, options.sweep) / stem)
    command = ranks_command(path / "run.json", point.num_ranks, 0, options.trainer_module)
    need = predict(point, runs_on_gpu(point, machine))
    verdict = "; ".join(shortages(point, machine)) or "fits this machine"
    return "\n".join(
        [
            f"point    {point.name or stem}",
            f"folder   {path}",
            f"command  {shlex.join(command)}",
            f"model    {point.model.num_parameters(point.tp):,} parameters, "
            f"{point.num_ranks} rank(s), {point.iterations} iterations",
            f"memory   predicted host {need.host_bytes / GIB:.1f} GiB, "
            f"each GPU {need.device_bytes / GIB:.1f} GiB: {verdict}",
            f"DeepSpeed {json.dumps(deepspeed_config(point), indent=2)}",
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
    if memory_check:
        refuse_if_short(point, machine)
    prefix = data_prefix(point.data_prefix)
    outcome = execute(point, prefix, options)
    cli.say(f"{outcome.status.status}: {outcome.folder.path}")
    if outcome.status.cause:
        sys.stderr.write(f"{outcome.status.status}: {outcome.status.cause}\n")
    return outcome.status.exit_code or 0


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
    options = RunOptions(
        given.results_dir, given.sweep, given.timeout, given.echo, given.trainer_module
    )
    return run_point(point, options, given.dry_run, not given.no_memory_check)


if __name__ == "__main__":
    raise SystemExit(cli.run_command(lambda: main(sys.argv[1:])))
