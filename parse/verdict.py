"""What the loss of one run says: ``python -m parse.verdict LOG``, for whoever runs it.

Prints one line of JSON, ``{"word": ..., "failed": ..., "text": ...}`` (see
:class:`parse.compare.verdict.LossVerdict`). Exit code 0, 1 where the loss failed, 2 where there is
no log. Standard library alone, so it starts at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.files import printable
from parse.compare.verdict import judge_log
from parse.errors import LogError
from parse.log.read import read_log


def main(argv: Sequence[str]) -> int:
    """Judge one log; returns the exit code."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -m parse.verdict LOG\n")
        return 2
    try:
        found = judge_log(read_log(Path(argv[0])))
    except LogError as error:
        sys.stderr.write(f"parse.verdict: error: {printable(str(error))}\n")
        return 2
    said = {"word": found.word, "failed": found.failed, "text": found.text}
    sys.stdout.write(json.dumps(said) + "\n")
    return int(found.failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
