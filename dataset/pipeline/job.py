"""What `prepare --input` is asked for, and the work folder in which it is done."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dataset import locks, manifest
from dataset.alive import alive
from dataset.errors import DatasetError
from dataset.files import content_key, writing
from dataset.indexed import bin_path, idx_path
from dataset.pipeline import parts
from dataset.pipeline.parts import Facts
from dataset.readers.blocks import Reading
from dataset.tokenizer.choose import Choice

# Raise it when the same text must give other parts or other files.
FORMAT_VERSION = 2

PLAN_NAME = "plan.json"


@dataclass(frozen=True)
class Job:
    """Files in, pairs out."""

    reading: Reading
    output_prefix: Path  # absolute
    tokenizer: Choice
    append_eod: bool
    shifted_lengths: bool = False
    """Leave end-of-document out of the lengths, as Megatron-DeepSpeed's script does."""
    bad_lines: Literal["skip", "fail"] = "skip"
    workers: int = 1

    @property
    def work_folder(self) -> Path:
        """Where parts wait to be joined."""
        return self.output_prefix.with_name(f"{self.output_prefix.name}.parts")

    @property
    def bad_lines_path(self) -> Path:
        """Where records that cannot be used are listed."""
        return self.output_prefix.with_name(f"{self.output_prefix.name}.bad-lines.txt")

    def prefix(self, key: str) -> Path:
        """Where the pair of a key goes, named as by Megatron."""
        return self.output_prefix.with_name(f"{self.output_prefix.name}_{key}_document")

    def settings(self) -> dict[str, Any]:
        """All that decides the bytes but the text, as plain JSON."""
        return {
            "json_keys": list(self.reading.keys),
            "sample_by": self.reading.sample_by,
            "tokenizer": self.tokenizer.identity(),
            "append_eod": self.append_eod,
            "megatron_deepspeed_compat": self.shifted_lengths,
        }

    def plan(self) -> dict[str, Any]:
        """What parts made by an earlier run must agree on to be of use to this one."""
        files = self.reading.files
        return {
            "format": FORMAT_VERSION,
            "input": [[str(f.path), f.kind, f.size_bytes, f.modified_ns] for f in files],
            "part_bytes": self.reading.block_bytes,
            **self.settings(),
        }

    def changes(self, earlier: str) -> list[str]:
        """What an earlier run's plan, given as JSON, had otherwise than this one, as it had it."""
        try:
            before = json.loads(earlier)
            pairs = [(name, before.get(name), value) for name, value in self.plan().items()]
        except (ValueError, AttributeError):
            return ["its plan cannot be read"]
        names = {"input": "the input files then"}
        return [names.get(name, f"{name} = {old!r} then") for name, old, new in pairs if old != new]

    def key(self) -> str:
        """Digest of the plan, part sizes left out: they do not show in the files."""
        return content_key({**self.plan(), "part_bytes": None})


def claim(job: Job, restart: bool, say: Callable[[str], None]) -> dict[int, Facts]:
    """Open the work folder of a job, which must be locked, and see which parts are done.

    Work of other options is dropped when no part of it was finished: nothing is lost.

    Args:
        job: What is asked for.
        restart: Drop what an earlier run left.
        say: Gets a line when there is something to go on from.

    Raises:
        DatasetError: The folder holds the work of a job with other settings or something that no
            job put there, or files that are none of its work have the names of the output.
    """
    folder = job.work_folder
    plan_path = folder / PLAN_NAME
    is_ours = plan_path.exists()
    if is_ours and not restart:
        changes = job.changes(plan_path.read_text(encoding="utf-8", errors="replace"))
        if not changes:
            with alive("checking finished parts"):
                done = parts.finished(folder)
            if done:
                say(f"going on: {len(done):,} parts in {folder} are done")
            return done
        if any(folder.glob(f"*{parts.ENDING}")):
            raise DatasetError(
                f"{folder} holds unfinished work begun with other options "
                f"({changes[0]}): give those again to go on, or --restart to drop it"
            )
        is_ours = False
    if not is_ours:
        _require_free(job)
    clear(folder)
    unfinished = plan_path.with_suffix(parts.UNFINISHED_ENDING)
    with writing(plan_path):
        unfinished.write_text(json.dumps(job.plan(), indent=1) + "\n", encoding="utf-8")
    unfinished.replace(plan_path)
    return {}


def _require_free(job: Job) -> None:
    """Check that nothing has the output's names; a run stopped while it joined leaves its plan."""
    for key in job.reading.keys:
        for path_of in (bin_path, idx_path, manifest.path_of):
            if (path := path_of(job.prefix(key))).exists():
                raise DatasetError(
                    f"{path} is there already, of other text or options: "
                    "give another --output-prefix, or move it away"
                )


def clear(folder: Path) -> None:
    """Empty a work folder of all but the lock; the plan last, so that it stays ours till then.

    Raises:
        DatasetError: There is something in it that no job put there.
    """
    ours = (PLAN_NAME, locks.NAME, "tokenizer.json", "tokenizer.model")
    endings = (parts.ENDING, parts.UNFINISHED_ENDING, ".bin", ".idx")
    for path in folder.iterdir():
        if not (path.name in ours or path.suffix in endings or path.name.startswith("unfinished-")):
            raise DatasetError(f"{folder} is for unfinished work; what is {path.name} in it?")
    for path in folder.iterdir():
        if path.name not in (locks.NAME, PLAN_NAME):
            path.unlink()
    (folder / PLAN_NAME).unlink(missing_ok=True)
