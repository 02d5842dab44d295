"""``python -m dataset``."""

import io
import os
import sys

from configs.cli import EXIT_INTERRUPTED, run_command
from dataset.cli import main

if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A prefix is printed as it is, also where its bytes are no UTF-8.
        sys.stdout.reconfigure(errors="surrogateescape")
    code = run_command(main, name="dataset")
    if code == EXIT_INTERRUPTED:
        # Ctrl-C may have struck inside the pool's own bookkeeping, and then the interpreter's exit
        # prints a traceback of the pool below our one line. What is on disk is settled by now, and
        # workers end with this process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)
