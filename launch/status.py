"""How sweeps stand: ``python -m launch.status [FOLDER]``, from anywhere, while they run or after.

FOLDER is a results folder or the folder of one sweep. Reads files alone and changes nothing.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs import cli
from configs.errors import ConfigError
from configs.files import ROOT
from launch.process.watch import Tail, duration_text, progress_text
from launch.records.ledger import Record, read_records
from launch.sweep_index import INDEX, read_index

PENDING, DAMAGED = "pending", "damaged"
_RUN = "*/run-*/run.json"
WATCH_S = 2.0
"""Seconds between two looks under ``--watch``."""


def sweep_folders(folder: Path) -> list[Path]:
    """Return the sweep folders that a path names: itself, or those in it; of single runs as well.

    Raises:
        ConfigError: there are none.
    """
    if (folder / INDEX).is_file() or any(folder.glob(_RUN)):
        return [folder]
    # Studies other than the default one have a folder each.
    places = ("*", "*/*")
    every = {path.parent for place in places for path in folder.glob(f"{place}/{INDEX}")}
    every |= {path.parents[2] for place in places for path in folder.glob(f"{place}/{_RUN}")}
    found = sorted(
        path
        for path in every
        if path.parent == folder or not path.parent.name.startswith("simulated-")
    )
    if every and not found:
        raise ConfigError(f"{folder}: only simulated sweeps in it, of which nothing was run")
    if not found:
        raise ConfigError(f"{folder}: no sweep in it; give a results folder or a sweep's")
    return found


def sweep_status(folder: Path) -> dict[str, Any]:
    """Return one sweep as plain data: its name, counts by status, and an entry for each run.

    Runs that are asked for and have no folder yet are ``pending``. Of runs that no sweep asked for,
    each point's newest has an entry.

    Raises:
        ConfigError: its ``sweep.json`` is damaged.
    """
    index = read_index(folder)
    newest = {(r.point_key, r.repeat): r for r in read_records(folder)}
    # A run of another sweep may stand for one of this sweep's points.
    shared = {(str(r.get("name")), r.get("repeat")): r for r in index.get("runs", [])}
    entries = []
    for point in index.get("points", []):
        for repeat in range(1, int(point.get("repeats") or 1) + 1):
            record = newest.get((point.get("point_key"), repeat))
            entry = {"name": point.get("name"), "repeat": repeat}
            if record is not None:
                entry |= _entry(record)
            else:
                other = shared.get((str(point.get("name")), repeat), {})
                entry |= {"status": other.get("status", PENDING), "detail": ""}
            entries.append(entry)
    if not index:
        entries = [{"name": r.name, "repeat": r.repeat, **_entry(r)} for r in newest.values()]
    counts = Counter(str(entry["status"]) for entry in entries)
    return {
        "sweep": str(index.get("name") or folder.name),
        "folder": str(folder),
        "simulated": index.get("source") == "simulated",
        "counts": dict(counts),
        "runs": entries,
    }


def _entry(record: Record) -> dict[str, Any]:
    newest = Tail(record.path / "metrics.jsonl").look()
    entry: dict[str, Any] = {
        "status": record.status,
        "folder": str(record.path),
        "seconds": record.seconds,
        "iteration": None if newest is None else newest.get("iteration"),
        "iterations": record.iterations,
        "loss": None if newest is None else newest.get("loss"),
    }
    loss = "none" if entry["loss"] is None else f"{entry['loss']:.4f}"
    took = "" if record.seconds is None else f"{duration_text(record.seconds)}, "
    details = {
        "running": progress_text(newest, record.iterations),
        "ok": f"{took}last loss {loss}",
    }
    return {**entry, "detail": details.get(record.status, record.cause)}


def status_text(sweep: dict[str, Any]) -> str:
    """Return a sweep's status as lines of text; what files say is made printable."""
    counts = ", ".join(f"{number} {word}" for word, number in sweep["counts"].items())
    counts = sweep.get("error") or counts
    if sweep.get("simulated"):
        counts = "simulated, nothing was run"
    lines = [f"{sweep['sweep']}: {counts}  ({sweep['folder']})"]
    width = max((len(str(run["name"])) for run in sweep["runs"]), default=0)
    repeats = any(run["repeat"] > 1 for run in sweep["runs"])
    for run in sweep["runs"]:
        repeat = f" #{run['repeat']}" if repeats else ""
        lines.append(f"  {run['status']:12}{run['name']:{width}}{repeat}  {run['detail']}".rstrip())
    return "\n".join(line.replace("\n", "?") for line in lines)


def build_parser() -> cli.Parser:
    """Return the options of ``launch.status``."""
    parser = cli.Parser("python -m launch.status", "How sweeps stand.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "results", metavar="FOLDER")
    cli.add_json(parser)
    parser.add_argument("--watch", action="store_true", help="look again until nothing runs")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print how sweeps stand.

    Returns:
        0; 1 when a run has failed or was interrupted.

    Raises:
        ConfigError: there is no sweep.
    """
    given = build_parser().read(argv)
    while True:
        folders = sweep_folders(given.folder)
        found = []
        for folder in folders:
            try:
                found.append(sweep_status(folder))
            except ConfigError as error:
                if folders == [given.folder]:
                    raise
                about = {"sweep": folder.name, "folder": str(folder), "error": str(error)}
                found.append({**about, "counts": {DAMAGED: 1}, "runs": []})
        if given.json:
            cli.say(json.dumps(found, indent=2))
        else:
            cli.say("\n".join(status_text(sweep) for sweep in found))
        if not given.watch or not any("running" in sweep["counts"] for sweep in found):
            break
        time.sleep(WATCH_S)
    good = {"ok", "running", PENDING}
    return int(any(set(sweep["counts"]) - good for sweep in found))


if __name__ == "__main__":
    raise SystemExit(cli.run_command(main))
