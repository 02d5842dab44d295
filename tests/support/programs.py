"""Programs run by their words, in the process of the test or in one of their own."""

import csv
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from processes import python_path

from configs.cli import run_command
from configs.files import ROOT

_PROGRAMS = {
    "parse_logs": ("parse.__main__", "parse"),
    "report": ("parse.report", "parse.report"),
    "plot": ("plots.__main__", "plots"),
    "prepare": ("dataset.cli", "dataset"),
}


def python(*words: object, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these words as a user does in the checkout, on one thread."""
    paths = {"PYTHONPATH": python_path(ROOT, ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**os.environ, **paths, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def rows_of(sweep: Path, table: str) -> list[dict[str, str]]:
    """Return the rows of a table of a sweep's folder."""
    with (sweep / "tables" / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def __getattr__(program: str) -> Callable[[Sequence[str]], int]:
    # Whoever imports one of them imports its module then, and not the others'.
    if program not in _PROGRAMS:
        raise AttributeError(program)
    module, name = _PROGRAMS[program]
    main = import_module(module).main
    return lambda words: run_command(lambda: main(words), name=name)
