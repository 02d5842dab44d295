"""Prints the pins of what is installed from a wheel that is made for another Python than this."""

import re
import sys
from importlib.metadata import distributions


def main() -> None:
    """Look at the tags of every wheel; one for every Python 3 is for this one too."""
    for package in distributions():
        made_for = re.findall(r"^Tag: py3(\d+)-", package.read_text("WHEEL") or "", re.MULTILINE)
        if made_for and str(sys.version_info[1]) not in made_for:
            sys.stdout.write(f"{package.metadata['Name']}=={package.version}\n")


if __name__ == "__main__":
    main()
