"""What a dry run says of points: whether and why they would run, and as what."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from configs.cli import say
from configs.fields import shaped_links
from configs.schema import Point
from launch.data import data_prefix, data_words, is_embedded, require_vocabulary
from launch.feasibility import Host, estimate, lacks, memory_text
from launch.process.watch import duration_text
from launch.records import next_run_path, read_records, sweep_dir
from launch.sweep_runner import Request, SweepPlan, total_text, what_would_run
from launch.task import RunOptions


def dry_run(plan: SweepPlan, names: Sequence[str], request: Request) -> None:
    """Print what would be run and why: points, commands, memory, time and DeepSpeed's JSON."""
    decisions = what_would_run(plan, request)
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
    lacking, links = lacks(point, machine, options), shaped_links([point.link_mbit])
    lines = [
        f"point    {point.name or stem}",
        *([f"skipped  {'; '.join(lacking)}"] if lacking else []),
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
