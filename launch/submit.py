"""A sweep as jobs of a batch system: ``python -m launch.submit --scheduler slurm --sweep NAME``.

One task of a job array a point, and a job after all of them that makes the report. What stands
after ``--`` goes to ``launch.sweep`` as it is. Scripts, their output and ``submission.json`` lie in
the sweep's folder; to go on with a sweep, submit it again: what is done is skipped.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2

from configs.cli import Parser, add_results_dir, count, count_from_0, say
from configs.errors import ConfigError
from configs.files import ROOT, write_json
from configs.sweep import load_sweep
from launch import cli, sweep as sweep_command
from launch.data import LaunchError
from launch.fit import dtype_option, probe_machine
from launch.hosts.launchers import TORCHRUN, ranks_a_node
from launch.records.ledger import Choice
from launch.records.provenance import redact
from launch.sweep_runner import Plan

SCHEMA_VERSION = 1
"""Of ``submission.json``."""
OWN_OPTIONS = (
    *("all", "list", "list_points", "report_only", "index", "dry_run"),
    *("hostfile", "nnodes", "rdzv_endpoint"),
)
"""Options of ``launch.sweep`` that the scripts set, or that make no sense in them."""
TEMPLATES = Path(__file__).resolve().parent / "templates"
ANSWER_S = 120.0
"""Longest time until a batch system answers."""
DIRECTIVES = {"slurm": "#SBATCH ", "pbs": "#PBS ", "lsf": "#BSUB "}
"""How a line for each batch system begins."""
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:,+=@-]*")
"""A value in a directive, which the batch system reads, not the shell."""
_TIME = re.compile(r"(\d{1,4}):([0-5]\d):([0-5]\d)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class BatchJob:
    """One job, or one array of jobs."""

    name: str
    """Letters, digits, ``-`` and ``.``."""
    folder: Path
    """Where its script and its output lie."""
    cwd: Path
    """Folder that relative paths in the command start from."""
    command: tuple[str, ...]
    """What runs, but for the options that the script itself finds out."""
    root: Path = ROOT
    """The checkout."""
    nodes: int = 1
    ranks_per_node: int = 1
    indices: tuple[int, ...] = ()
    """Points of the sweep's plan, one a task of the array; empty for a job without an array."""

    @property
    def script(self) -> Path:
        """Where its script lies."""
        return self.folder / f"{self.name}.sh"


def bash_quote(value: object) -> str:
    """Return one word of bash, on one line: what a batch system takes for directives are lines."""
    text = str(value)
    if "\0" in text:
        raise ConfigError(f"{text!r}: a NUL character can stand in no command")
    if not _CONTROL.search(text):
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", escaped) + "'"


def check_ask(ask: Namespace) -> None:
    """Refuse options of which more than a value would stand in their line.

    Raises:
        ConfigError: names the option.
    """
    for option, value in (("--account", ask.account), ("--queue", ask.queue)):
        if value and not _WORD.fullmatch(value):
            raise ConfigError(
                f"{option} {value!r}: use letters, digits and . _ / : , + = @ - alone"
            )
    if ask.time and not _TIME.fullmatch(ask.time):
        raise ConfigError(f"--time {ask.time!r}: write HH:MM:SS, such as 04:00:00")
    prefix = DIRECTIVES[ask.scheduler]
    for line in ask.extra:
        if not line.startswith(prefix) or _CONTROL.search(line):
            raise ConfigError(f"--extra {line!r}: give one line that begins with {prefix!r}")
    for line in ask.setup:
        if _CONTROL.search(line.replace("\t", " ")):
            raise ConfigError(f"--setup {line!r}: give one line; repeat the option for more")
        if line.lstrip().startswith(tuple(DIRECTIVES.values())):
            raise ConfigError(f"--setup {line!r}: give directives with --extra")


def render(ask: Namespace, job: BatchJob) -> str:
    """Return the script of a job, with what :func:`build_parser`'s options ask of the batch system.

    Raises:
        ConfigError: a value cannot stand where it is to.
    """
    check_ask(ask)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(q=bash_quote, hours_minutes=_hours_minutes)
    return environment.get_template(f"{ask.scheduler}.sh.j2").render(ask=ask, job=job)


def _hours_minutes(time: str) -> str:
    """A time as LSF takes it, a begun minute as a whole one."""
    hours, minutes, seconds = (int(part) for part in time.split(":"))
    total = hours * 60 + minutes + (seconds > 0)
    return f"{total // 60}:{total % 60:02d}"


@dataclass(frozen=True)
class Scheduler:
    """How one batch system is spoken to."""

    program: tuple[str, ...]
    """What takes a script."""
    after: Callable[[Sequence[str]], list[str]]
    """Options that let a job wait until others have ended, well or badly."""
    answer: re.Pattern[str]
    """Where the job's id is in what it prints."""
    reads_input: bool = False
    """Whether the script goes to standard input; by its path otherwise."""

    def command(self, script: Path, after: Sequence[str]) -> list[str]:
        """Return what to run in the script's folder."""
        words = [*self.program, *(self.after(after) if after else [])]
        return words if self.reads_input else [*words, script.name]


SCHEDULERS = {
    "slurm": Scheduler(
        ("sbatch", "--parsable"),
        lambda ids: [f"--dependency=afterany:{':'.join(ids)}"],
        re.compile(r"^(\d+)(?:;|$)", re.MULTILINE),
    ),
    "pbs": Scheduler(
        ("qsub",),
        lambda ids: ["-W", f"depend=afterany:{':'.join(ids)}"],
        re.compile(r"^(\d[\w.\[\]-]*)$", re.MULTILINE),
    ),
    "lsf": Scheduler(
        ("bsub",),
        lambda ids: ["-w", " && ".join(f"ended({job})" for job in ids)],
        re.compile(r"Job <(\d+)>"),
        reads_input=True,
    ),
}


def build_parser() -> Parser:
    """Return the options of ``launch.submit``."""
    parser = Parser("python -m launch.submit", __doc__ or "")
    parser.add_argument("--scheduler", choices=tuple(SCHEDULERS), required=True)
    cli.add_study_option(parser)
    parser.add_argument("--sweep", required=True, metavar="NAME", help="name or TOML file")
    add_results_dir(parser)
    parser.add_argument("--dry-run", action="store_true", help="show the scripts, submit nothing")
    ask = parser.add_argument_group("asked of the batch system")
    ask.add_argument("--account", default="", metavar="NAME")
    ask.add_argument("--partition", "--queue", dest="queue", default="", metavar="NAME")
    time = "of each point; Slurm tells it to end two to three minutes earlier"
    ask.add_argument("--time", default="", metavar="HH:MM:SS", help=time)
    for flag, text in (
        ("gpus-per-node", ""),
        ("cpus-per-node", ""),
        ("max-parallel", "points at a time"),
    ):
        ask.add_argument(f"--{flag}", type=count_from_0, default=0, metavar="N", help=text)
    room = "[default --gpus-per-node; without GPUs all ranks on one node]"
    ask.add_argument("--ranks-per-node", type=count, metavar="N", help=room)
    share = "with other jobs; times may suffer from them"
    ask.add_argument("--share-nodes", action="store_true", help=share)
    for flag, text in (
        ("--setup", "line of shell to begin every job with, such as 'module load cuda'"),
        ("--extra", "directive, such as '#SBATCH --exclusive'"),
    ):
        ask.add_argument(flag, action="append", default=[], metavar="LINE", help=text)
    return parser


def make_jobs(
    plan: Plan, given: Namespace, options: Namespace, rest: Sequence[str]
) -> list[BatchJob]:
    """Return an array of jobs for each number of nodes, and the job of the report last.

    Args:
        plan: the sweep's.
        given: options of :func:`build_parser`.
        options: the sweep's own, which are ``rest`` in words.
        rest: what stands after ``--``.

    Raises:
        ConfigError: ranks cannot be shared out over nodes, or started there as was asked for.
    """
    command = [sys.executable, "-P", "-m", "launch.sweep", *_sweep_words(given)]
    if options.model is None and not any(word.partition("=")[0] == "--size" for word in rest):
        # This machine may have no GPU, which must not decide the size of the sweep.
        command += ["--size", options.size]
    command += dtype_option(plan.points, plan.options)
    # What decides which runs to do has no meaning for the report.
    choices = {"--resume", "--rerun-failed", "--keep"}
    command += [word for word in rest if word not in choices]
    folder = _next_folder(plan.folder / "submissions")
    # It asks for what the points ask for: some queues take no job that asks for less.
    name, here = plan.sweep.name, Path.cwd()
    report = BatchJob(f"{name}-report", folder, here, (*command, "--report-only"))
    room = int(given.ranks_per_node or given.gpus_per_node)
    names = sweep_command.choose_points(plan.points, options.only, None)
    by_nodes: dict[int, list[int]] = {}
    for index, point in enumerate(plan.points, start=1):
        if point.name in names:
            nodes = math.ceil(point.num_ranks / (room or point.num_ranks))
            ranks_a_node(point.num_ranks, nodes)
            by_nodes.setdefault(nodes, []).append(index)
    if max(by_nodes) > 1 and options.launcher != TORCHRUN:
        raise ConfigError(
            f"--launcher {options.launcher}: the scripts choose who starts several nodes, srun "
            "in a Slurm job and DeepSpeed's launcher in others; leave it out"
        )
    command += [f"--{options.choice or Choice.RESUME}", "--no-report"]
    command += ["--share"] if given.share_nodes else []
    arrays = [
        replace(
            report,
            name=f"{name}-{nodes}-node{'s' if nodes > 1 else ''}",
            # What a point needs is more than its first node has.
            command=(*command, *(["--no-memory-check"] if nodes > 1 else [])),
            nodes=nodes,
            ranks_per_node=room,
            indices=tuple(indices),
        )
        for nodes, indices in sorted(by_nodes.items())
    ]
    return [*arrays, report]


def _sweep_words(given: Namespace) -> list[str]:
    study = [] if given.study is None else ["--study", given.study]
    return [*study, "--sweep", given.sweep, "--results-dir", str(given.results_dir)]


def _plan(given: Namespace, rest: Sequence[str]) -> tuple[Plan, Namespace]:
    words = [*_sweep_words(given), *rest]
    study = cli.study_in(words)
    options = sweep_command.build_parser(study).read(words)
    for name in OWN_OPTIONS:
        if getattr(options, name) not in (None, False):
            raise ConfigError(f"--{name.replace('_', '-')} cannot stand after '--' here")
    if options.choice is Choice.AGAIN:
        raise ConfigError("--again cannot stand after '--': a job that is requeued runs it again")
    sweep = load_sweep(given.sweep, study)
    if sweep.leaves_model_open and options.model is None and options.size != "tiny":
        raise ConfigError(
            f"sweep '{sweep.name}' leaves its model to the machine, and this is not the one that "
            "will run it; name a model after '--': -- --model 7B"
        )
    if options.size == "auto" and options.model is None:
        options.size = "full"
    return sweep_command.make_plan(sweep, options, probe_machine()), options


def _next_folder(parent: Path) -> Path:
    numbers = [int(p.name) for p in parent.glob("[0-9]*") if p.name.isdigit()]
    return parent / f"{max(numbers, default=0) + 1:03d}"


def submit(plan: Plan, ask: Namespace, jobs: Sequence[BatchJob]) -> None:
    """Write the scripts and submit them; ``submission.json`` tells how far it came.

    The last job waits for all others.

    Raises:
        ConfigError, LaunchError: the batch system is not there, or refuses a job.
    """
    scheduler, folder = SCHEDULERS[ask.scheduler], jobs[0].folder
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
        after = tuple(ids) if job is jobs[-1] else ()
        command = scheduler.command(job.script, after)
        ids.append(_submitted(scheduler, command, job.script))
        record["jobs"].append(
            {
                "id": ids[-1],
                "script": job.script.name,
                "command": command,
                "nodes": job.nodes,
                "points": [plan.points[index - 1].name for index in job.indices],
                "after": list(after),
            }
        )
        write_json(folder / "submission.json", record)
        say(f"{ids[-1]}  {job.script}")


def _submitted(scheduler: Scheduler, command: Sequence[str], script: Path) -> str:
    """Submit a script; the job's id."""
    name = command[0]
    try:
        done = subprocess.run(
            command,
            cwd=script.parent,
            input=script.read_bytes() if scheduler.reads_input else b"",
            capture_output=True,
            timeout=ANSWER_S,
            check=False,
        )
    except FileNotFoundError:
        raise ConfigError(
            f"{name}: no such program; submit from a machine of the cluster, or look at the "
            "scripts with --dry-run"
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{name} has not answered for {ANSWER_S:.0f} s") from None
    said = done.stdout.decode(errors="replace").strip()
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip() or said
        raise LaunchError(f"{name} refuses {script} (exit code {done.returncode}): {why}")
    match = scheduler.answer.search(said)
    if match is None:
        raise LaunchError(f"{name} answers {said!r}, which holds no job id")
    return match[1]


def main(argv: Sequence[str]) -> int:
    """Submit a sweep from the command line.

    Raises:
        ConfigError: an option or the sweep is wrong, or the batch system is not there.
        LaunchError: the batch system refuses a job.
    """
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    given = build_parser().read(words[:cut])
    plan, options = _plan(given, words[cut + 1 :])
    check_ask(given)
    jobs = make_jobs(plan, given, options, words[cut + 1 :])
    if given.dry_run:
        for job in jobs:
            say(f"# {job.script}\n{render(given, job)}")
        return 0
    submit(plan, given, jobs)
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run_command(lambda: main(sys.argv[1:])))
