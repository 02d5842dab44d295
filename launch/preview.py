"""What a dry run says of points: whether and why they would run, and as what."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from configs.cli import say
from configs.fields import shaped_links
from configs.schema import Point
from launch.data import data_prefix, data_words, is_embedded, require_vocabulary
from launch.feasibility import Host, estimate, memory_text
from launch.process.watch import duration_text
from launch.records import Decision, next_run_path, read_records, sweep_dir
from launch.sweep_runner import Request, SweepPlan, refusal, total_text, what_would_run
from launch.task import RunOptions


def dry_run(
    plan: SweepPlan, names: Sequence[str], request: Request, shown: SweepPlan | None = None
) -> None:
    """Print what would be run and why: points, commands, memory, time and DeepSpeed's JSON.

    Whether a point would run is decided as for the run itself. The plan ``shown`` has the same
    points by name, as another machine would run them.
    """
    decisions, shown, refused = what_would_run(plan, request), shown or plan, 0
    for point, seen in zip(plan.points, shown.points, strict=True):
        if point.name in names:
            reason = refusal(plan, request, point)
            refused += bool(reason) and any(one.run for one in decisions[point.name])
            lines = [
                runs_text(one, reason) + (f" (repeat {number})" if plan.sweep.repeats > 1 else "")
                for number, one in enumerate(decisions[point.name], start=1)
            ]
            say(f"{describe(seen, plan.machine, plan.options, lines)}\n")
    few = f"; {refused} of the points cannot run here" if refused else ""
    say(f"sweep '{plan.sweep.name}': {total_text(shown, decisions)}{few}")


def runs_text(decision: Decision, reason: str) -> str:
    """Say whether a point would run; ``reason`` is why it cannot, empty where it can."""
    if decision.run and reason:
        return f"runs     no: {reason}"
    return f"runs     {'yes' if decision.run else 'no'}: {decision.why or 'never run before'}"


def describe(point: Point, machine: Host, options: RunOptions, more: Sequence[str] = ()) -> str:
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
    links = shaped_links([point.link_mbit])
    lines = [
        f"point    {point.name or stem}",
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
