"""The main job: run a sweep's points one after the other, then tables, figures and the report."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.schema import CONFIGS_DIR, Point, load_point
from configs.sweep import AUTO_MODEL, Sweep, load_sweep, point_label, sweep_names
from launch import cli
from launch.capacity import largest_model_that_fits, refuse_if_short
from launch.data import data_prefix
from launch.files import ROOT, write_json
from launch.machine import Machine, probe_machine
from launch.run import Outcome, RunOptions, describe, execute
from launch.run_folder import SCHEMA_VERSION, sweep_dir

DEFAULT_SWEEP = "basic"
CPU_MODEL = "tiny"
"""What ``auto`` stands for on a machine without a GPU."""


@dataclass(frozen=True)
class Finished:
    """A run that has come to an end, good or bad."""

    point: Point
    outcome: Outcome


def choose_model(sweep: Sweep, overrides: dict[str, str], machine: Machine) -> str:
    """The sweep's model, or for ``auto`` the largest that fits this machine.

    Raises:
        ConfigError: no model fits.
    """
    if sweep.model != AUTO_MODEL:
        return sweep.model
    on_cpu = not machine.gpu_free_bytes or overrides.get("device") == "cpu"
    if on_cpu or sweep.point.get("device") == "cpu":
        return CPU_MODEL
    return largest_model_that_fits(lambda name: sweep.points(name, overrides), machine)


def run_all(
    sweep: Sweep, points: Sequence[Point], options: RunOptions
) -> tuple[list[Finished], int]:
    """Run every point; one that fails does not stop the others.

    ``sweep.json`` is rewritten after each, so that a crash loses the running point at most.

    Returns:
        The runs that ended, in order, and the signal that stopped the sweep, or 0.
    """
    folder = sweep_dir(options.results_dir, options.sweep)
    prefix = data_prefix(points[0].data_prefix)
    finished: list[Finished] = []
    for number, point in enumerate(points, start=1):
        head = f"[{number}/{len(points)}] {point.name}"
        cli.say(f"{head}: started")
        outcome = execute(point, prefix, options)
        finished.append(Finished(point, outcome))
        _write_index(folder, sweep, finished)
        cli.say(f"{head}: {_ending_line(outcome)}")
        if outcome.stop_signal is not None:
            return finished, outcome.stop_signal
    return finished, 0


def _ending_line(outcome: Outcome) -> str:
    status, loss = outcome.status, outcome.folder.last_loss()
    line = f"{status.status} in {status.seconds:.1f} s, last loss {loss if loss else 'none'}"
    if status.status == "ok":
        return line
    return f"{line}; {status.cause}; see {outcome.folder.log}"


def _write_index(folder: Path, sweep: Sweep, finished: Sequence[Finished]) -> None:
    runs = [
        {
            "name": run.point.name,
            "engine": run.point.engine.value,
            "run_dir": run.outcome.folder.path.relative_to(folder).as_posix(),
            "log": run.outcome.folder.log_name,
        }
        for run in finished
    ]
    write_json(
        folder / "sweep.json",
        {
            "schema_version": SCHEMA_VERSION,
            "name": sweep.name,
            "description": sweep.description,
            "runs": runs,
        },
    )


def derive(folder: Path) -> int:
    """Make tables, figures and the report of a sweep folder.

    Returns:
        0, or the exit code of the first step that failed; the report's is not 0 when two engines'
        results are not equal.
    """
    steps = (
        ("tables", ["parse", str(folder), "--out", str(folder / "tables")]),
        ("figures", ["plots", str(folder / "tables"), "--out", str(folder / "figures")]),
        ("report", ["parse.report", str(folder)]),
    )
    worst = 0
    for what, arguments in steps:
        command = [sys.executable, "-m", *arguments]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code:
            cli.say(f"{what}: exit code {code}")
        worst = worst or code
    cli.say(f"report   {folder / 'report.md'}")
    cli.say(f"figures  {folder / 'figures'}")
    return worst


def list_configs() -> None:
    """Print sweeps and points, a line each."""
    cli.say("sweeps (--sweep NAME)")
    for name in sweep_names():
        cli.say(f"  {name:24} {load_sweep(name).description}")
    cli.say("points (python -m launch.run NAME)")
    for path in sorted((CONFIGS_DIR / "points").glob("*.toml")):
        point = load_point(path)
        cli.say(f"  {path.stem:24} {point_label(point)}, {point.num_ranks} rank(s)")


def build_parser() -> cli.Parser:
    """Options of the main job."""
    parser = cli.Parser("bash master-script.sh", "Run a sweep, then make its report.")
    parser.add_argument("--list", action="store_true", help="list sweeps and points, and leave")
    parser.add_argument(
        "--sweep", default=DEFAULT_SWEEP, metavar="NAME", help="name or TOML file [default basic]"
    )
    parser.add_argument("--model", metavar="NAME", help="run this model instead of the sweep's")
    parser.add_argument("--iterations", metavar="N", help="iterations of each run")
    parser.add_argument("--device", metavar="V", help="auto, cpu or cuda [default auto]")
    cli.add_run_options(parser, echo=False)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the main job from the command line.

    Returns:
        0 when every run is ok and every comparison equal.

    Raises:
        ConfigError: an option or the sweep is wrong, or the machine is too small.
    """
    given = build_parser().read(argv)
    if given.list:
        list_configs()
        return 0
    sweep = load_sweep(given.sweep)
    if given.model is not None:
        sweep = sweep.model_copy(update={"model": given.model})
    fields = ("iterations", "device")
    overrides = {name: value for name in fields if (value := getattr(given, name)) is not None}
    machine = probe_machine()
    points = sweep.points(choose_model(sweep, overrides, machine), overrides)
    options = RunOptions(
        given.results_dir, sweep.name, given.timeout, given.echo, given.trainer_module
    )
    if given.dry_run:
        for point in points:
            cli.say(describe(point, machine, options) + "\n")
        return 0
    for point in points if not given.no_memory_check else ():
        refuse_if_short(point, machine)
    return _run_and_report(sweep, points, options)


def _run_and_report(sweep: Sweep, points: Sequence[Point], options: RunOptions) -> int:
    finished, stop_signal = run_all(sweep, points, options)
    folder = sweep_dir(options.results_dir, options.sweep)
    if stop_signal:
        cli.say(f"interrupted: {len(finished)} of {len(points)} runs are in {folder}")
        return 128 + stop_signal
    code = derive(folder)
    failed = [run for run in finished if run.outcome.status.status != "ok"]
    if failed:
        cli.say(f"{len(failed)} of {len(points)} runs failed")
        return 1
    return code


if __name__ == "__main__":
    raise SystemExit(cli.run_command(lambda: main(sys.argv[1:])))
