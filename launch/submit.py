"""A sweep as jobs of a batch system: ``python -m launch.submit --scheduler slurm --sweep NAME``.

Writes two scripts into the sweep's folder, an array with a task for each point and a job that makes
the report afterwards, and prints the line that submits both. What stands after ``--`` goes to
``launch.sweep`` as it is. To go on with a sweep, submit it again: what is done is skipped.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import jinja2

from configs.cli import Parser, add_results_dir, count, count_from_0, say
from configs.errors import ConfigError
from configs.files import ROOT
from configs.sweep import load_sweep
from launch import cli, sweep as sweep_command
from launch.fit import probe_machine
from launch.hosts.launchers import TORCHRUN, ranks_a_node
from launch.records import Choice
from launch.sweep_runner import Plan

OWN_OPTIONS = (
    *("all", "list", "report_only", "no_report", "dry_run"),
    *("hostfile", "nnodes", "rdzv_endpoint"),
)
"""Options of ``launch.sweep`` that the scripts set, or that make no sense in them."""
TEMPLATES = Path(__file__).resolve().parent / "templates"
DIRECTIVES = {"slurm": "#SBATCH ", "pbs": "#PBS ", "lsf": "#BSUB "}
"""How a line for each batch system begins."""
SUBMIT = {
    "slurm": "id=$(sbatch --parsable {points}) && sbatch --dependency=afterany:$id {report}",
    "pbs": "id=$(qsub {points}) && qsub -W depend=afterany:$id {report}",
    "lsf": "bsub < {points} && bsub -w 'ended({name})' < {report}",
}
"""Lines of shell that submit the scripts; the report waits until all points ended, well or not."""
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:,+=@-]*")
"""A value in a directive, which the batch system reads, not the shell."""
_TIME = re.compile(r"(\d{1,4}):([0-5]\d):([0-5]\d)")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


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


def render(
    ask: Namespace,
    name: str,
    command: Sequence[str],
    points: Sequence[str] = (),
    slots: int = 1,
    folder: Path | None = None,
) -> str:
    """Return the script of a job.

    Args:
        ask: options of :func:`build_parser`.
        name: of the job: letters, digits, ``-`` and ``.``.
        command: what runs, but for the options that the script itself finds out.
        points: names of points, one a task of the array; empty for a job without an array.
        slots: most ranks on each of several nodes.
        folder: where hosts are listed for DeepSpeed's launcher; by default here.

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
    places = {"cwd": Path.cwd(), "root": ROOT, "folder": folder or Path.cwd()}
    job = {"name": name, "command": command, "points": points, "slots": slots, **places}
    return environment.get_template(f"{ask.scheduler}.sh.j2").render(ask=ask, job=job)


def _hours_minutes(time: str) -> str:
    """A time as LSF takes it, a begun minute as a whole one."""
    hours, minutes, seconds = (int(part) for part in time.split(":"))
    total = hours * 60 + minutes + (seconds > 0)
    return f"{total // 60}:{total % 60:02d}"


def build_parser() -> Parser:
    """Return the options of ``launch.submit``."""
    parser = Parser("python -m launch.submit", __doc__ or "")
    parser.add_argument("--scheduler", choices=tuple(SUBMIT), required=True)
    cli.add_study_option(parser)
    parser.add_argument("--sweep", required=True, metavar="NAME", help="name or TOML file")
    add_results_dir(parser)
    parser.add_argument("--dry-run", action="store_true", help="show the scripts, write nothing")
    ask = parser.add_argument_group("asked of the batch system")
    ask.add_argument("--account", default="", metavar="NAME")
    ask.add_argument("--partition", "--queue", dest="queue", default="", metavar="NAME")
    time = "of each point; Slurm tells it to end two to three minutes earlier"
    ask.add_argument("--time", default="", metavar="HH:MM:SS", help=time)
    ask.add_argument("--nodes", type=count, default=1, metavar="N", help="for each point")
    for flag in ("gpus-per-node", "cpus-per-node"):
        ask.add_argument(f"--{flag}", type=count_from_0, default=0, metavar="N")
    for flag, text in (
        ("--setup", "line of shell to begin every job with, such as 'module load cuda'"),
        ("--extra", "directive, such as '#SBATCH --constraint=a100'"),
    ):
        ask.add_argument(flag, action="append", default=[], metavar="LINE", help=text)
    return parser


def make_scripts(given: Namespace, rest: Sequence[str]) -> tuple[Plan, dict[str, str]]:
    """Return a sweep's plan, and its scripts by the paths that they are to have.

    Args:
        given: options of :func:`build_parser`.
        rest: what stands after ``--``.

    Raises:
        ConfigError: an option or the sweep is wrong, or ranks cannot be shared out over nodes.
    """
    study = [] if given.study is None else ["--study", given.study]
    words = [*study, "--sweep", given.sweep, "--results-dir", str(given.results_dir), *rest]
    plan, options = _plan(words)
    if not any(word.partition("=")[0] in ("--size", "--model") for word in rest):
        # A node may see no GPU, which must not decide the size of the sweep.
        words += ["--size", options.size]
    names = sweep_command.choose_points(plan.points, options.only)
    ranks = [point.num_ranks for point in plan.points if point.name in names]
    slots = max(ranks_a_node(number, given.nodes) for number in ranks)
    if given.nodes > 1 and options.launcher != TORCHRUN:
        raise ConfigError(
            f"--launcher {options.launcher}: the scripts choose who starts several nodes, srun "
            "in a Slurm job and DeepSpeed's launcher in others; leave it out"
        )
    parent = plan.folder / "submissions"
    numbers = [int(path.name) for path in parent.glob("[0-9]*") if path.name.isdigit()]
    folder, name = parent / f"{max(numbers, default=0) + 1:03d}", plan.sweep.name
    command = [sys.executable, "-P", "-m", "launch.sweep", *words]
    # What a point needs is more than its first of several nodes has.
    each = [*command, "--no-report", *(["--no-memory-check"] if given.nodes > 1 else [])]
    # Options that decide which runs to do have no meaning for the report.
    report = [*(word for word in command if word != f"--{Choice.KEEP}"), "--report-only"]
    scripts = {
        "points.sh": render(given, f"{name}-points", each, names, slots, folder),
        "report.sh": render(Namespace(**{**vars(given), "nodes": 1}), f"{name}-report", report),
    }
    return plan, {str(folder / name): text for name, text in scripts.items()}


def _plan(words: Sequence[str]) -> tuple[Plan, Namespace]:
    study = cli.study_in(words)
    options = sweep_command.build_parser(study).read(words)
    for name in OWN_OPTIONS:
        if getattr(options, name) not in (None, False):
            raise ConfigError(f"--{name.replace('_', '-')} cannot stand after '--' here")
    if options.choice is Choice.AGAIN:
        raise ConfigError("--again cannot stand after '--': a job that is requeued runs it again")
    sweep = load_sweep(options.sweep, study)
    if sweep.leaves_model_open and options.model is None and options.size != "tiny":
        raise ConfigError(
            f"sweep '{sweep.name}' leaves its model to the machine, and this is not the one that "
            "will run it; name a model after '--': -- --model 7B"
        )
    if options.size == "auto" and options.model is None:
        options.size = "full"
    return sweep_command.make_plan(sweep, options, probe_machine()), options


def main(argv: Sequence[str]) -> int:
    """Write the scripts of a sweep from the command line.

    Raises:
        ConfigError: an option or the sweep is wrong.
    """
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    given = build_parser().read(words[:cut])
    plan, scripts = make_scripts(given, words[cut + 1 :])
    for path, text in scripts.items():
        if given.dry_run:
            say(f"# {path}\n{text}")
            continue
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(os.fsencode(text))
    folder = Path(next(iter(scripts))).parent
    names = {"points": "points.sh", "report": "report.sh", "name": f"{plan.sweep.name}-points"}
    say(f"cd {shlex.quote(str(folder))} && {SUBMIT[given.scheduler].format(**names)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(cli.run_command(lambda: main(sys.argv[1:])))
