"""The main job: run a sweep's points one after the other, then tables, figures and the report."""

from __future__ import annotations

import fnmatch
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from configs.cli import EXIT_USAGE, Parser, complain, count, duration, say
from configs.errors import ConfigError, explain
from configs.overrides import MODEL_FIELDS
from configs.schema import Point
from configs.study import Study
from configs.sweep import Sweep, load_sweep, sweep_names
from deep_optimizer_states.predict.machine import load_machine
from launch import cli
from launch.data import with_data
from launch.derive import derive
from launch.estimate import TimeLimit
from launch.execute import describe
from launch.fit import (
    PROFILES,
    Machine,
    dtype_text,
    in_fast_type,
    largest_model_that_fits,
    probe_machine,
    refuse_if_lacking,
    refuse_if_short,
)
from launch.hosts.launchers import TORCHRUN
from launch.listing import listing
from launch.records.ledger import Choice, read_records
from launch.records.run_folder import sweep_dir
from launch.simulate.command import (
    Simulation,
    largest_that_fits,
    simulate_sweep,
)
from launch.simulate.workloads import AsOf
from launch.sweep_index import reasons_in_index, write_index, write_summary
from launch.sweep_runner import (
    Plan,
    Request,
    all_records,
    run_all,
    summary,
    total_text,
    what_would_run,
    why_not_here,
)
from launch.task import RunOptions
from launch.trainers import trainer_of

_KEEP_RESULTS = (Choice.KEEP, Choice.RESUME, Choice.RERUN_FAILED)
"""Choices that let results of other processors stand."""
LargestModel = Callable[[Sequence[str], Callable[[str], Sequence[Point]]], str]
"""Of models, the smallest first, the largest all of whose points fit."""


def make_plan(sweep: Sweep, given: Namespace, machine: Machine) -> Plan:
    """Return the points of a sweep on this machine.

    Without a GPU, and without a model that was asked for, a sweep runs in its small form.

    Raises:
        ConfigError: a field is wrong, or no model fits.
    """
    on_cpu = "cpu" in (given.device, sweep.point.get("device"))
    has_gpu = bool(machine.gpu_free_bytes) and not on_cpu
    room, small = machine, sweep.study.small_model
    if not machine.gpu_free_bytes and not on_cpu and given.dry_run and given.size == "full":
        # A full dry run shows what a machine with GPUs would run.
        profile = load_machine(PROFILES[True])
        gpus = (int(profile.device_memory_bytes or 0),) * profile.gpus
        room = Machine(int(profile.host_memory_bytes), gpus)
    if given.size != "auto" or given.model is not None:
        is_tiny = given.size == "tiny" or given.model == small
    else:
        is_tiny = sweep.model != small and not has_gpu
    trainer = trainer_of(given, sweep.study)
    largest = partial(largest_model_that_fits, machine=room, trainer=trainer)
    sweep, found = _sized(sweep, given, is_tiny, largest)
    points, data = with_data(found, given)
    options = RunOptions.of(given, sweep.name, sweep.study)
    stays = ""
    if given.report_only or given.choice in _KEEP_RESULTS:
        # Results that came from another machine stay, or are completed, in their own type.
        records = read_records(sweep_dir(options.results_dir, options.sweep))
        stays = next((record.dtype for record in reversed(records) if record.status == "ok"), "")
    points, reasons = in_fast_type(points, machine, options, stays)
    options = replace(options, dtype_reasons=reasons)
    return Plan(sweep, tuple(points), machine, options, data)


def _sized(
    sweep: Sweep, given: Namespace, is_tiny: bool, largest: LargestModel
) -> tuple[Sweep, list[Point]]:
    """The sweep in the form, with the engines and fields that were asked for, and its points."""
    over, model = _overrides(given, sweep.study), given.model
    if is_tiny:
        sweep, model = sweep.small(), None
    if given.repeats is not None:
        sweep = sweep.model_copy(update={"repeats": given.repeats})
    if given.engines is not None:
        sweep, added = sweep.with_engines(given.engines)
        if added:
            say(f"--engines: '{added}' is added, which the others are held against")
    for name in over:
        if any(name in table for table in (sweep.grid, *sweep.engines)):
            say(f"{name} {over[name]}: in place of the values that sweep '{sweep.name}' has")
    if model is None and sweep.leaves_model_open:
        model = largest(sweep.study.model_names(), partial(sweep.sizing_points, overrides=over))
    return sweep, sweep.points(model, over)


def _overrides(given: Namespace, study: Study) -> dict[str, str]:
    """Fields that are set in every run: of options by their names, and of ``--set``."""
    not_set = {"name", "model", "engine"}
    fields = [*study.point_type.model_fields, "accumulation", *MODEL_FIELDS]
    known = [name for name in fields if name not in not_set]
    over = {
        name: value
        for name, value in cli.field_overrides(given, study).items()
        if name not in not_set
    }
    for text in given.set:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not value:
            raise ConfigError(f"--set {text!r}: give FIELD=VALUE, as in --set lr=1e-4")
        if name in (*not_set, "data_prefix"):
            raise ConfigError(
                f"--set {text!r}: choose models, engines and data by --model, --engines and --data"
            )
        if name not in known:
            raise ConfigError(f"--set {text!r}: {explain.unknown('field', name, known)}")
        if name in over:
            raise ConfigError(f"--set {text!r}: '{name}' is {over[name]} already; give it once")
        over[name] = value
    return over


def _numbered(points: Sequence[Point], names: Sequence[str]) -> str:
    """Names of points with their numbers in the plan, as ``--index`` takes them."""
    found = {point.name: number for number, point in enumerate(points, start=1)}
    return "\n".join(f"{found[name]:4}  {name}" for name in names)


def simulate(sweep: Sweep, given: Namespace, simulation: Simulation) -> int:
    """Predict a sweep, in its full form unless the small one is asked for; the exit code.

    Raises:
        ConfigError: a field is wrong, a rate is missing, or a folder cannot be written.
    """
    largest = partial(largest_that_fits, simulation)
    sweep, points = _sized(sweep, given, given.size == "tiny", largest)
    names = choose_points(points, given.only, given.index)
    if given.list_points:
        say(_numbered(points, names))
        return 0
    chosen = [point for point in points if point.name in names]
    made = None if given.no_report else derive
    return simulate_sweep(simulation, sweep, chosen, made, given.dry_run)


def choose_points(points: Sequence[Point], only: Sequence[str], index: int | None) -> list[str]:
    """Return the names of the points that ``--only`` and ``--index`` ask for, in the plan's order.

    ``only`` has names, parts of names, or patterns with ``*``; ``index`` counts from 1.

    Raises:
        ConfigError: nothing is meant by one of them; the nearest name is given.
    """
    names = [point.name for point in points]
    if index is not None:
        if not 1 <= index <= len(names):
            raise ConfigError(f"--index {index}: the plan has points 1 to {len(names)}")
        return [names[index - 1]]
    chosen: set[str] = set()
    for word in only:
        found = [name for name in names if name == word]
        found = found or fnmatch.filter(names, word) or [n for n in names if word in n]
        if not found:
            raise ConfigError(explain.unknown("point", word, names))
        chosen.update(found)
    return [name for name in names if name in chosen] if only else names


def dry_run(plan: Plan, names: Sequence[str], request: Request) -> None:
    """Print what would be run and why: points, commands, memory, time and DeepSpeed's JSON."""
    decisions = {
        name: each for name, each in what_would_run(plan, request).items() if name in names
    }
    for point in plan.points:
        if point.name in names:
            lines = [
                f"runs     {'yes' if one.run else 'no'}: {one.why or 'never run before'}"
                + (f" (repeat {number})" if plan.sweep.repeats > 1 else "")
                for number, one in enumerate(decisions[point.name], start=1)
            ]
            text = describe(point, plan.machine, plan.options, lines)
            say(f"{text}\n")
    say(f"sweep '{plan.sweep.name}': {total_text(plan, decisions)}")


def build_parser(study: Study | None = None) -> Parser:
    """Return the options of the main job, with one for each field of a study where it is known."""
    parser = Parser("bash master-script.sh", "Run a sweep, then make its report.")
    what = parser.add_argument_group("what to run")
    switch = partial(what.add_argument, action="store_true")
    switch("--list", help="list studies, sweeps, points and engines, and leave")
    cli.add_study_option(what)
    switch("--list-points", help="list the points of the sweep by number, and leave")
    what.add_argument("--sweep", metavar="NAME", help="name or TOML file [default the study's]")
    switch("--all", help="every sweep of the study, one after the other")
    what.add_argument("--engines", metavar="A,B:FIELD=V", help="in place of the sweep's engines")
    only = "name, part of it or pattern"
    what.add_argument("--only", action="append", default=[], metavar="POINT", help=only)
    what.add_argument("--index", type=int, metavar="N", help="the N-th point alone, from 1")
    sizes, size = ("auto", "tiny", "full"), "form of the sweep [default auto: tiny without a GPU]"
    what.add_argument("--size", choices=sizes, default="auto", help=size)
    what.add_argument("--model", metavar="NAME", help="run this model instead of the sweep's")
    fields = "in every run that takes it, any field of a point; may be repeated"
    what.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help=fields)
    what.add_argument("--iterations", metavar="N", help="iterations of each run")
    what.add_argument("--repeats", type=count, metavar="N", help="runs of each point")
    minutes = partial(duration, "minutes")
    left = "start no run that is not likely to end within so many minutes from now"
    what.add_argument("--minutes", type=minutes, metavar="N", help=left)
    what.add_argument("--device", metavar="V", help="auto, cpu or cuda [default auto]")
    what.add_argument("--data-prefix", metavar="P", help="the field of every point, see --data")
    vocab_size = "model.vocab_size"
    what.add_argument("--model.vocab-size", dest=vocab_size, metavar="N", help="of every model")
    _add_choices(parser)
    _add_simulation_options(parser)
    cli.add_run_options(parser, echo=False)
    if study is not None:
        cli.add_field_options(parser, study, of_sweep=True)
    return parser


def _add_choices(parser: Parser) -> None:
    choice = parser.add_mutually_exclusive_group()
    for value, text in (
        (Choice.RESUME, "only what was never run or was interrupted"),
        (Choice.RERUN_FAILED, "only what failed or was interrupted"),
        (Choice.AGAIN, "everything, done or not"),
        (Choice.KEEP, "what is not done, be it with older code, which is marked then"),
    ):
        one = partial(choice.add_argument, f"--{value}", dest="choice")
        one(action="store_const", const=value, help=text)
    choice.add_argument("--report-only", action="store_true", help="run nothing, report anew")
    parser.add_argument("--no-report", action="store_true", help="leave out tables and report")


def _add_simulation_options(parser: Parser) -> None:
    add = parser.add_argument_group("prediction instead of runs").add_argument
    simulated = "predict the sweep in its full form, run nothing"
    add("--simulate", action="store_true", help=simulated)
    machine = "with --simulate: a shipped profile or a calibrated file"
    add("--machine", metavar="NAME", help=machine)
    words = tuple(word.value for word in AsOf)
    software = "with --simulate: whose software [default: the paper's on h100x4 and a100x4]"
    add("--as-of", choices=words, help=software)


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
    if given.machine is not None or given.as_of is not None:
        raise ConfigError("--machine and --as-of need --simulate: a run takes what is there")
    machine, limit = probe_machine(), given.minutes and TimeLimit(60 * given.minutes)
    plans = [make_plan(sweep, given, machine) for sweep in sweeps]
    worst = 0
    for plan in plans:
        if len(plans) > 1:
            say(f"sweep '{plan.sweep.name}': {plan.sweep.description}")
        code = _run_plan(plan, given, plans, limit)
        if code > 128:
            return code
        worst = worst or code
    return worst


def _run_plan(plan: Plan, given: Namespace, plans: Sequence[Plan], limit: TimeLimit | None) -> int:
    names = choose_points(plan.points, given.only, given.index)
    if given.list_points:
        say(_numbered(plan.points, names))
        return 0
    for line in (plan.data, dtype_text(plan.options.dtype_reasons)):
        if line:
            say(line)
    everything = len(names) == len(plan.points)
    request = Request(
        choice=given.choice or Choice.MISSING,
        chosen=None if everything else frozenset(names),
        shared=tuple(other.folder for other in plans) if given.all else (),
        # The hosts of a far run are not this one.
        memory_check=not given.no_memory_check and not plan.options.launcher.is_far,
        time_limit=limit,
    )
    if given.dry_run:
        if given.size == "full" and not plan.machine.gpu_free_bytes:
            # As a machine with GPUs would run it.
            cuda = {"device": "cuda"}
            as_there = [
                point.model_copy(update=cuda if point.device == "auto" else {})
                for point in plan.points
            ]
            plan = replace(plan, points=tuple(as_there))
        dry_run(plan, names, request)
        return 0
    if given.report_only:
        if not all_records(plan, request):
            complain(f"error: no run of sweep '{plan.sweep.name}' in {plan.folder}")
            return EXIT_USAGE
        records, left_out = all_records(plan, request), reasons_in_index(plan.folder)
        write_index(plan.sweep, plan.folder, plan.tasks(), records, left_out)
        code = derive(plan.folder, plan.sweep.figures)
        write_summary(plan.folder, code, has_findings=code in (0, 1))
        return code
    chosen = [point for point in plan.points if point.name in names]
    reasons = [why_not_here(point, plan, request.memory_check) for point in chosen]
    if all(reasons):
        refuse_if_lacking(chosen[0], plan.machine, plan.options)
        refuse_if_short(chosen[0], plan.machine, plan.options.trainer)
    return _run_and_report(plan, request, given.no_report)


def _run_and_report(plan: Plan, request: Request, no_report: bool) -> int:
    progress = run_all(plan, request)
    asked = plan.points if request.chosen is None else request.chosen
    say(summary(progress, len(asked) * plan.sweep.repeats))
    if progress.stop_signal:
        say(f"interrupted; what is done is in {plan.folder}, --resume goes on")
        no_report = True
    derived = 0 if no_report else derive(plan.folder, plan.sweep.figures)
    code = 1 if progress.failed or progress.interrupted else derived
    code = 128 + progress.stop_signal if progress.stop_signal else code
    write_summary(plan.folder, code, has_findings=not no_report and derived in (0, 1))
    return code


if __name__ == "__main__":
    raise SystemExit(cli.run_command(lambda: main(sys.argv[1:])))
