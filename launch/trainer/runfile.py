"""Reads a run folder: ``run.json`` and ``ds_config.json``, checked before anything slow starts."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.files import read_given_json
from configs.schema import Point
from configs.study import default_study, study_from
from launch.trainer.checkpoint_files import Checkpoint, find_checkpoint

SCHEMA_VERSIONS = (1, 2)
INDEX_MAGIC = b"MMIDIDX\x00\x00"
"""How every ``.idx`` of Megatron begins."""


@dataclass(frozen=True)
class RunFile:
    """What one run needs to know, as its run folder says it."""

    run_dir: Path
    """The run folder; everything the trainer writes goes here."""
    point: Point
    """Model, engine mode and knobs."""
    ds_config: dict[str, Any]
    """What ``deepspeed.initialize`` gets."""
    data_prefix: Path
    """Prefix of Megatron's ``.bin`` and ``.idx``."""
    metrics_path: Path
    """Where ``metrics.jsonl`` is made."""
    data_facts: Any = None
    """Sizes and checksums of the data's files; None where ``run.json`` has none."""
    checkpoint: Checkpoint | None = None
    """Where training begins; None for initial weights."""

    @property
    def index_cache_dir(self) -> Path:
        """Where megatron-core keeps the order of samples; the data set itself may be read-only."""
        return self.run_dir / "index-cache"

    @property
    def uses_plugin(self) -> bool:
        """Whether ``ds_config.json`` holds an enabled ``deep_optimizer_states`` block."""
        block = self.ds_config.get("deep_optimizer_states")
        return isinstance(block, dict) and bool(block.get("enabled", False))


def require_token_files(prefix: Path) -> Path:
    """The prefix of a ``.bin`` and an ``.idx`` of Megatron's that are there.

    Raises:
        ConfigError: one of them is not.
    """
    for suffix in (".bin", ".idx"):
        path = prefix.with_name(prefix.name + suffix)
        if not path.is_file():
            raise ConfigError(
                f"data_prefix = {prefix}: {path} is missing; make it with "
                "'python -m dataset prepare' or give another prefix"
            )
    index = prefix.with_name(f"{prefix.name}.idx")
    with index.open("rb") as file:
        if file.read(len(INDEX_MAGIC)) != INDEX_MAGIC:
            raise ConfigError(f"data_prefix = {prefix}: {index} is not an index of Megatron's")
    return prefix


def read_run_file(
    path: Path,
    continue_from: Path | None = None,
    require_data: Callable[[Path], Path] = require_token_files,
) -> RunFile:
    """Read ``run.json`` and the ``ds_config.json`` beside it.

    Args:
        path: ``run.json``.
        continue_from: folder of the checkpoint to begin at.
        require_data: looks whether the data at a prefix is there.

    Raises:
        ConfigError: a file is missing or malformed, the two contradict each other, the data set is
            not there, there is no checkpoint, or the folder already holds metrics of an earlier
            run.
    """
    table = read_given_json(path)
    version = table.get("schema_version")
    if version not in SCHEMA_VERSIONS:
        raise ConfigError(f"{path}: schema_version = {version!r}: this trainer reads 1 and 2")
    for field in ("point", "data_prefix"):
        if not table.get(field):
            raise ConfigError(f"{path}: field '{field}' is missing")
    study = study_from(table["study"], str(path)) if table.get("study") else default_study()
    if not isinstance(table["point"], dict):
        raise ConfigError(f"{path}: field 'point' is not a table of fields")
    point = study.point_type.read(table["point"], f"{path}: point")
    run_dir = path.resolve().parent
    ds_config = read_given_json(run_dir / "ds_config.json")
    if ds_config or point.zero_stage:  # else the run goes without DeepSpeed
        _require_agreement(run_dir / "ds_config.json", ds_config, point)
    metrics_path = run_dir / str(table.get("metrics", "metrics.jsonl"))
    if metrics_path.exists():
        raise ConfigError(
            f"{metrics_path}: already there; a run is never overwritten, start it in a new folder"
        )
    return RunFile(
        run_dir=run_dir,
        point=point,
        ds_config=ds_config,
        data_prefix=require_data(Path(table["data_prefix"])),
        metrics_path=metrics_path,
        data_facts=_contents((table.get("provenance") or {}).get("data")),
        checkpoint=None if continue_from is None else find_checkpoint(continue_from),
    )


def with_tuned_config(run: RunFile, config: str) -> RunFile:
    """The run under another config, as DeepSpeed's autotuner starts its experiments.

    The batches and the stage are the config's. An experiment writes its metrics beside the figure
    that the autotuner waits for, and not into the run's folder.

    Args:
        run: As its folder says it.
        config: A path, or JSON in base64, which is what the autotuner hands over.

    Raises:
        ConfigError: it is neither, or lacks a batch.
    """
    path = Path(config)
    if config.endswith(".json"):
        table = read_given_json(path)
    else:
        try:
            table = json.loads(base64.urlsafe_b64decode(config))
            path = Path("--deepspeed_config")
        except ValueError:
            raise ConfigError(
                f"--deepspeed_config {config}: no .json, nor JSON in base64"
            ) from None
    point, micro = run.point, table.get("train_micro_batch_size_per_gpu")
    count = table.get("gradient_accumulation_steps") or point.accumulation
    if not isinstance(micro, int) or not isinstance(count, int):
        raise ConfigError(f"{path}: train_micro_batch_size_per_gpu = {micro!r}: no whole number")
    zero, tuning = table.get("zero_optimization") or {}, table.get("autotuning") or {}
    offload = (zero.get("offload_optimizer") or {}).get("device") or "none"
    changed = {
        "micro_batch_size": micro,
        "global_batch_size": micro * count * point.dp,
        "zero_stage": zero.get("stage", 0),
        "offload_optimizer": offload,
    }
    waits_for = tuning.get("metric_path") or tuning.get("model_info_path")
    metrics = Path(waits_for).with_name("metrics.jsonl") if waits_for else run.metrics_path
    metrics.parent.mkdir(parents=True, exist_ok=True)
    return replace(
        run, point=point.model_copy(update=changed), ds_config=table, metrics_path=metrics
    )


def _contents(data: Any) -> Any:  # noqa: ANN401 - what a file says
    """Of what ``run.json`` says of the data, that which moved data keep: sizes and checksums."""
    return {end: data.get(end) for end in (".bin", ".idx")} if isinstance(data, dict) else None


def _require_agreement(path: Path, ds_config: dict[str, Any], point: Point) -> None:
    """Stage and batch sizes stand in both files; a difference would silently change the run."""
    zero = ds_config.get("zero_optimization")
    found = {
        **ds_config,
        "zero_optimization.stage": zero.get("stage") if isinstance(zero, dict) else None,
    }
    expected = {
        "zero_optimization.stage": point.zero_stage,
        "train_batch_size": point.global_batch_size,
        "train_micro_batch_size_per_gpu": point.micro_batch_size,
    }
    for field, value in expected.items():
        if found.get(field) != value:
            raise ConfigError(
                f"{path}: {field} = {found.get(field)!r}: run.json's point says {value}"
            )
