"""The main job: run a sweep's points one after the other, then tables, figures and the report."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from configs.cli import EXIT_USAGE, Parser, complain, count, duration, run_command, say
from configs.errors import ConfigError
from configs.schema import Point
from configs.study import Study
from configs.sweep import Sweep, load_sweep, sweep_names
from deep_optimizer_states.predict.machine import load_machine
from launch import cli
from launch.backends import trainer_of
from launch.choose import choose_points
from launch.data import with_data
from launch.feasibility import (
    DTYPE_TEXT,
    GPU_PROFILE,
    Host,
    in_fast_type,
    largest_model_that_fits,
    machine_of,
    probe_machine,
    refuse_what_cannot_run,
)
from launch.launchers import TORCHRUN
from launch.listing import listing
from launch.postprocess import derive
from launch.preview import dry_run
from launch.simulate.command import Simulation, simulate_sweep
from launch.sweep_runner import (
    Request,
    SweepPlan,
    all_records,
    reasons_in_index,
    refusal,
    run_all,
    write_index,
)
from launch.task import RunOptions


def make_plan(sweep: Sweep, given: Namespace, machine: Host) -> SweepPlan:
    """Return the points of a sweep on this machine.

    Without a GPU, and without a model that was asked for, a sweep runs in its small form, which the
    plan says.

    Raises:
        ConfigError: a field is wrong, or no model fits.
    """
    on_cpu = "cpu" in (given.device, sweep.point.get("device"))
    has_gpu = bool(machine.gpu_free_bytes) and not on_cpu
    room, small = machine, sweep.study.small_model
    if not machine.gpu_free_bytes and not on_cpu and given.dry_run and given.size == "full":
        # A full dry run shows what a machine with GPUs would run.
        room = machine_of(load_machine(GPU_PROFILE))
    if given.size != "auto" or given.model is not None:
        is_tiny = given.size == "tiny" or given.model == small
    else:
        is_tiny = sweep.model != small and not has_gpu
    own = sweep.own_models
    sweep, found = _sized(sweep, given, is_tiny, room)
    form = ""
    if is_tiny and given.size == "auto" and given.model is None:
        names = ", ".join(dict.fromkeys(point.model.name for point in found))
        models = f": model {names} in place of {own}" if names != own else ""
        form = (
            f"sweep '{sweep.name}' runs in its small form, since no GPU is used{models}; "
            "--size full keeps the sweep as it is"
        )
    points, data = with_data(found)
    options = RunOptions.of(given, sweep.name, sweep.study)
    points, reasons = in_fast_type(points, machine, options)
    options = replace(options, dtype_reasons=reasons)
    asked = cli.asked(given, sweep.study)
    return SweepPlan(sweep, tuple(points), machine, options, data, asked, form)


def _sized(sweep: Sweep, given: Namespace, is_tiny: bool, room: Host) -> tuple[Sweep, list[Point]]:
    """The sweep in the form, with the engines and fields that were asked for, and its points.

    A model that is left open is the largest that there is room for.
    """
    over, model = cli.asked(given, sweep.study).fields, given.model
    if is_tiny:
        sweep, model = sweep.small(), None
    if given.repeats is not None:
        sweep = sweep.model_copy(update={"repeats": given.repeats})
    if given.engines is not None:
        sweep, added = sweep.with_engines(given.engines)
        if added:
            say(f"--engines: '{added}' is added, which the others are compared with")
    for name in over:
        if any(name in table for table in (sweep.grid, *sweep.engines)):
            say(f"{name} {over[name]}: in place of the values that sweep '{sweep.name}' has")
    if model is None and sweep.leaves_model_open:
        points_of = partial(sweep.sizing_points, overrides=over)
        names, trainer = sweep.study.model_names(), trainer_of(given, sweep.study)
        model = largest_model_that_fits(names, points_of, room, trainer)
    return sweep, sweep.points(model, over)


def simulate(sweep: Sweep, given: Namespace, simulation: Simulation) -> int:
    """Predict a sweep, in its full form unless the small one is asked for; the exit code.

    Raises:
        ConfigError: a field is wrong, a rate is missing, or a folder cannot be written.
    """
    room = machine_of(simulation.profile)
    sweep, points = _sized(sweep, given, given.size == "tiny", room)
    names = choose_points(points, given.only, given.index)
    chosen = [point for point in points if point.name in names]
    made = None if given.no_report else derive
    asked = cli.asked(given, sweep.study)
    return simulate_sweep(simulation, sweep, chosen, made, given.dry_run, asked)


def build_parser(study: Study) -> Parser:
    """Return the options of the main job, with one for each field of the study's points."""
    parser = Parser("bash master-script.sh", "Run a sweep, then make its report.")
    what = parser.add_argument_group("what to run")
    switch = partial(what.add_argument, action="store_true")
    switch("--list", help="list studies, sweeps, points and engines, and leave")
    cli.add_study_option(what)
    what.add_argument("--sweep", metavar="NAME", help="name or TOML file [default the study's]")
    switch("--all", help="every sweep of the study, one after the other")
    what.add_argument("--engines", metavar="A,B", help="in place of the sweep's engines")
    only = "name, words or part of it, pattern, or a setting as layers 8"
    what.add_argument("--only", action="append", default=[], metavar="POINT", help=only)
    index = "the N-th point alone, from 1, as a task of a job array does"
    what.add_argument("--index", type=count, metavar="N", help=index)
    sizes, size = ("auto", "tiny", "full"), "form of the sweep [default auto: tiny without a GPU]"
    what.add_argument("--size", choices=sizes, default="auto", help=size)
    what.add_argument("--model", metavar="NAME", help="run this model instead of the sweep's")
    what.add_argument("--repeats", type=count, metavar="N", help="runs of each point")
    minutes = partial(duration, "minutes")
    left = "start no run that is not likely to end within so many minutes from now"
    what.add_argument("--minutes", type=minutes, metavar="N", help=left)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--again", action="store_true", help="everything, done or not")
    choice.add_argument("--report-only", action="store_true", help="run nothing, report anew")
    parser.add_argument("--no-report", action="store_true", help="leave out tables and report")
    _add_simulation_options(parser)
    cli.add_run_options(parser)
    cli.add_field_options(parser, study, left_out=cli.NOT_OF_SWEEPS)
    return parser


def _add_simulation_options(parser: Parser) -> None:
    add = parser.add_argument_group("prediction instead of runs").add_argument
    simulated = "predict the sweep in its full form, run nothing"
    add("--simulate", action="store_true", help=simulated)
    machine = "with --simulate: a shipped profile or a calibrated file"
    add("--machine", metavar="NAME", help=machine)


def main(argv: Sequence[str]) -> int:
    """Run the main job from the command line.

    Returns:
        0 when every run is ok and every comparison equal.

    Raises:
        ConfigError: an option or the sweep is wrong, or the machine is too small.
    """
    study = cli.study_in(argv)
    given = build_parser(study).read(argv)
    if given.list:
        say(listing(given.study))
        return 0
    if given.launcher == TORCHRUN and (given.nnodes or 1) > 1:
        raise ConfigError(
            f"--nnodes {given.nnodes}: torchrun's other machines are started by hand, a run at a "
            "time; use python -m launch.run, or --launcher srun or deepspeed for a sweep"
        )
    if given.all and given.sweep is not None:
        raise ConfigError(f"--all runs every sweep: leave out --all or --sweep {given.sweep}")
    names = sweep_names(study) if given.all else [given.sweep or study.default_sweep]
    sweeps = [load_sweep(name, study) for name in names]
    if given.simulate:
        simulation = Simulation.of(given, study)
        return max([simulate(sweep, given, simulation) for sweep in sweeps])
    if given.machine is not None:
        raise ConfigError("--machine needs --simulate: a run takes what is there")
    machine = probe_machine()
    deadline_s = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    plans = [make_plan(sweep, given, machine) for sweep in sweeps]
    worst = 0
    for plan in plans:
        if len(plans) > 1:
            say(f"sweep '{plan.sweep.name}': {plan.sweep.description}")
        code = _run_plan(plan, given, plans, deadline_s)
        if code > 128:
            return code
        worst = worst or code
    return worst


def _run_plan(
    plan: SweepPlan, given: Namespace, plans: Sequence[SweepPlan], deadline_s: float | None
) -> int:
    names = choose_points(plan.points, given.only, given.index)
    form = "" if given.report_only else plan.form
    for line in (form, plan.data, DTYPE_TEXT if plan.options.dtype_reasons else ""):
        if line:
            say(line)
    request = Request(
        again=given.again,
        chosen=None if len(names) == len(plan.points) else frozenset(names),
        shared=tuple(other.folder for other in plans) if given.all else (),
        # The hosts of a far run are not this one.
        memory_check=not given.no_memory_check and not plan.options.launcher.is_far,
        deadline_s=deadline_s,
    )
    if given.dry_run:
        is_full = given.size == "full" and not plan.machine.gpu_free_bytes
        dry_run(plan, names, request, _as_with_gpus(plan) if is_full else None)
        return 0
    if given.report_only:
        return _report_anew(plan, request)
    return _run(plan, names, request, with_report=not given.no_report)


def _as_with_gpus(plan: SweepPlan) -> SweepPlan:
    points = [
        point.model_copy(update={"device": "cuda"} if point.device == "auto" else {})
        for point in plan.points
    ]
    return replace(plan, points=tuple(points))


def _report_anew(plan: SweepPlan, request: Request) -> int:
    records = all_records(plan, request)
    if not records:
        complain(f"error: no run of sweep '{plan.sweep.name}' in {plan.folder}")
        return EXIT_USAGE
    tasks = plan.tasks()
    if {task.point_key for task in tasks}.isdisjoint(record.point_key for record in records):
        complain(
            f"error: the runs in {plan.folder} are of other points than these, as on another "
            "machine or with other options; report them by "
            f"`python -m parse.report {plan.folder}`"
        )
        return EXIT_USAGE
    write_index(plan, tasks, records, reasons_in_index(plan.folder))
    return derive(plan.folder, plan.sweep.figures)


def _run(plan: SweepPlan, names: Sequence[str], request: Request, *, with_report: bool) -> int:
    chosen = [point for point in plan.points if point.name in names]
    if all(refusal(plan, request, point) for point in chosen):
        refuse_what_cannot_run(chosen[0], plan.machine, plan.options, request.memory_check)
    progress = run_all(plan, request)
    say(progress.text(len(chosen) * plan.sweep.repeats))
    if progress.stop_signal:
        say(f"interrupted; what is done is in {plan.folder}, the same command goes on")
        return 128 + progress.stop_signal
    derived = derive(plan.folder, plan.sweep.figures) if with_report else 0
    return 1 if progress.failed or progress.interrupted else derived


if __name__ == "__main__":
    raise SystemExit(run_command(lambda: main(sys.argv[1:])))
