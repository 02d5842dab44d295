"""``python -m dataset``."""

import os
import sys

from dataset.cli.main import INTERRUPTED, main

if __name__ == "__main__":
    code = main()
    if code == INTERRUPTED:
        # Ctrl-C may have struck inside the pool's own bookkeeping, and then the interpreter's exit
        # prints a traceback of the pool below our one line. What is on disk is settled by now, and
        # workers end with this process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
