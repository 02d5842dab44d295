"""Print pinned requirements as ``name==version``, those of one Python alone.

``pins.py [--python 3.12] [--lacking | --differing] FILE...``: for this Python or another one; with
``--lacking`` only what this environment has in no version, with ``--differing`` only what it does
not have in this one.
"""

import argparse
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Every new environment has pip, and few have `packaging` itself.
from pip._vendor.packaging.requirements import Requirement


def installed(name: str) -> str | None:
    """Return the version that this environment has of a package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main() -> None:
    """Write the pins of the files named on the command line to standard output."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=f"{sys.version_info[0]}.{sys.version_info[1]}")
    parser.add_argument("--lacking", action="store_true")
    parser.add_argument("--differing", action="store_true")
    parser.add_argument("files", type=Path, nargs="+")
    given = parser.parse_args()
    for path in given.files:
        for line in path.read_text().splitlines():
            if not line or line.startswith("#"):
                continue
            pin = Requirement(line)
            if pin.marker is not None and not pin.marker.evaluate({"python_version": given.python}):
                continue
            here = installed(pin.name)
            if given.lacking and here is not None:
                continue
            if given.differing and here is not None and here in pin.specifier:
                continue
            sys.stdout.write(f"{pin.name}{pin.specifier}\n")


if __name__ == "__main__":
    main()
