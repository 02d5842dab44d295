"""``python -m dataset``."""

import sys

from dataset.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
