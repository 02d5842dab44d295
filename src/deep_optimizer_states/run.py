"""``python -m deep_optimizer_states run``: install the plugin in a program that does not know it.

Fine-tuning programs start their ranks from launchers of their own, where no line of the user's
runs. What reaches every rank is the environment: ``PYTHONPATH`` gets a folder whose
``sitecustomize`` installs the plugin once DeepSpeed has been imported.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HOOK = Path(__file__).with_name("site_hook")
"""The folder whose ``sitecustomize`` Python processes of the command import."""

USAGE = """\
usage: python -m deep_optimizer_states run COMMAND [ARGUMENT ...]

Runs the command with the plugin installed in the Python processes of it that import DeepSpeed, as
if each had called deep_optimizer_states.install() first. DeepSpeed's config says what it does, in
its "deep_optimizer_states" block. Exit status and signals are the command's own.

PYTHONPATH takes it there. python -E, -I and -S do not look at that, and are refused as the command.
Where a Python process of the command starts another one so, or without this PYTHONPATH, a line on
standard error says that the plugin is not there; a shell script that does so is not seen.
"""


def main(argv: Sequence[str]) -> int:
    """Become the command; returns only where that is not possible.

    Args:
        argv: The command and its arguments.

    Returns:
        What a shell would: 127 where there is no such command, 126 where it cannot be run, and 2
        where none was given or the plugin would not be installed in it.
    """
    words = list(argv[1:] if argv[:1] == ["--"] else argv)
    asked = words[:1] in (["-h"], ["--help"])
    if asked or not words:
        (sys.stdout if asked else sys.stderr).write(USAGE)
        return 0 if asked else 2
    variables = environment(os.environ)
    if reason := _load_hook().why_not(words[0], words, variables):
        sys.stderr.write(f"{reason}: start the command otherwise\n")
        return 2
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(words[0], words, variables)
    except OSError as error:
        hint = f": give `python {words[0]}`" if words[0].endswith(".py") else ""
        sys.stderr.write(f"{words[0]} cannot be run: {error.strerror}{hint}\n")
        return 127 if isinstance(error, FileNotFoundError) else 126


def _load_hook() -> Any:
    # Under another name than the one by which Python would run it.
    spec = importlib.util.spec_from_file_location("site_hook", HOOK / "sitecustomize.py")
    assert spec, HOOK
    assert spec.loader, HOOK
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment(present: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    """Return the variables of a process whose children have the plugin installed."""
    folders = [entry for entry in present.get("PYTHONPATH", "").split(os.pathsep) if entry]
    others = [entry for entry in folders if entry != str(HOOK)]
    return {**present, "PYTHONPATH": os.pathsep.join([str(HOOK), *others])}
