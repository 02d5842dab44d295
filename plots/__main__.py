"""Tables to figures: ``python -m plots TABLES_DIR --out FIGURES_DIR``, from the repository's root.

Draws every figure of the tables' study that they have something to show for, and says of the others
why not; or, with ``--figure``, those asked for. Exit code 0 when figures were drawn, 1 when one
could not be written or there was none to draw, 2 when there are no tables or a figure asked for is
impossible.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

from configs.cli import Parser, complain, run_command, say
from configs.errors import ConfigError
from plots.canvas import save
from plots.registry import Drawing, figures
from plots.tables import PlotError, Tables, read_tables, study_of


def main(argv: Sequence[str] | None = None) -> int:
    """Draw figures; returns the exit code.

    Raises:
        ConfigError: there are no tables, or a figure's name is unknown.
    """
    args = _parser().read(argv)
    study = study_of(args.tables)
    known = figures(study)
    unknown = [name for name in (*args.figure, *args.expect) if name not in known]
    if unknown:
        raise ConfigError(f"figure '{unknown[0]}' is unknown; known: {', '.join(known)}")
    mpl.use("agg")
    tables = read_tables(args.tables, study)
    args.out.mkdir(parents=True, exist_ok=True)
    return _draw(tables, known, args)


def _draw(tables: Tables, known: Mapping[str, Drawing], args: argparse.Namespace) -> int:
    """Draw the figures asked for, or else all that are worth it."""
    code, drawn = 0, 0
    for name in dict.fromkeys(args.figure or known):
        try:
            made = known[name].draw(tables, asked=bool(args.figure))
        except PlotError as error:
            if args.figure:
                complain(f"plots: error: {name}: {error}")
                code = 2
            elif not args.expect or name in args.expect:
                say(f"{name}: not drawn: {error}")
            continue
        try:
            files = save(made, args.out, name, known[name].row.title)
        except PlotError as error:
            complain(f"plots: error: {error}")
            code = code or 1
            continue
        say(f"{files[0]} (and {', '.join(path.suffix for path in files[1:])})")
        drawn += 1
    return code or int(not drawn)


def _parser() -> Parser:
    parser = Parser("python -m plots", "Tables to figures.")
    parser.add_argument("tables", type=Path, metavar="TABLES_DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FIGURES_DIR")
    parser.add_argument(
        "--figure", nargs="+", action="extend", default=[], metavar="NAME",
        help="draw these alone; one that is impossible is an error",
    )  # fmt: skip
    parser.add_argument(
        "--expect", nargs="+", action="extend", default=[], metavar="NAME",
        help="what these runs are to show: say of no other figure why it is not drawn",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    raise SystemExit(run_command(main, name="plots"))
