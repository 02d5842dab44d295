"""Tables to figures: ``python -m plots TABLES_DIR --out FIGURES_DIR``, from the repository's root.

Draws every figure of the tables' study that they have something to show for, and says of the others
why not; or, with ``--figure``, those asked for. Exit code 0 when figures were drawn, 1 when one
could not be written or there was none to draw, 2 when there are no tables or a figure asked for is
impossible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from configs.cli import Parser, complain, run_command, say
from configs.errors import ConfigError
from plots.current import RUNS_FILE, Drawn, study_of


def main(argv: Sequence[str] | None = None) -> int:
    """Draw figures; returns the exit code.

    Raises:
        ConfigError: there are no tables, or a figure's name is unknown.
    """
    args = _parser().read(argv)
    _refuse_mixed_up(args.tables, args.out)
    study = study_of(args.tables)
    for name in (*args.figure, *args.expect):
        if name not in study.figures:
            known = ", ".join(study.figures)
            raise ConfigError(f"figure '{name}' is unknown; known: {known}")
    drawn = Drawn(args.out, args.tables)
    names = list(dict.fromkeys(args.figure or study.figures))
    current = {} if args.figure else drawn.current(names)
    missed = {name: why for name, why in current.items() if why}
    code, num_figures = 0, len(current) - len(missed)
    if num_figures:
        say(f"figures: {num_figures} up to date")
    if stale := [name for name in names if name not in current]:
        # Whoever has nothing to draw need not wait for pandas and matplotlib.
        from plots.draw import draw
        from plots.tables import read_tables

        tables = read_tables(args.tables, study)
        args.out.mkdir(parents=True, exist_ok=True)
        drawn.forget(stale)
        results = draw(tables, stale, args.out, asked=bool(args.figure))
        code, num_figures = int(bool(results.unwritten)), num_figures + len(results.drawn)
        if args.figure:
            for name, why in results.impossible.items():
                complain(f"plots: error: {name}: {why}")
                code = 2
        else:
            missed |= results.impossible
            drawn.remember({**dict.fromkeys(results.drawn, ""), **results.impossible})
    if told := {name: why for name, why in missed.items() if name in (args.expect or missed)}:
        say(f"not drawn: {_grouped(told)}")
    return code or int(not num_figures)


def _refuse_mixed_up(tables: Path, out: Path) -> None:
    """Refuse a sweep's folder in place of the tables in it, and a file to write figures into."""
    inner = tables / "tables"
    if (inner / RUNS_FILE).is_file() and not (tables / RUNS_FILE).exists():
        raise ConfigError(f"{tables}: no {RUNS_FILE} in it: did you mean {inner}?")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: is a file, where a folder is needed; give another one")


def _grouped(missed: Mapping[str, str]) -> str:
    """Figures, each reason once: ``stride, models (one model alone); memory (no table)``."""
    names: dict[str, list[str]] = {}
    for name, why in missed.items():
        names.setdefault(why, []).append(name)
    return "; ".join(f"{', '.join(own)} ({why})" for why, own in names.items())


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
