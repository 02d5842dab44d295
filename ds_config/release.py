"""The keys of the installed DeepSpeed, and what it refuses of a configuration.

DeepSpeed takes seconds to import and writes into the log while it does, so it is asked in a process
of its own, :mod:`~ds_config.installed`.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from ds_config.installed import Key
from ds_config.lenient import Placeholder

TIMEOUT_S = 300
PROGRAM = Path(__file__).with_name("installed.py")


class NoAnswerError(ConfigError):
    """DeepSpeed could not be asked; the message says why."""


@dataclass(frozen=True)
class KeyFact:
    """A key as the release knows it."""

    default: Any = None
    """None for a block, and where the release names no default."""
    deprecated: bool = False
    replaced_by: str = ""
    """Key of the same block that took its place, if the release names one."""
    is_model: bool = False
    """A field of a pydantic model, whose siblings are known in full: any other raises an error."""
    removed: bool = False
    """The release knows the key only to refuse it."""
    kind: str = ""
    """``boolean``, ``integer`` or ``number``, where it takes nothing else."""


@dataclass(frozen=True)
class Mend:
    """How a copy can be mended."""

    kind: str
    """``move`` or ``drop`` the key, or write its value as another one: ``replace``."""
    at: Key
    to: Key = ()
    """With ``move``: the key's new place and name."""
    value: Any = None
    """With ``replace``."""


@dataclass(frozen=True)
class Note:
    """Something to be said of a key."""

    key: str
    """With its blocks: ``zero_optimization.stage``."""
    text: str
    remedy: str = ""
    mend: Mend | None = None

    @property
    def sentence(self) -> str:
        """All that is said of the key."""
        return f"{self.key}: {self.text}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass(frozen=True)
class Answer:
    """The answer of the installed DeepSpeed: its keys, and its refusals of one configuration."""

    version: str
    keys: dict[Key, KeyFact]
    refusals: list[Note]
    auto: dict[Key, tuple[str, str]] = field(default_factory=dict)
    """What its loader makes of each ``auto`` by itself (:func:`ds_config.installed.of_auto`)."""


def ask(table: Mapping[str, Any]) -> Answer:
    """Ask the installed DeepSpeed for its keys, and for what it refuses of a configuration.

    Raises:
        NoAnswerError: It is not installed, cannot be imported, or did not answer in five minutes.
    """
    try:
        version = importlib.metadata.version("deepspeed").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        raise NoAnswerError(
            "DeepSpeed is not installed here, and its keys are those of the installed release: "
            "pip install deepspeed"
        ) from None
    command = [sys.executable, "-P", "-W", "ignore", str(PROGRAM)]
    given = without(table, lambda _, value: isinstance(value, Placeholder))
    question = json.dumps([without_auto(table), given])
    try:
        done = subprocess.run(
            command, input=question, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
        return read_answer(version, json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        reason = f"no answer within {TIMEOUT_S} s"
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        reason = f"it cannot be imported: {last}"
    except (IndexError, ValueError):
        reason = "no answer that can be read"
    raise NoAnswerError(f"DeepSpeed {version} could not be asked: {reason}")


def read_answer(version: str, found: Mapping[str, Any]) -> Answer:
    """Return what :func:`ds_config.installed.answer` says, as objects."""
    keys = {tuple(name.split(".")): KeyFact(**fact) for name, fact in found["keys"].items()}
    auto = {tuple(name.split(".")): tuple(outcome) for name, outcome in found["auto"].items()}
    return Answer(version, keys, [Note(*words) for words in found["refusals"]], auto)


def without_auto(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as Hugging Face's integration hands it on.

    Batch sizes that are ``auto`` become 1, and any other such value is left to its default. The
    loader is asked without ranks, and so without ``train_batch_size`` where that follows from the
    micro-batch.
    """
    result = without(table, lambda _, value: value == "auto" or isinstance(value, Placeholder))
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu")
    if sizes[1] in result:
        result.pop(sizes[0], None)
    if not any(name in result for name in sizes) and any(name in table for name in sizes):
        result["train_micro_batch_size_per_gpu"] = 1
    return result


def without(
    table: Mapping[str, Any], is_left_out: Callable[[str, Any], bool], at: str = ""
) -> dict[str, Any]:
    """Return a configuration without some of its values.

    Args:
        table: The configuration, which stays as it is.
        is_left_out: Takes a key with its blocks, as ``fp16.enabled``, and its value.
        at: Blocks around the table, with a dot behind them.
    """
    return {
        name: without(value, is_left_out, f"{at}{name}.") if isinstance(value, dict) else value
        for name, value in table.items()
        if isinstance(value, dict) or not is_left_out(f"{at}{name}", value)
    }
