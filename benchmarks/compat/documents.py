"""Write docs/compatibility.md, and the releases of DeepSpeed into docs/equality.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from benchmarks.compat.cells import EQUALITY, TRAINER, Cell, Result, stored
from benchmarks.process import SOURCE_FOLDER

COMPATIBILITY = SOURCE_FOLDER / "docs" / "compatibility.md"
EQUALITY_TABLE = SOURCE_FOLDER / "docs" / "equality.md"
RELEASES_COLUMN = "DeepSpeed"
_INTRODUCTION = """\
# What was run with which versions

Written by `make compat`, on a CPU. An empty cell was not run with the plugin as it is now;
`make compat` runs those, `ARGS="--deepspeed 0.18.9 --python 3.12"` some of them.

The plugin beside stock DeepSpeed of the same release: how many comparisons of [the
table](equality.md) were equal in every loss, norm, weight and moment, bit for bit. The first number
is of one rank; what follows a + is of two ranks, which are compared with the first Python alone.
"""
_TRAINERS = """
The trainers on megatron-core, with DeepSpeed {release}: tests that passed.
"""


def write(cells: Sequence[Cell], releases: Sequence[str]) -> None:
    """Write both documents from the results of cells that there are.

    Args:
        cells: All of the tables.
        releases: Of DeepSpeed, the oldest first.
    """
    results = stored(cells)
    COMPATIBILITY.write_text(compatibility(cells, results), encoding="utf-8")
    text = EQUALITY_TABLE.read_text(encoding="utf-8")
    EQUALITY_TABLE.write_text(with_releases(text, results, releases), encoding="utf-8")


def compatibility(cells: Sequence[Cell], results: Mapping[Cell, Result]) -> str:
    """The document.

    Args:
        cells: All that there are.
        results: Of those that were run.
    """
    of_kind = {kind: [cell for cell in cells if cell.kind == kind] for kind in (EQUALITY, TRAINER)}
    comparisons, trainers = of_kind[EQUALITY], of_kind[TRAINER]
    lines = [
        _INTRODUCTION,
        *_table("DeepSpeed", comparisons, results, lambda cell: cell.deepspeed),
        _TRAINERS.format(release=trainers[0].deepspeed),
        *_table("megatron-core", trainers, results, lambda cell: cell.megatron),
        *_notes(cells, results),
    ]
    return "\n".join(lines) + "\n"


def _table(
    corner: str,
    cells: Sequence[Cell],
    results: Mapping[Cell, Result],
    row_of: Callable[[Cell], str],
) -> list[str]:
    """One row a release, one column a Python."""
    pythons = list(dict.fromkeys(cell.python for cell in cells))
    there = {(row_of(cell), cell.python): cell for cell in cells}
    lines = [
        f"| {corner} | {' | '.join(f'Python {python}' for python in pythons)} |",
        f"|---|{'---|' * len(pythons)}",
    ]
    for row in dict.fromkeys(map(row_of, cells)):
        found = (there.get((row, python)) for python in pythons)
        texts = ("n/a" if cell is None else as_text(results.get(cell)) for cell in found)
        lines.append(f"| {row} | {' | '.join(texts)} |")
    return lines


def as_text(result: Result | None) -> str:
    """A cell of the tables: how many comparisons were equal; empty where it was not run."""
    if result is None:
        return ""
    parts = [" + ".join(map(str, result.equal.values()))]
    if result.different:
        parts.append(f"**{len(result.different)} not**")
    if result.reason:
        parts.append("**did not end**")
    if result.refused:
        parts.append(f"{len(result.refused)} refused")
    return ", ".join(filter(None, parts))


def _notes(cells: Sequence[Cell], results: Mapping[Cell, Result]) -> list[str]:
    """What the cells are too small for."""
    lines: list[str] = []
    refused: dict[tuple[str, str], str] = {}
    for cell in cells:
        result = results.get(cell, Result(""))
        said = ([result.reason] if result.reason else []) + result.different
        lines += [f"* {cell.name}: {text}" for text in said]
        refused |= {(cell.deepspeed, name): why for name, why in result.refused.items()}
    named: dict[str, list[str]] = {}
    for (release, name), why in refused.items():
        # A message names the stage that it was given; what differs in that alone is one line.
        same = re.sub(r"stage = \d", "stage = 1 or 2", why)
        named.setdefault(f"Refused with DeepSpeed {release} ({same})", []).append(name)
    for why, names in named.items():
        lines += [f"* {why}:", *(f"    * {name}" for name in names)]
    torch = {result.versions["torch"] for result in results.values() if result.versions}
    codes = {result.code for result in results.values()}
    ran = (
        f"torch {', '.join(sorted(torch)) or '(none yet)'}; hash of the files that were run: "
        f"{', '.join(sorted(codes)) or '(none yet)'}; n/a: not published for that Python."
    )
    return ["", ran, *([""] if lines else []), *lines]


def with_releases(text: str, results: Mapping[Cell, Result], releases: Sequence[str]) -> str:
    """The table of docs/equality.md with the releases in which a row was run and equal.

    Args:
        text: The document; a release in it stays where no result contradicts it.
        results: Of cells that were run.
        releases: In the order in which they are to be named.
    """
    equal: dict[str, set[str]] = {}
    unequal: dict[str, set[str]] = {}
    for cell, result in results.items():
        if cell.kind == EQUALITY:
            absent = dict.fromkeys(result.refused, False)
            for feature, is_equal in {**result.features, **absent}.items():
                by_release = equal if is_equal else unequal
                by_release.setdefault(feature, set()).add(cell.deepspeed)
    lines, column = text.split("\n"), 0
    for number, line in enumerate(lines):
        parts = [part.strip() for part in line.split("|")]
        if not line.startswith("|"):
            column = 0
        elif line.startswith("|-"):
            continue
        elif column == 0:
            column = parts.index(RELEASES_COLUMN) if RELEASES_COLUMN in parts else -1
        elif column > 0:
            feature = parts[1]
            named = {*parts[column].split(", "), *equal.get(feature, ())}
            named -= unequal.get(feature, set())
            others = sorted(named - {*releases, ""})
            parts[column] = ", ".join([*(one for one in releases if one in named), *others])
            lines[number] = f"| {' | '.join(parts[1:-1])} |"
    return "\n".join(lines)
