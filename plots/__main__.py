"""Tables to figures: ``python -m plots TABLES_DIR --out FIGURES_DIR``, from the repository's root.

Exit code 0 when every figure was drawn, 1 when the tables lack what one of them shows, 2 when there
are no tables.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import matplotlib as mpl

from plots import breakdown, loss
from plots.canvas import save
from plots.tables import PlotError, read_tables

FIGURES = (breakdown, loss)


def main(argv: list[str] | None = None) -> int:
    """Draw every figure; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m plots", description="Tables to figures.")
    parser.add_argument("tables", type=Path, metavar="TABLES_DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FIGURES_DIR")
    args = parser.parse_args(argv)
    mpl.use("agg")
    try:
        tables = read_tables(args.tables)
        args.out.mkdir(parents=True, exist_ok=True)
    except (PlotError, OSError) as error:
        sys.stderr.write(f"plots: error: {error}\n")
        return 2
    exit_code = 0
    for figure in FIGURES:
        try:
            written = save(figure.draw(tables), args.out, figure.STEM)
            sys.stdout.write("".join(f"{path}\n" for path in written))
        except (PlotError, OSError) as error:
            sys.stderr.write(f"plots: {figure.STEM}: not drawn: {error}\n")
            exit_code = 1
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
