"""Checkpoints of a run as files: which there are, and whether a point may go on from one.

``RUN/checkpoints/iteration-000100`` holds what DeepSpeed saved, and ``checkpoint.json``, which is
written last. The folder has its name only once it is whole; ``latest`` beside it then names it.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.schema import Point

SCHEMA_VERSION = 1
"""Of ``checkpoint.json``."""
FOLDER = "checkpoints"
"""Folder of a run's checkpoints."""
DESCRIPTION = "checkpoint.json"
LATEST = "latest"
"""File that names the last checkpoint that is whole."""
_MAY_DIFFER = {
    *("name", "engine", "data_prefix", "device", "hog_share", "activation_checkpointing"),
    *("eval_interval", "eval_iterations", "save_interval"),
}
"""Fields that change no bit of what a checkpoint holds, or none of how training goes on from it.
The data itself is compared by its checksums."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is whole, as its ``checkpoint.json`` says it."""

    path: Path
    """Its folder, absolute."""
    iteration: int
    """Iterations that had been done."""
    point: dict[str, Any]
    """Settings of the run that saved it."""
    data: Any
    """Sizes and checksums of the data that it read; None where they are not recorded."""
    files: dict[str, int]
    """What DeepSpeed saved: name to size in bytes."""

    def differences(self, point: Point) -> list[str]:
        """Why a point cannot go on from here as if it had never stopped."""
        given = point.model_dump(mode="json")
        fields = point.study.fields.items() if point.study else ()
        free = _MAY_DIFFER | {name for name, row in fields if row.only_some_engines}
        reasons = [
            f"{name} = {_short(value)}: the checkpoint {self.path} was saved with "
            f"{_short(self.point.get(name))}; give that, or begin without a checkpoint"
            for name, value in given.items()
            if name not in free and value != self.point.get(name)
        ]
        if self.iteration >= point.iterations:
            reasons.append(
                f"iterations = {point.iterations}: the checkpoint {self.path} is of iteration "
                f"{self.iteration}, so nothing is left to do; give a checkpoint from before"
            )
        return reasons

    def damage(self, share: int = 0, num_shares: int = 1) -> str:
        """What is wrong with its files; empty when nothing is.

        Every file is read once, for the checksums that are in it.

        Args:
            share: which part of the files to look at, from 0.
            num_shares: parts that there are.
        """
        for name, num_bytes in sorted(self.files.items())[share::num_shares]:
            path = self.path / name
            try:
                if path.stat().st_size != num_bytes:
                    return f"{path}: has {path.stat().st_size} bytes instead of {num_bytes}"
                with zipfile.ZipFile(path) as archive:
                    bad = archive.testzip()
            except (OSError, zipfile.BadZipFile) as error:
                return f"{path}: {error}"
            if bad is not None:
                return f"{path}: {bad} does not have its checksum"
        return ""


def find_checkpoint(folder: Path) -> Checkpoint:
    """The last checkpoint of a run's folder, or the one whose own folder is given.

    Raises:
        ConfigError: there is none, or its description cannot be read.
    """
    path = folder.resolve()
    if not (path / DESCRIPTION).is_file():
        latest = path / FOLDER / LATEST
        try:
            path = latest.parent / latest.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(
                f"--continue-from {str(folder)!r}: no checkpoint there ({latest}: "
                f"{error.strerror}); give the folder of a run that had save_interval above 0"
            ) from None
    return _read_checkpoint(path)


def _read_checkpoint(path: Path) -> Checkpoint:
    source = path / DESCRIPTION
    try:
        table = json.loads(source.read_text(encoding="utf-8"))
        if table["schema_version"] != SCHEMA_VERSION:
            raise ConfigError(
                f"{source}: schema_version = {table['schema_version']!r}: this trainer reads "
                f"{SCHEMA_VERSION}"
            )
        files = {str(name): int(size) for name, size in table["files"].items()}
        return Checkpoint(path, int(table["iteration"]), dict(table["point"]), table["data"], files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{source}: not a checkpoint of this harness ({error!r}); give another folder to "
            "--continue-from"
        ) from None


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
