"""The harness's own trainers: GPT under DeepSpeed, GPT in a pipeline, and Lightning's program."""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from configs.errors import ConfigError
from configs.files import read_given_json
from configs.schema import Point
from configs.templates import laid_over
from deep_optimizer_states.config import BLOCK as PLUGIN_BLOCK
from deep_optimizer_states.predict.workload import Workload, WorkloadError
from launch import loggers
from launch.backends.protocol import Trainer
from launch.ds_json import deepspeed_config
from launch.ds_keys import WITHOUT_DEEPSPEED, check_json
from launch.launchers import TRAINER_MODULE, Program
from launch.train_loop.checkpoint import Checkpoint, find_checkpoint
from launch.train_loop.runfile import COMPRESSION

PIPELINE_MODULE = "launch.pretrain_pipeline"
LIGHTNING_MODULE = "launch.frameworks.imdb.program"
_KEPT_IN_A_PIPELINE = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "zero_optimization",
    COMPRESSION,
)
"""What of a run's ``ds_config.json`` means something without DeepSpeed."""
LIGHTNINGS_OWN = ("optimizer", "gradient_accumulation_steps", "gradient_clipping")
"""What Lightning itself puts into DeepSpeed's config, and refuses to find there."""
_REVIEWS = ("synthetic-reviews", "imdb-reviews")
_AUTO = "auto"
_SAID_BY_FIELDS = {
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "accumulation",
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer.device": "offload_optimizer",
    "zero_optimization.offload_param.device": "offload_param",
    "fp16.enabled": "dtype",
    "bf16.enabled": "dtype",
    "optimizer.params.lr": "lr",
    "gradient_clipping": "clip_grad",
}
"""Keys that a point's fields decide: what tables and pairs go by must be what runs."""


@dataclass(frozen=True)
class OwnTrainer(Trainer):
    """megatron-core's GPT under DeepSpeed, by :mod:`launch.pretrain_gpt`."""

    name: ClassVar[str] = "megatron-core"
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "--continue-from": {
            "type": Path,
            "metavar": "RUN_FOLDER",
            "help": "begin a new run at the last checkpoint of this one (or at a checkpoint's "
            "folder)",
        },
        "--deepspeed-config": {
            "type": Path,
            "metavar": "FILE",
            "help": "DeepSpeed's JSON, laid over what the harness makes of every run; what a field "
            "of the point says must agree with it, and 'auto' leaves it to the field",
        },
        "--log-to": loggers.OPTION,
        "--trainer-module": {"help": argparse.SUPPRESS},
    }

    module: str = TRAINER_MODULE
    """What the ranks run; tests put another in its place."""
    checkpoint: Checkpoint | None = None
    """Where runs begin; None for initial weights."""
    user_json: Path | None = None
    """DeepSpeed's JSON of the user's own; None without one."""
    log_to: str = ""
    """Loggers, with commas between them."""

    @classmethod
    def of(cls, given: Namespace) -> Self:
        checkpoint = None if given.continue_from is None else find_checkpoint(given.continue_from)
        if given.deepspeed_config is not None:
            read_user_json(given.deepspeed_config)
        module = given.trainer_module or cls.module
        return cls(module, checkpoint, given.deepspeed_config, given.log_to or "")

    @property
    def versions(self) -> dict[str, str]:
        # A run that begins at a checkpoint lacks the first iterations.
        return {} if self.checkpoint is None else {"continued-from": str(self.checkpoint.path)}

    def refuse(self, point: Point) -> list[str]:
        reasons = super().refuse(point)
        if self.checkpoint:
            reasons += self.checkpoint.differences(point)
        try:
            self.ds_config(point)
        except ConfigError as error:
            reasons.append(str(error))
        return reasons

    def ds_config(self, point: Point) -> dict[str, Any]:
        config = super().ds_config(point)
        if self.user_json is None:
            return config
        return with_user_json(config, read_user_json(self.user_json), point, self.user_json)

    def program(self, point: Point, folder: Path, data_prefix: str) -> Program:
        more = () if self.checkpoint is None else ("--continue-from", str(self.checkpoint.path))
        words = (*more, *loggers.program_words(self.log_to))
        return Program(self.module, (str(folder / "run.json"), *words))


@dataclass(frozen=True)
class PipelineTrainer(OwnTrainer):
    """megatron-core's GPT over stages, shards and replicas, whose communication may be compressed.

    There is no DeepSpeed: optimizer state is on the device of the rank, whole.
    """

    name: ClassVar[str] = "megatron-pipeline"
    module: str = PIPELINE_MODULE

    def refuse(self, point: Point) -> list[str]:
        trainer = f"--trainer {self.name}"
        needed = {"zero_stage": 0, "offload_optimizer": "none", "offload_param": "none"}
        reasons = [
            f"{name} = {getattr(point, name)!r}: {trainer} runs without DeepSpeed; "
            f"give {name} = {value!r}"
            for name, value in needed.items()
            if getattr(point, name) != value
        ]
        if self.user_json is not None:
            reasons.append(
                f"--deepspeed-config {self.user_json}: {trainer} runs without DeepSpeed; leave it "
                "out"
            )
        if self.log_to:
            reasons.append(
                f"--log-to {self.log_to}: {trainer} runs without DeepSpeed, whose monitor would "
                "write it; leave it out"
            )
        if point.dtype == "fp16":
            reasons.append(f"dtype = 'fp16': {trainer} has no loss scale; give 'bf16' or 'fp32'")
        if point.dtype == "bf16" and point.grad_accum_dtype == "fp32":
            reasons.append(
                f"grad_accum_dtype = 'fp32': {trainer} sums a bf16 model's gradients "
                "in bf16; give grad_accum_dtype = 'bf16', or dtype = 'fp32'"
            )
        if point.model.layers < point.pp:
            reasons.append(
                f"pp = {point.pp}: a stage needs a layer, and the model has {point.model.layers}; "
                "give a smaller pp"
            )
        if self.checkpoint is None:
            return reasons
        # Queries and errors of the compression belong to the engine that made them.
        saved = self.checkpoint.point.get("engine")
        if saved != point.engine:
            reasons.append(
                f"engine = {point.engine!r}: the checkpoint {self.checkpoint.path} was saved with "
                f"{saved!r}; give that, or begin without a checkpoint"
            )
        return [*reasons, *self.checkpoint.differences(point)]

    def ds_config(self, point: Point) -> dict[str, Any]:
        config = deepspeed_config(point)
        return {key: config[key] for key in _KEPT_IN_A_PIPELINE if key in config}

    def workload(self, point: Point) -> Workload:
        raise WorkloadError(f"--trainer {self.name}: its memory is not predicted")


def _prepared(name: str, makes: bool) -> str | None:
    # Tokenizing needs packages that no other trainer loads.
    from launch.frameworks.imdb.reviews import prefix_if_made, prepared

    return prepared(name) if makes else prefix_if_made(name)


@dataclass(frozen=True)
class LightningTrainer(Trainer):
    """The program of film reviews, by :mod:`launch.frameworks.imdb.program`.

    Each of Lightning's strategies is an engine of a study.
    """

    name: ClassVar[str] = "lightning"
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {"--log-to": loggers.OPTION}
    own_data: ClassVar[Mapping[str, Callable[[str, bool], str | None]]] = dict.fromkeys(
        _REVIEWS, _prepared
    )
    log_to: str = ""
    """Loggers, with commas between them."""

    @classmethod
    def of(cls, given: Namespace) -> Self:
        return cls(given.log_to or "")

    def refuse(self, point: Point) -> list[str]:
        reasons = super().refuse(point)
        if point.tp > 1:
            reasons.append(f"tp = {point.tp}: --trainer {self.name} splits no layer; give tp = 1")
        if point.data_prefix not in _REVIEWS:
            reasons.append(
                f"data_prefix = {point.data_prefix!r}: --trainer {self.name} reads reviews; give "
                f"{' or '.join(map(repr, _REVIEWS))}"
            )
        missing = [name for name in ("dropout", "loader_workers") if name not in point.values]
        if missing:
            reasons.append(
                f"the study has no field {missing[0]!r}, which --trainer {self.name} needs"
            )
        return reasons

    def ds_config(self, point: Point) -> dict[str, Any]:
        config = deepspeed_config(point)
        if config.pop(WITHOUT_DEEPSPEED, False):
            return {}
        return {key: value for key, value in config.items() if key not in LIGHTNINGS_OWN}

    def workload(self, point: Point) -> Workload:
        raise WorkloadError(f"--trainer {self.name}: its memory is not predicted")

    def program(self, point: Point, folder: Path, data_prefix: str) -> Program:
        words = loggers.program_words(self.log_to)
        return Program(LIGHTNING_MODULE, (str(folder / "run.json"), *words))


def read_user_json(path: Path) -> dict[str, Any]:
    """Read and check the file; values that are ``auto`` are left out, so that the point's stand.

    Raises:
        ConfigError: it cannot be read, is no JSON object, chooses what the study's engines
            choose, or has a key that no release of DeepSpeed reads.
    """
    table = read_given_json(path)
    if PLUGIN_BLOCK in table:
        raise ConfigError(f"{path}: {PLUGIN_BLOCK}: choose an engine of the study instead")
    check_json(table, str(path))
    return _without_auto(table)


def with_user_json(
    config: Mapping[str, Any], table: Mapping[str, Any], point: Point, path: Path
) -> dict[str, Any]:
    """Return DeepSpeed's config of a point with the user's JSON laid over it.

    Raises:
        ConfigError: the file contradicts the point; names key, value and remedy.
    """
    made = laid_over(config, table)
    said = {**config, "gradient_accumulation_steps": point.accumulation}
    before, after = dict(_leaves(said)), dict(_leaves(laid_over(said, table)))
    for key, field in _SAID_BY_FIELDS.items():
        # A block that is not there is one that is off.
        was, now = (side.get(key) or "none" for side in (before, after))
        if was != now:
            raise ConfigError(
                f"{path}: {key} = {json.dumps(after.get(key))}: the run has {field} = "
                f"{point.value(field)!r}; leave the key out, or give the field or another engine"
            )
    return made


def _leaves(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{before}{key}.")
        else:
            values = value if isinstance(value, list) and value else [value]
            yield from ((f"{before}{key}", one) for one in values)


def _without_auto(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in table.items()
        if value != _AUTO
    }
