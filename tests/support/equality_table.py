"""The table of what equals stock: ``docs/equality.csv``, and the page that introduces it."""

import csv
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
ABOUT = ("stage", "parameters", "states")
"""Columns that describe a feature. A cell of any other column lists numbers of ranks."""
SAVED = "saved by "
"""Rows of resumed training: saved by the row's engine, loaded by the column's."""


def cells_of(reports):
    """Return ``(row, column)`` -> cell, from ``reports[ranks][rank]``."""
    cells = {}
    for ranks, of_rank in reports.items():
        for key in of_rank[0]["comparisons"]:
            row, _, column = key.partition(" | ")
            if row == "resume":
                saver, _, column = column.partition(" to ")
                row = f"{SAVED}{saver}"
            differs = any(report["comparisons"][key] for report in of_rank)
            cells.setdefault((row, column), []).append(
                f"{ranks}:differs" if differs else str(ranks)
            )
        for feature, columns in of_rank[0]["columns"].items():
            cells |= {(feature, name): [text] for name, text in columns.items()}
    return {place: " ".join(parts) for place, parts in cells.items()}


def read():
    """Return ``(row, column)`` -> cell of the table in docs, without its empty cells."""
    with (DOCS / "equality.csv").open(newline="") as file:
        return {
            (row["feature"], column): cell
            for row in csv.DictReader(file)
            for column, cell in row.items()
            if cell and column != "feature"
        }


def write(cells):
    """Write the table and its page."""
    columns = dict.fromkeys((*ABOUT, *(column for _, column in cells)))
    rows = {}
    for (row, column), cell in cells.items():
        rows.setdefault(row, {"feature": row})[column] = cell
    with (DOCS / "equality.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["feature", *columns], lineterminator="\n")
        table.writeheader()
        table.writerows(rows.values())
    (DOCS / "equality.md").write_text(page(cells))


def page(cells):
    """Return the page, with the numbers of features and of comparisons."""
    compared = [cell.split() for (_, column), cell in cells.items() if column not in ABOUT]
    ranks = sorted({int(part.partition(":")[0]) for parts in compared for part in parts})
    equal = (f"{sum(str(n) in parts for parts in compared)} on {n}" for n in ranks)
    rows = {row for row, column in cells if column == "stage"}
    return PAGE.format(rows=len(rows), equal=", ".join(equal))


PAGE = """\
# What equals stock DeepSpeed, bit for bit

For readers who want to know whether a feature was compared with stock, under which policy and on
how many ranks: look it up in [equality.csv](equality.csv), with {rows} features as rows and the
policies as columns. `make equality` writes it and this page (half an hour on two cores).

A cell lists the numbers of ranks on which losses, gradient norms, master weights, moments and
16-bit weights all had the bits of stock offload, on the emulated device; an empty cell was not run.
Equal comparisons by ranks: {equal}. In the rows `saved by ENGINE` the column's engine
loads that engine's checkpoint and trains on; the reference is stock that loads stock's.

In the columns `dynamic, prefetched` and `stride 2, before the norm` state comes to the device and
goes home every few steps; the latter is of stage 3, without clipping and not in fp16. On more
ranks stock itself fails with `safe_set_full_fp32_param` and with experts that are no leaf modules.
Models are `transformers`' classes, made small.
[Other releases of DeepSpeed](install.md#what-was-run-together).
"""
