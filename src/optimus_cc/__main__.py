"""``python -m optimus_cc predict``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_USAGE = """\
usage: python -m optimus_cc predict [-h]

  predict   time of an iteration on slow and on fast links, scheme by scheme
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["predict"]:
        from optimus_cc import predict

        return predict.main(words[1:])
    asked = words[:1] in (["-h"], ["--help"])
    out = sys.stdout if asked else sys.stderr
    if words and not asked:
        out.write(f"unknown command '{words[0]}'\n")
    out.write(_USAGE)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main())
