"""``python -m deep_optimizer_states COMMAND``, or ``deep-optimizer-states COMMAND``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence

from deep_optimizer_states import __version__

USAGE = """\
usage: python -m deep_optimizer_states COMMAND [-h]

  plan        predict time and memory of a run, and the best policy
  calibrate   measure this machine's rates into a profile for `plan --machine`
  run         run a command with the plugin installed in every process that uses DeepSpeed
  --version   print the version of this package
"""

COMMANDS = {
    "plan": "deep_optimizer_states.predict.cli",
    "calibrate": "deep_optimizer_states.calibrate.cli",
    "run": "deep_optimizer_states.run",
}
"""Command -> the module whose ``main`` it is."""

REQUIRED = ("torch", "deepspeed", "pydantic", "numpy", "psutil")
"""Packages that this one depends on, which `pip install --no-deps` leaves out."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = words[0] if words else ""
    if command in COMMANDS:
        return _run(command, words[1:])
    if command == "--version":
        sys.stdout.write(f"deep-optimizer-states {__version__}\n")
        return 0
    if command in ("-h", "--help"):
        sys.stdout.write(USAGE)
        missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
        sys.stderr.write(_needed(missing) if missing else "")
        return 0
    sys.stderr.write(f"unknown command '{command}'\n" if command else "")
    sys.stderr.write(USAGE)
    return 2


def _run(command: str, words: list[str]) -> int:
    try:
        return int(importlib.import_module(COMMANDS[command]).main(words))
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in ("", "deep_optimizer_states"):
            raise
        sys.stderr.write(f"{command}: {_needed([name])}")
        return 2


def _needed(missing: Sequence[str]) -> str:
    names = " ".join(missing)
    return f"not installed for {sys.executable}: {names}; give `pip install {names}`\n"


if __name__ == "__main__":
    sys.exit(main())
