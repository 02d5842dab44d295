"""Print the pinned requirements that this environment lacks in any version."""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def main() -> None:
    """Read requirement files given as arguments; write the missing lines to standard output."""
    for path in map(Path, sys.argv[1:]):
        for line in path.read_text().splitlines():
            name = line.partition("==")[0].strip()
            if not name or name.startswith("#"):
                continue
            try:
                version(name)
            except PackageNotFoundError:
                sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
