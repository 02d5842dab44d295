"""The work folder of a job: whose it is, and what of it is done."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataset import locks
from dataset.errors import DatasetError
from dataset.pipeline import parts
from dataset.pipeline.job import Job
from dataset.pipeline.parts import Facts
from dataset.readers.blocks import Position

PLAN_NAME = "plan.json"


@dataclass
class Done:
    """What earlier runs finished."""

    facts: dict[int, Facts] = field(default_factory=dict)

    def first_missing(self) -> tuple[int, Position, int]:
        """The first part to make, where it starts, and the input bytes before it."""
        number, start, consumed = 0, Position(), 0
        while number in self.facts:
            start, consumed = self.facts[number].end, self.facts[number].consumed_bytes
            number += 1
        return number, start, consumed


def claim(job: Job, restart: bool, say: Callable[[str], None]) -> Done:
    """Open the work folder of a job, which must be locked, and see what is done.

    Args:
        job: What is asked for.
        restart: Drop what an earlier run left.
        say: Gets a line when there is something to go on from.

    Raises:
        DatasetError: The folder holds the work of a job with other settings.
    """
    folder = job.work_folder
    plan_path = folder / PLAN_NAME
    if restart:
        clear(folder)
    if plan_path.exists():
        _require_same(job, plan_path)
        done = Done({facts.number: facts for facts in parts.finished(folder)})
        if done.facts:
            say(f"going on: {len(done.facts):,} parts in {folder} are done")
        return done
    clear(folder)
    unfinished = plan_path.with_suffix(parts.UNFINISHED_ENDING)
    unfinished.write_text(json.dumps(job.plan(), indent=1) + "\n", encoding="utf-8")
    unfinished.replace(plan_path)
    return Done()


def drop_fruitless(job: Job) -> None:
    """Clear what a job of other options left when no part of it was finished: nothing is lost.

    Raises:
        DatasetError: There is something in the folder that no job put there.
    """
    folder = job.work_folder
    plan_path = folder / PLAN_NAME
    begun = plan_path.exists() and not any(folder.glob(f"*{parts.ENDING}"))
    if begun and _changes(job, _read_plan(plan_path)):
        clear(folder)


def _read_plan(plan_path: Path) -> dict[str, Any]:
    try:
        found = json.loads(plan_path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _changes(job: Job, before: dict[str, Any]) -> list[str]:
    """What of a plan is otherwise now."""
    return [name for name, value in job.plan().items() if before.get(name) != value]


def _require_same(job: Job, plan_path: Path) -> None:
    before = _read_plan(plan_path)
    names = _changes(job, before)
    if names:
        shown = {"input": "the input files"}.get(names[0], f"{names[0]} = {before.get(names[0])!r}")
        raise DatasetError(
            f"{plan_path.parent} holds unfinished work begun with other options "
            f"({shown} then): give those again to go on, or --restart to drop it"
        )


def clear(folder: Path) -> None:
    """Empty a work folder of all but the lock; the plan last, so that it stays ours till then.

    Raises:
        DatasetError: There is something in it that no job put there.
    """
    ours = (PLAN_NAME, locks.NAME, "tokenizer.json", "tokenizer.model")
    for path in folder.iterdir():
        ending = path.suffix in (parts.ENDING, parts.UNFINISHED_ENDING, ".bin", ".idx")
        if not (path.name in ours or ending or path.name.startswith("unfinished-")):
            raise DatasetError(f"{folder} is for unfinished work; what is {path.name} in it?")
    for path in folder.iterdir():
        if path.name not in (locks.NAME, PLAN_NAME):
            path.unlink()
    (folder / PLAN_NAME).unlink(missing_ok=True)
