"""What a run's loss means, for programs: ``python -m parse.judge LOG`` prints one JSON object.

``word`` is that of :class:`parse.compare.verdict.LossVerdict`, empty without a loss; ``text`` says
it in full. Standard library alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from parse.compare.verdict import judge_log
from parse.errors import LogError
from parse.log.read import read_log


def main(argv: list[str] | None = None) -> int:
    """Judge a log; the exit code is 2 when it cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m parse.judge", description="Judge a loss.")
    parser.add_argument("log", type=Path, metavar="LOG")
    path = parser.parse_args(argv).log
    try:
        verdict = judge_log(read_log(path))
    except (LogError, OSError) as error:
        sys.stderr.write(f"parse.judge: error: {error}\n")
        return 2
    sys.stdout.write(json.dumps({"word": verdict.word, "text": verdict.text}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
