"""``python -m deep_optimizer_states COMMAND``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

USAGE = """\
usage: python -m deep_optimizer_states COMMAND [-h]

  plan        predict time and memory of a run, and the best policy
  calibrate   measure this machine's rates into a profile for `plan --machine`
  run         run a command with the plugin installed in every process that uses DeepSpeed
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = words[0] if words else ""
    if command == "plan":
        from deep_optimizer_states.predict import cli as plan

        return plan.main(words[1:])
    if command == "calibrate":
        from deep_optimizer_states.calibrate import cli as calibrate  # it may need torch

        return calibrate.main(words[1:])
    if command == "run":
        from deep_optimizer_states import run

        return run.main(words[1:])
    asked = command in ("-h", "--help")
    out = sys.stdout if asked else sys.stderr
    if not asked:
        out.write(f"unknown command '{command}'\n" if command else "")
    out.write(USAGE)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
