"""Checkpoints of a run: which there are, whether a point may go on from one, how one is saved.

``RUN/checkpoints/iteration-000100`` holds what the trainer saved, and ``checkpoint.json``, which is
written last. The folder has its name only once it is whole; ``latest`` beside it then names it.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.errors import ConfigError
from configs.files import read_given_json, write_json, write_text
from configs.schema import Point

if TYPE_CHECKING:
    import torch

    from launch.train_loop.runfile import RunFile

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
    iteration: int
    point: dict[str, Any]
    """Settings of the run that saved it."""
    data: Any
    """Sizes and checksums of the data that it read; None where they are not recorded."""
    files: dict[str, int]
    """What the trainer saved: name to size in bytes."""
    has_checksums: bool = True
    """False where the plugin filled the files in the background, which computes none."""

    @property
    def run_dir(self) -> Path | None:
        """The folder of the run that it lies in; None where it lies elsewhere."""
        folder = self.path.parent.parent
        is_of_run = self.path.parent.name == FOLDER and (folder / "run.json").is_file()
        return folder if is_of_run else None

    def differences(self, point: Point) -> list[str]:
        """Say why a point cannot go on from here as if it had never stopped."""
        given = point.model_dump(mode="json")
        fields = point.study.fields.items()
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
        """Say what is wrong with one share of its files; empty when nothing is.

        Every file is read once, for the checksums that are in it, where there are any.
        """
        for name, num_bytes in sorted(self.files.items())[share::num_shares]:
            path = self.path / name
            try:
                if path.stat().st_size != num_bytes:
                    return f"{path}: has {path.stat().st_size} bytes instead of {num_bytes}"
                with zipfile.ZipFile(path) as archive:
                    bad = archive.testzip() if self.has_checksums else None
            except (OSError, zipfile.BadZipFile) as error:
                return f"{path}: {error}"
            if bad is not None:
                return f"{path}: {bad} does not have its checksum"
        return ""


def find_checkpoint(folder: Path) -> Checkpoint:
    """Return the last checkpoint of a run's folder, or the one whose own folder is given.

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
    table = read_given_json(path / DESCRIPTION)
    if table.pop("schema_version", None) != SCHEMA_VERSION:
        raise ConfigError(f"{path / DESCRIPTION}: schema_version is not {SCHEMA_VERSION}")
    try:
        return Checkpoint(path, **table)
    except TypeError as error:
        raise ConfigError(
            f"{path / DESCRIPTION}: not a checkpoint of this harness ({error}); give another "
            "folder to --continue-from"
        ) from None


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


Write = Callable[[Path, Callable[[], None]], bool]
"""Writes this rank's files of a checkpoint into a folder. Returns whether they are there now; else
what it was given is called, on rank 0 and on any thread, once the files of all ranks are there."""


def save_whole(
    run: RunFile, iteration: int, write: Write, when_whole: Callable[[Path], None]
) -> None:
    """Save a checkpoint that has its name only once it is whole; every rank must call it.

    What fails leaves the checkpoints before it as they are.

    Args:
        run: The run that it is of.
        iteration: The last one that it holds.
        write: See :data:`Write`.
        when_whole: Called on rank 0 with the checkpoint's folder, which has its name then.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    import torch.distributed as dist

    from deep_optimizer_states.core.checkpoint import sync

    parent = run.run_dir / FOLDER
    path = parent / f"iteration-{iteration:06d}"
    partial = path.with_suffix(".partial")
    is_there = False

    def name() -> None:
        description = {
            "schema_version": SCHEMA_VERSION,
            "iteration": iteration,
            "point": run.point.model_dump(mode="json"),
            "data": run.data_facts,
            "files": {file.name: file.stat().st_size for file in partial.iterdir()},
            "has_checksums": is_there,
        }
        write_json(partial / DESCRIPTION, description)
        sync(partial)
        partial.rename(path)
        sync(parent)
        write_text(parent / LATEST, path.name)
        sync(parent)
        when_whole(path)

    try:
        is_there = write(partial, name)
        if is_there:
            for file in list(partial.iterdir()):
                sync(file)
            dist.barrier()
            if dist.get_rank() == 0:
                name()
            dist.barrier()
    except (OSError, RuntimeError) as error:
        # torch's writer of files tells of a full disk by a RuntimeError.
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(
            f"checkpoint of iteration {iteration} not saved in {parent}: {error}; earlier ones "
            "are still there"
        ) from error


def require_usable(run: RunFile, checkpoint: Checkpoint) -> None:
    """Check a checkpoint before anything of it is taken up; every rank must call it.

    Raises:
        ConfigError: the checkpoint is damaged, or is of another point or other data.
    """
    import torch.distributed as dist

    reasons = checkpoint.differences(run.point)
    if None not in (run.data_facts, checkpoint.data) and run.data_facts != checkpoint.data:
        reasons.append(
            f"data_prefix = {run.data_prefix}: other data than the checkpoint {checkpoint.path} "
            "was trained on; give its data"
        )
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, checkpoint.damage(dist.get_rank(), dist.get_world_size()))
    reasons += [f"the checkpoint is damaged: {text}" for text in found if text]
    if reasons:
        raise ConfigError(f"--continue-from: {'; '.join(reasons)}")


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of all random generators of this rank."""
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if device.type == "cuda" else None,
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Take over what :func:`random_states` gave, wherever it was loaded to."""
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.set_rng_state(states["cpu"].cpu())
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"].cpu())
    trackers = {name: state.cpu() for name, state in states["megatron"].items()}
    get_cuda_rng_tracker().set_states(trackers)
