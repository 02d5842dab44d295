"""``python -m optimus_cc predict``."""

from __future__ import annotations

import sys

from optimus_cc import predict

USAGE = """\
usage: python -m optimus_cc predict [-h]

  predict   time of an iteration on slow and on fast links, scheme by scheme
"""

if __name__ == "__main__":
    if sys.argv[1:2] == ["predict"]:
        sys.exit(predict.main(sys.argv[2:]))
    is_asked = sys.argv[1:2] in (["-h"], ["--help"])
    (sys.stdout if is_asked else sys.stderr).write(USAGE)
    sys.exit(0 if is_asked else 2)
