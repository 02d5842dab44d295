"""A sweep as jobs of a batch system: ``python -m launch.submit --scheduler slurm --sweep NAME``.

One task of a job array a point, and a job after all of them that makes the report. What stands
after ``--`` goes to ``launch.sweep`` as it is. Scripts, their output and ``submission.json`` lie in
the sweep's folder; to go on with a sweep, submit it again: what is done is skipped.
"""

from __future__ import annotations

import math
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.files import ROOT, write_json
from configs.sweep import load_sweep
from launch import cli, sweep as sweep_command
from launch.cluster.jobs import SCHEDULERS, Ask, BatchJob, render
from launch.fit.dtype import options_for_others
from launch.fit.machine import probe_machine
from launch.hosts.hostfile import ranks_a_node
from launch.hosts.launchers import TORCHRUN
from launch.records.ledger import Choice
from launch.records.provenance import redact
from launch.sweep_runner import Plan

SCHEMA_VERSION = 1
"""Of ``submission.json``."""
SUBMISSIONS = "submissions"
"""Folder in a sweep's; a folder a submission in it."""
OWN_OPTIONS = (
    *("all", "list", "list_points", "report_only", "index", "dry_run"),
    *("hostfile", "srun", "nnodes", "node_rank", "master_addr"),
)
"""Options of ``launch.sweep`` that the scripts set, or that make no sense in them."""


@dataclass(frozen=True)
class Submission:
    """What is to be submitted."""

    ask: Ask
    plan: Plan
    arrays: tuple[BatchJob, ...]
    """One for each number of nodes."""
    report: BatchJob


def build_parser() -> cli.Parser:
    """Options of ``launch.submit``."""
    parser = cli.Parser("python -m launch.submit", __doc__ or "")
    parser.add_argument("--scheduler", choices=tuple(SCHEDULERS), required=True)
    cli.add_study_option(parser)
    parser.add_argument("--sweep", required=True, metavar="NAME", help="name or TOML file")
    parser.add_argument("--results-dir", type=Path, default=ROOT / "results", metavar="DIR")
    parser.add_argument("--dry-run", action="store_true", help="show the scripts, submit nothing")
    ask = parser.add_argument_group("asked of the batch system")
    ask.add_argument("--account", default="", metavar="NAME")
    ask.add_argument("--partition", "--queue", dest="queue", default="", metavar="NAME")
    ask.add_argument(
        "--time",
        default="",
        metavar="HH:MM:SS",
        help="of each point; Slurm tells it to end two to three minutes earlier",
    )
    for flag, text in (
        ("gpus-per-node", ""),
        ("cpus-per-node", ""),
        ("max-parallel", "points at a time"),
    ):
        ask.add_argument(f"--{flag}", type=_count_or_0, default=0, metavar="N", help=text)
    ask.add_argument(
        "--ranks-per-node",
        type=cli.count,
        metavar="N",
        help="[default --gpus-per-node; without GPUs all ranks on one node]",
    )
    ask.add_argument(
        "--share-nodes", action="store_true", help="with other jobs; times may suffer from them"
    )
    for flag, text in (
        ("--setup", "line of shell to begin every job with, such as 'module load cuda'"),
        ("--extra", "directive, such as '#SBATCH --exclusive'"),
    ):
        ask.add_argument(flag, action="append", default=[], metavar="LINE", help=text)
    return parser


def _count_or_0(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def make_submission(given: Namespace, rest: Sequence[str], cwd: Path) -> Submission:
    """Plan the sweep and its jobs.

    Args:
        given: options of :func:`build_parser`.
        rest: options for ``launch.sweep``.
        cwd: folder that relative paths start from.

    Raises:
        ConfigError: an option or the sweep is wrong.
    """
    plan, options = _plan(given, rest)
    ask = Ask(**{field.name: getattr(given, field.name) for field in fields(Ask)})
    ask.check()
    names = sweep_command.choose_points(plan.points, options.only, None)
    folder = _next_folder(plan.folder / SUBMISSIONS)
    command = [sys.executable, "-P", "-m", "launch.sweep", *_sweep_words(given)]
    if options.model is None and not any(word.partition("=")[0] == "--size" for word in rest):
        # This machine may have no GPU, which must not decide the size of the sweep.
        command += ["--size", options.size]
    command += options_for_others(plan.points, plan.options)
    # What decides which runs to do has no meaning for the report.
    choices = {"--resume", "--rerun-failed", "--keep"}
    command += [word for word in rest if word not in choices]
    # It asks for what the points ask for: some queues take no job that asks for less.
    report = BatchJob(
        name=f"{plan.sweep.name}-report",
        folder=folder,
        cwd=cwd,
        root=ROOT,
        command=(*command, "--report-only"),
        setup=tuple(given.setup),
    )
    by_nodes: dict[int, list[int]] = {}
    for index, point in enumerate(plan.points, start=1):
        if point.name in names:
            by_nodes.setdefault(_nodes(given, point.num_ranks), []).append(index)
    if max(by_nodes) > 1 and ask.scheduler == "slurm" and options.launcher != TORCHRUN:
        raise ConfigError(
            f"--launcher {options.launcher}: several nodes of a Slurm job are started by srun and "
            "torchrun"
        )
    command += [f"--{options.choice or Choice.RESUME}", "--no-report"]
    arrays = [
        replace(
            report,
            name=f"{plan.sweep.name}-{nodes}-node{'s' if nodes > 1 else ''}",
            # What a point needs is more than its first node has.
            command=(
                *command,
                *(["--no-memory-check"] if nodes > 1 else []),
                *(["--share"] if ask.share_nodes else []),
            ),
            nodes=nodes,
            ranks_per_node=_room(given),
            indices=tuple(indices),
        )
        for nodes, indices in sorted(by_nodes.items())
    ]
    return Submission(ask, plan, tuple(arrays), report)


def _sweep_words(given: Namespace) -> list[str]:
    study = [] if given.study is None else ["--study", given.study]
    return [*study, "--sweep", given.sweep, "--results-dir", str(given.results_dir)]


def _plan(given: Namespace, rest: Sequence[str]) -> tuple[Plan, Namespace]:
    words = [*_sweep_words(given), *rest]
    options = sweep_command.build_parser(cli.study_in(words)).read(words)
    for name in OWN_OPTIONS:
        if getattr(options, name) not in (None, False):
            raise ConfigError(f"--{name.replace('_', '-')} cannot stand after '--' here")
    if options.choice is Choice.AGAIN:
        raise ConfigError("--again cannot stand after '--': a job that is requeued runs it again")
    sweep = load_sweep(given.sweep, cli.study_in(words))
    if sweep.leaves_model_open and options.model is None and options.size != "tiny":
        raise ConfigError(
            f"sweep '{sweep.name}' leaves its model to the machine, and this is not the one that "
            "will run it; name a model after '--': -- --model 7B"
        )
    if options.size == "auto" and options.model is None:
        options.size = "full"
    return sweep_command.make_plan(sweep, options, probe_machine()), options


def _room(given: Namespace) -> int:
    """Ranks that a node has room for; 0 for any number."""
    return int(given.ranks_per_node or given.gpus_per_node)


def _nodes(given: Namespace, num_ranks: int) -> int:
    """Nodes of a point."""
    nodes = math.ceil(num_ranks / (_room(given) or num_ranks))
    ranks_a_node(num_ranks, nodes)
    return nodes


def _next_folder(parent: Path) -> Path:
    numbers = [int(p.name) for p in parent.glob("[0-9]*") if p.name.isdigit()]
    return parent / f"{max(numbers, default=0) + 1:03d}"


def submit(submission: Submission, say: Any = cli.say) -> dict[str, Any]:  # noqa: ANN401
    """Write the scripts and submit them; ``submission.json`` tells how far it came.

    Returns:
        What ``submission.json`` holds.

    Raises:
        ConfigError, LaunchError: the batch system is not there, or refuses a job.
    """
    ask, plan = submission.ask, submission.plan
    scheduler = SCHEDULERS[ask.scheduler]
    jobs = [*submission.arrays, submission.report]
    folder = submission.report.folder
    scripts = [render(ask, job) for job in jobs]  # all of them before the first is submitted
    folder.mkdir(parents=True)
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "scheduler": ask.scheduler,
        "sweep": plan.sweep.name,
        "argv": [redact(word) for word in sys.argv],
        "jobs": [],
    }
    for job, script in zip(jobs, scripts, strict=True):
        job.script.write_bytes(os.fsencode(script))
        job.script.chmod(0o755)
    ids: list[str] = []
    for job in jobs:
        after = tuple(ids) if job is submission.report else ()
        number = scheduler.submit(job.script, after)
        ids.append(number)
        record["jobs"].append(
            {
                "id": number,
                "script": job.script.name,
                "command": scheduler.command(job.script, after),
                "nodes": job.nodes,
                "points": [plan.points[index - 1].name for index in job.indices],
                "after": list(after),
            }
        )
        write_json(folder / "submission.json", record)
        say(f"{number}  {job.script}")
    return record


def main(argv: Sequence[str]) -> int:
    """Submit a sweep from the command line.

    Raises:
        ConfigError: an option or the sweep is wrong, or the batch system is not there.
        LaunchError: the batch system refuses a job.
    """
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    given = build_parser().read(words[:cut])
    submission = make_submission(given, words[cut + 1 :], Path.cwd())
    if given.dry_run:
        for job in (*submission.arrays, submission.report):
            cli.say(f"# {job.script}\n{render(submission.ask, job)}")
        return 0
    submit(submission)
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run_command(lambda: main(sys.argv[1:])))
