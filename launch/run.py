"""The command line of one run: ``python -m launch.run POINT [--field value ...]``.

POINT is a file, or the name of one of the study's points.
"""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from configs.cli import Parser, complain, run_command, say
from configs.errors import ConfigError, explain
from configs.files import read_toml
from configs.naming import name_points
from configs.schema import Point
from configs.study import Study
from launch import cli, feasibility
from launch.data import with_data
from launch.execute import execute
from launch.preview import describe
from launch.process.live import LiveLine
from launch.task import RunOptions, Task

SINGLE_RUNS = "single"
"""Sweep folder of runs started one by one."""


def find_point_file(name_or_path: str, study: Study) -> Path:
    """Return the file of a point: a path, or a name of the study.

    Raises:
        ConfigError: neither; the nearest name is given.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    shipped = study.files("points")
    for name in (name_or_path, _renamed(name_or_path, study)):
        if name in shipped:
            return shipped[name]
    if path.suffix == ".toml":
        raise ConfigError(f"{name_or_path}: no such file")
    raise ConfigError(explain.unknown("point", name_or_path, sorted(shipped)))


def _renamed(name: str, study: Study) -> str:
    """Return ``tiny-stride`` for ``tiny-hybrid``: the engine by the name that it has now."""
    model, _, engine = name.partition("-")
    return f"{model}-{study.engine_name(engine)}"


def run_point(point: Point, given: Namespace, study: Study) -> int:
    """Choose the data, check the machine, run; the exit code is the run's own.

    Raises:
        ConfigError: an option is wrong, or the machine is too small.
    """
    [point], data = with_data([point])
    options, machine = RunOptions.of(given, SINGLE_RUNS, study), feasibility.probe_machine()
    [point], reasons = feasibility.in_fast_type([point], machine, options)
    for line in (data, feasibility.DTYPE_TEXT if reasons else ""):
        if line:
            say(line)
    options = replace(options, dtype_reasons=reasons)
    memory_check = not given.no_memory_check and not options.launcher.is_far
    if given.dry_run:
        reason = feasibility.why_not_here(point, machine, options, memory_check)
        say(describe(point, machine, options, [f"runs     {f'no: {reason}' if reason else 'yes'}"]))
        return 0
    feasibility.refuse_what_cannot_run(point, machine, options, memory_check)
    task = Task.each([point], options)[0]
    [named] = name_points([point], study, cli.field_overrides(given, study))
    live = LiveLine(named.name, point.iterations)
    with options.turn(say), contextlib.closing(live):
        outcome = execute(task, options, live)
    # Imported here: whoever asks for --help need not wait for it.
    from parse.summary import summary

    for line in summary(outcome.folder.log):
        say(line)
    say(f"{outcome.status.status}: {outcome.folder.path}")
    if outcome.status.cause:
        complain(f"{outcome.status.status}: {outcome.status.cause}")
    return outcome.status.exit_code or 0


def build_parser(study: Study) -> Parser:
    """Return the options of ``launch.run``."""
    parser = Parser("python -m launch.run", "Run one point.")
    parser.add_argument("point", metavar="POINT", help="a TOML file, or the name of a point")
    cli.add_study_option(parser)
    cli.add_run_options(parser)
    cli.add_field_options(parser, study)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run one point from the command line.

    Raises:
        ConfigError: an option, the file or a field is wrong, or the machine is too small.
    """
    study = cli.study_in(argv)
    given = build_parser(study).read(argv)
    path = find_point_file(given.point, study)
    overrides = cli.field_overrides(given, study)
    table = study.overlaid(read_toml(path), overrides)
    options_too = f" with {', '.join(overrides)} from the command line" if overrides else ""
    return run_point(study.make_point(table, f"{path}{options_too}"), given, study)


if __name__ == "__main__":
    raise SystemExit(run_command(lambda: main(sys.argv[1:])))
