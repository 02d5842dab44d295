"""Rows of a CSV file."""

import csv


def rows(path):
    """Return the rows of a table as dicts by column."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
