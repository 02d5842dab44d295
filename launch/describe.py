"""What a run would be, in lines, for ``--dry-run``."""

from __future__ import annotations

import json
from collections.abc import Sequence

from configs.fields import shaped_links
from configs.schema import Point
from launch.data import data_prefix, embedded_words, look_at
from launch.fit.capacity import memory_text
from launch.fit.estimate import estimate
from launch.fit.machine import Machine
from launch.live import duration_text
from launch.needs import lacks
from launch.records.ledger import read_records
from launch.records.run_folder import next_run_path, sweep_dir
from launch.task import RunOptions


def describe(point: Point, machine: Machine, options: RunOptions, more: Sequence[str] = ()) -> str:
    """What a run of ``point`` would be: folder, command, memory, time and DeepSpeed's JSON.

    Args:
        point: what would be run.
        machine: where.
        options: how.
        more: lines to show after its name.

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
    program = options.trainer.program(point, path, prefix)
    port = options.launcher.master_port or 0
    commands = options.launcher.commands(program, point.num_ranks, port, point.link_mbit)
    seconds = expected.seconds
    time = expected.how if seconds is None else f"about {duration_text(seconds)} ({expected.how})"
    lines = [
        f"point    {point.name or stem}",
        *more,
        f"folder   {path}",
        commands.describe(),
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
