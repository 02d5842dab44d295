"""Saves a run's checkpoints, each whole or not at all, and begins a run at one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from configs.errors import ConfigError
from launch.trainer.checkpoint_files import (
    DESCRIPTION,
    FOLDER,
    LATEST,
    SCHEMA_VERSION,
    Checkpoint,
)
from launch.trainer.runfile import RunFile

_RANDOM_STATES = "random_states"
"""Under this name DeepSpeed's file holds the generators' states of every rank."""


def save_checkpoint(run: RunFile, engine: Any, iteration: int) -> Path:  # noqa: ANN401
    """Save weights, optimizer state, schedule and random states; every rank must call it.

    What fails leaves the checkpoints before it as they are.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, random_states(engine.device))

    def write(partial: Path) -> None:
        engine.save_checkpoint(
            str(partial.parent),
            partial.name,
            client_state={_RANDOM_STATES: states},
            save_latest=False,
        )

    return save_whole(run, iteration, write)


def save_whole(run: RunFile, iteration: int, write: Callable[[Path], None]) -> Path:
    """Save a checkpoint that has its name only once it is whole; every rank must call it.

    Args:
        run: the run.
        iteration: the one after which it is saved.
        write: writes this rank's files into the folder that it is given.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    parent = run.run_dir / FOLDER
    path = parent / f"iteration-{iteration:06d}"
    partial = path.with_suffix(".partial")
    try:
        write(partial)
        for file in partial.iterdir():
            _flush(file)
        dist.barrier()
        if dist.get_rank() == 0:
            _describe(run, partial, iteration)
            partial.rename(path)
            _flush(parent)
            _replace(parent / LATEST, path.name)
    except (OSError, RuntimeError) as error:
        # torch's writer of files tells of a full disk by a RuntimeError.
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(
            f"checkpoint of iteration {iteration} not saved in {parent}: {error}; earlier ones "
            "are still there"
        ) from error
    dist.barrier()
    return path


def _describe(run: RunFile, partial: Path, iteration: int) -> None:
    files = {file.name: file.stat().st_size for file in partial.iterdir()}
    description = {
        "schema_version": SCHEMA_VERSION,
        "iteration": iteration,
        "point": run.point.model_dump(mode="json"),
        "data": run.data_facts,
        "files": files,
    }
    _replace(partial / DESCRIPTION, json.dumps(description, indent=2))


def _replace(path: Path, text: str) -> None:
    """Write a file that is there whole, or as it was, even if power is cut."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    _flush(new)
    new.replace(path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    """Have the disk hold what was written; of a folder, its entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_checkpoint(run: RunFile, engine: Any, checkpoint: Checkpoint) -> None:  # noqa: ANN401
    """Take up a checkpoint's weights, optimizer state, schedule and random states.

    Every rank must call it.

    Raises:
        ConfigError: the checkpoint is damaged, or is of another point or other data.
    """
    require_usable(run, checkpoint)
    _, state = engine.load_checkpoint(str(checkpoint.path.parent), checkpoint.path.name)
    set_random_states(state[_RANDOM_STATES][dist.get_rank()], engine.device)


def require_usable(run: RunFile, checkpoint: Checkpoint) -> None:
    """Check a checkpoint before anything of it is taken up; every rank must call it.

    Raises:
        ConfigError: the checkpoint is damaged, or is of another point or other data.
    """
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
    """The states of all generators of this rank."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if device.type == "cuda" else None,
        "megatron": get_cuda_rng_tracker().get_states(),
    }


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Take over what :func:`random_states` gave."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.set_rng_state(states["cpu"])
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["megatron"])
