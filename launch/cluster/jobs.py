"""Jobs of batch systems: their scripts, and how each system takes one. No shell reads any of it."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2

from configs.errors import ConfigError
from launch.data import LaunchError

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
class Ask:
    """What every job asks of the batch system."""

    scheduler: str
    """``slurm``, ``pbs`` or ``lsf``."""
    account: str = ""
    queue: str = ""
    """Slurm's partition."""
    time: str = ""
    """``HH:MM:SS``."""
    gpus_per_node: int = 0
    cpus_per_node: int = 0
    max_parallel: int = 0
    """Tasks of an array that run at a time; 0 for no limit."""
    share_nodes: bool = False
    """Whether other jobs may run on the same nodes, and disturb what is timed."""
    extra: Sequence[str] = ()
    """Directives of the user's own, whole lines."""

    def check(self) -> None:
        """Refuse what would be more than a value in its line.

        Raises:
            ConfigError: names the option.
        """
        for option, value in (("--account", self.account), ("--queue", self.queue)):
            if value and not _WORD.fullmatch(value):
                raise ConfigError(
                    f"{option} {value!r}: use letters, digits and . _ / : , + = @ - alone"
                )
        if self.time and not _TIME.fullmatch(self.time):
            raise ConfigError(f"--time {self.time!r}: write HH:MM:SS, such as 04:00:00")
        prefix = DIRECTIVES[self.scheduler]
        for line in self.extra:
            if not line.startswith(prefix) or _CONTROL.search(line):
                raise ConfigError(f"--extra {line!r}: give one line that begins with {prefix!r}")

    @property
    def hours_minutes(self) -> str:
        """The time as LSF takes it, a begun minute as a whole one."""
        hours, minutes, seconds = (int(part) for part in self.time.split(":"))
        total = hours * 60 + minutes + (seconds > 0)
        return f"{total // 60}:{total % 60:02d}"


@dataclass(frozen=True)
class BatchJob:
    """One job, or one array of jobs."""

    name: str
    """Letters, digits, ``-`` and ``.``."""
    folder: Path
    """Where its script and its output lie."""
    cwd: Path
    """Folder that relative paths in the command start from."""
    root: Path
    """The checkout."""
    command: tuple[str, ...]
    """What runs, but for the options that the script itself finds out."""
    nodes: int = 1
    ranks_per_node: int = 1
    indices: tuple[int, ...] = ()
    """Points of the sweep's plan, one a task of the array; empty for a job without an array."""
    setup: tuple[str, ...] = field(default=())
    """The user's own lines of shell, run first."""

    @property
    def script(self) -> Path:
        """Where its script lies."""
        return self.folder / f"{self.name}.sh"


def bash_quote(value: object) -> str:
    """One word of bash, on one line: what a batch system takes for directives are lines."""
    text = str(value)
    if "\0" in text:
        raise ConfigError(f"{text!r}: a NUL character can stand in no command")
    if not _CONTROL.search(text):
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", escaped) + "'"


def check_setup(lines: Sequence[str]) -> None:
    """Refuse setup lines that are more than one line, or directives.

    Raises:
        ConfigError: names the line.
    """
    for line in lines:
        if _CONTROL.search(line.replace("\t", " ")):
            raise ConfigError(f"--setup {line!r}: give one line; repeat the option for more")
        if line.lstrip().startswith(tuple(DIRECTIVES.values())):
            raise ConfigError(f"--setup {line!r}: give directives with --extra")


def render(ask: Ask, job: BatchJob) -> str:
    """The script of a job.

    Raises:
        ConfigError: a value cannot stand where it is to.
    """
    ask.check()
    check_setup(job.setup)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["q"] = bash_quote
    return environment.get_template(f"{ask.scheduler}.sh.j2").render(ask=ask, job=job)


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
        """What to run in the script's folder."""
        words = [*self.program, *(self.after(after) if after else [])]
        return words if self.reads_input else [*words, script.name]

    def submit(self, script: Path, after: Sequence[str]) -> str:
        """Submit a script.

        Returns:
            The job's id.

        Raises:
            ConfigError: the program is missing.
            LaunchError: it refuses the job, or says nothing that looks like an id.
        """
        command = self.command(script, after)
        name = self.program[0]
        try:
            done = subprocess.run(
                command,
                cwd=script.parent,
                input=script.read_bytes() if self.reads_input else b"",
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
        match = self.answer.search(said)
        if match is None:
            raise LaunchError(f"{name} answers {said!r}, which holds no job id")
        return match[1]


def _lsf_after(ids: Sequence[str]) -> list[str]:
    return ["-w", " && ".join(f"ended({job})" for job in ids)]


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
    "lsf": Scheduler(("bsub",), _lsf_after, re.compile(r"Job <(\d+)>"), reads_input=True),
}
