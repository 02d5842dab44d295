"""How sweeps stand: ``python -m launch.status [FOLDER]``, from anywhere, while they run or after.

FOLDER is a results folder or the folder of one sweep. Reads files alone and changes nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs import cli
from configs.errors import ConfigError
from configs.files import ROOT
from launch.process.watch import Tail, duration_text, progress_text
from launch.records import Record, read_records
from launch.sweep_index import INDEX, read_index

PENDING = "pending"
_RUN = "*/run-*/run.json"


def sweep_folders(folder: Path) -> list[Path]:
    """Return the sweep folders that a path names: itself, or those in it; of single runs as well.

    Simulated sweeps, of which nothing was run, are left out.

    Raises:
        ConfigError: there are none.
    """
    if (folder / INDEX).is_file() or any(folder.glob(_RUN)):
        return [folder]
    # Studies other than the default one have a folder each.
    places = ("*", "*/*")
    every = {path.parent for place in places for path in folder.glob(f"{place}/{INDEX}")}
    every |= {path.parents[2] for place in places for path in folder.glob(f"{place}/{_RUN}")}
    found = sorted(path for path in every if not path.parent.name.startswith("simulated-"))
    if not found:
        raise ConfigError(f"{folder}: no sweep was run in it; give a results folder or a sweep's")
    return found


def sweep_status(folder: Path) -> dict[str, Any]:
    """Return one sweep as plain data: its name, counts by status, and an entry for each run.

    Runs that are asked for and have no folder yet are ``pending``. Of runs that no sweep asked for,
    each point's newest has an entry.
    """
    index = read_index(folder)
    newest = {(r.point_key, r.repeat): r for r in read_records(folder)}
    # A run of another sweep may stand for one of this sweep's points.
    shared = {(r.get("name"), r.get("repeat")): r.get("status") for r in index.get("runs", [])}
    entries = []
    for point in index.get("points", []):
        for repeat in range(1, int(point.get("repeats") or 1) + 1):
            record = newest.get((point.get("point_key"), repeat))
            other = shared.get((point.get("name"), repeat), PENDING)
            about = {"status": other, "detail": ""} if record is None else _entry(record)
            entries.append({"name": point.get("name"), "repeat": repeat, **about})
    if not index:
        entries = [{"name": r.name, "repeat": r.repeat, **_entry(r)} for r in newest.values()]
    return {
        "sweep": str(index.get("name") or folder.name),
        "folder": str(folder),
        "counts": dict(Counter(str(entry["status"]) for entry in entries)),
        "runs": entries,
    }


def _entry(record: Record) -> dict[str, Any]:
    newest = Tail(record.path / "metrics.jsonl").look()
    loss = None if newest is None else newest.get("loss")
    took = "" if record.seconds is None else f"{duration_text(record.seconds)}, "
    details = {
        "running": progress_text(newest, record.iterations),
        "ok": f"{took}last loss {'none' if loss is None else f'{loss:.4f}'}",
    }
    return {
        "status": record.status,
        "folder": str(record.path),
        "seconds": record.seconds,
        "iteration": None if newest is None else newest.get("iteration"),
        "iterations": record.iterations,
        "loss": loss,
        "detail": details.get(record.status, record.cause),
    }


def status_text(sweep: dict[str, Any]) -> str:
    """Return a sweep's status as lines of text; what files say is made printable."""
    counts = ", ".join(f"{number} {word}" for word, number in sweep["counts"].items())
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
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print how sweeps stand.

    Returns:
        0; 1 when a run has failed or was interrupted.

    Raises:
        ConfigError: there is no sweep.
    """
    given = build_parser().read(argv)
    found = [sweep_status(folder) for folder in sweep_folders(given.folder)]
    cli.say(json.dumps(found, indent=2) if given.json else "\n".join(map(status_text, found)))
    good = {"ok", "running", PENDING}
    return int(any(set(sweep["counts"]) - good for sweep in found))


if __name__ == "__main__":
    raise SystemExit(cli.run_command(main))
