"""Handing a script to a batch system, and its answer. No shell reads any of it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.errors import ConfigError
from launch.data import LaunchError

ANSWER_S = 120.0
"""Longest time until a batch system answers."""


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
