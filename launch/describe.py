"""What a run would be, in lines, for ``--dry-run``; and what there is to run, for ``--list``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from configs.fields import shaped_links
from configs.naming import Namer, flat
from configs.schema import Point
from configs.study import Study, load_study, study_names
from configs.sweep import load_sweep, sweep_names
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


def listing(chosen: Study | None) -> str:
    """Sweeps, points and engines of one study, or of every shipped one."""
    studies = [load_study(name) for name in study_names()] if chosen is None else [chosen]
    return "\n".join(line for study in studies for line in _study_lines(study))


def _study_lines(study: Study) -> Iterator[str]:
    default = " [default]" if study.is_default else ""
    yield f"study {study.name}{default}: {study.title}"
    yield "  sweeps (--sweep NAME)"
    for name in sweep_names(study):
        yield f"    {name:24} {load_sweep(name, study).description}"
    yield "  points (python -m launch.run NAME)"
    namer = Namer(study)
    for name, path in sorted(study.files("points").items()):
        point = study.load_point(path)
        words = f"{point.model.name} {namer.engine(flat(point))}, {point.num_ranks} rank(s)"
        yield f"    {name:24} {words}"
    yield "  engines (--engines NAME,NAME:field=value)"
    for name, engine in study.engines.items():
        notes = ["the reference"] if name == study.reference else []
        notes += [f"needs {need}" for need in engine.needs]
        note = f" ({', '.join(notes)})" if notes else ""
        yield f"    {name:24} {(engine.description or engine.title).rstrip('.')}{note}"
