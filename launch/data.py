"""The data of a run: the user's own ``.bin``/``.idx``, or the embedded default corpus."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from configs.errors import ConfigError
from launch.records.files import ROOT

PREPARE = [sys.executable, "-m", "dataset", "prepare"]
"""Makes the default corpus, or finds it made, and prints its prefix last."""


class LaunchError(RuntimeError):
    """A step of the harness failed; the message says which and what to look at."""


def data_prefix(given: str) -> str:
    """Absolute prefix of Megatron's files: ``given``, or the default corpus when it is empty.

    Raises:
        ConfigError: the given files are not there.
        LaunchError: the default corpus could not be made.
    """
    if not given:
        return _default_corpus()
    prefix = str(Path(given).absolute())
    missing = [prefix + end for end in (".bin", ".idx") if not Path(prefix + end).is_file()]
    if missing:
        raise ConfigError(f"data_prefix = {given!r}: no file {missing[0]!r}")
    return prefix


def _default_corpus() -> str:
    done = subprocess.run(PREPARE, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"`python -m dataset prepare` failed with exit code {done.returncode}")
    lines = done.stdout.rstrip("\n").split("\n")
    # The prefix is the last line, or lines when a folder's name has a newline.
    for first in range(len(lines) - 1, -1, -1):
        prefix = "\n".join(lines[first:])
        if prefix and Path(prefix + ".idx").is_file():
            return str(Path(prefix).absolute())
    raise LaunchError(f"`python -m dataset prepare` named no data: {lines[-1]!r} has no .idx")
