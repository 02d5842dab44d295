"""Figures and tables of ``make bench-gpu`` from what its rows measured. Nothing imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.bound import Bound, Limits, iteration_bound, update_bound, update_work
from benchmarks.gpu_rows import STOCK, Row
from benchmarks.report import NONE, as_table, shown
from benchmarks.timing import Times
from benchmarks.verdict import compare_rounds

WITHHELD = "withheld"
GIB = 2**30


@dataclass
class Outcome:
    """What became of a row.

    Attributes:
        row: Which.
        rounds: Results by the number of their round, as the worker wrote them.
        failed: Why it failed, for the last time; empty when it did not.
        left_out: Why it was not run, or not once more; empty when it was.
    """

    row: Row
    rounds: dict[int, dict[str, Any]] = field(default_factory=dict)
    failed: str = ""
    left_out: str = ""

    def times(self, name: str) -> Times | None:
        """All repeats of all rounds of ``iteration_s``, ``update_s`` or ``compute_s``."""
        seconds = [s for found in self.rounds.values() for s in found[name] or ()]
        return Times(tuple(seconds)) if seconds else None

    def speed_up(self, name: str, stock: Outcome) -> float | None:
        """How many times shorter than stock's, the median over rounds that both have."""
        ratios = [
            median(stock.rounds[number][name]) / median(found[name])
            for number, found in self.rounds.items()
            if number in stock.rounds and stock.rounds[number][name] and found[name]
        ]
        return median(ratios) if ratios else None


def figures(outcomes: Sequence[Outcome], limits: Limits | None, cores: int) -> list[dict[str, Any]]:
    """One table of figures a row, for the JSON file and the tables."""
    stock = next((o for o in outcomes if o.row.name == STOCK), Outcome(Row(STOCK, "")))
    return [_figures_of(outcome, stock, limits, cores) for outcome in outcomes]


def bounds(outcomes: Sequence[Outcome], limits: Limits | None) -> tuple[Bound, Bound] | None:
    """Shortest iteration and update, from the rates measured and stock's computing."""
    stock = next((o for o in outcomes if o.row.name == STOCK), None)
    compute = stock.times("compute_s") if stock else None
    if stock is None or limits is None or compute is None:
        return None
    parameters = next(iter(stock.rounds.values()))["parameters"]
    least = iteration_bound(parameters, limits, compute.median_s)
    return least, update_bound(parameters, limits)


def _figures_of(
    outcome: Outcome, stock: Outcome, limits: Limits | None, cores: int
) -> dict[str, Any]:
    row, rounds = outcome.row, list(outcome.rounds.values())
    found: dict[str, Any] = {"name": row.name, "title": row.title, "stale": row.stale}
    found |= {"failed": outcome.failed, "left_out": outcome.left_out, "rounds": rounds}
    if not rounds:
        return found
    verdict = compare_rounds(rounds, list(stock.rounds.values()))
    found |= {"equal": verdict.equal, "verdict": verdict.text}
    # Faster than stock means nothing for our own rows unless they did the same.
    is_ours = row.block is not None
    found["withheld"] = is_ours and verdict.equal is False
    for name in ("iteration_s", "update_s"):
        times = outcome.times(name)
        found[name] = times.as_json() if times else None
        found[f"{name}_stock_over"] = None if found["withheld"] else outcome.speed_up(name, stock)
    parameters = rounds[0]["parameters"]
    found["parameters"] = parameters
    update, iteration = found["update_s"], found["iteration_s"]
    if update:
        found["parameters_per_s"] = parameters / update["median"]
        found["parameters_per_s_a_core"] = parameters / update["median"] / cores
    least = bounds([stock], limits)
    if least and row.on_host and not found["withheld"]:
        found["share_of_iteration_bound"] = least[0].seconds / iteration["median"]
        found["share_of_update_bound"] = least[1].seconds / update["median"] if update else None
    share = 0.0 if row.name == STOCK else rounds[-1].get("device_share")
    if limits and row.on_host and share is not None:
        seconds = (update or iteration)["median"]
        work = update_work(parameters, limits, share)
        found["device_share"] = share
        found["share_of_limits"] = {name: needed / seconds for name, needed in work.items()}
    return found


def as_text(found: Sequence[Mapping[str, Any]]) -> str:
    """Times, and after them verdicts and memory, a line a row."""
    head = ["row", "iteration s", "quartiles", "x stock", "of bound"]
    head += ["update s", "x stock", "of bound", "1e9 param/s"]
    return "\n".join(
        [
            as_table(head, [_times_of(row) for row in found]),
            "",
            as_table(
                ["row", "set-up s", "device GiB", "resident GiB", "repeats", "against stock"],
                [_state_of(row) for row in found],
                left=(0, 5),
            ),
        ]
    )


def limits_text(found: Sequence[Mapping[str, Any]]) -> str:
    """How much of each measured limit the bytes of an update need; empty when none was measured."""
    rows = [row for row in found if "share_of_limits" in row]
    if not rows:
        return ""
    names = list(rows[0]["share_of_limits"])
    table = [
        [
            row["title"],
            f"{row['device_share']:.0%}",
            *(f"{row['share_of_limits'][name]:.0%}" for name in names),
        ]
        for row in rows
    ]
    return as_table(["share of the limit", "on device", *names], table)


def _times_of(row: Mapping[str, Any]) -> list[str]:
    if not row["rounds"]:
        return [row["title"], *[NONE] * 8]
    iteration, update = row["iteration_s"], row["update_s"]
    withheld = row["withheld"]

    def times_stock(name: str) -> str:
        return WITHHELD if withheld else shown(row[f"{name}_stock_over"])

    def percent(name: str) -> str:
        share = row.get(name)
        return NONE if share is None else f"{share:.0%}"

    rate = row.get("parameters_per_s")
    return [
        row["title"],
        shown(iteration["median"], 3),
        f"{iteration['low']:.3f} to {iteration['high']:.3f}",
        times_stock("iteration_s"),
        percent("share_of_iteration_bound"),
        shown(update["median"], 3) if update else NONE,
        times_stock("update_s") if update else NONE,
        percent("share_of_update_bound"),
        shown(rate / 1e9 if rate else None),
    ]


def _state_of(row: Mapping[str, Any]) -> list[str]:
    if not row["rounds"]:
        return [row["title"], *[NONE] * 4, _why_none(row)]
    last = row["rounds"][-1]
    device = last["device_bytes"]
    why = f"; {_why_none(row)}" if row["failed"] or row["left_out"] else ""
    return [
        row["title"],
        shown(median(found["set_up_s"] for found in row["rounds"]), 1),
        shown(device / GIB if device else None, 1),
        shown(last["resident_bytes"] / GIB, 1),
        str(row["iteration_s"]["repeats"]),
        row["verdict"] + (" (stale)" if row["stale"] and row["equal"] is False else "") + why,
    ]


def _why_none(row: Mapping[str, Any]) -> str:
    if row["failed"]:
        return f"failed: {row['failed']}"
    return f"left out: {row['left_out']}" if row["left_out"] else NONE
