"""Asks the installed DeepSpeed itself whether it takes a configuration.

DeepSpeed takes seconds to import and writes into the log while it does, so it is asked in a process
of its own, :mod:`~ds_config.installed`.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_config.explain import Note

TIMEOUT_S = 120
_PROGRAM = Path(__file__).with_name("installed.py")


class NoAnswerError(RuntimeError):
    """DeepSpeed could not be asked; the message says why."""


def installed() -> str:
    """Return the release of DeepSpeed that is installed; empty without one."""
    try:
        return importlib.metadata.version("deepspeed").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""


def answers(table: Mapping[str, Any]) -> list[Note]:
    """Return what the installed DeepSpeed refuses of a configuration, a note each.

    Raises:
        NoAnswerError: it cannot be imported, or did not answer in two minutes.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", str(_PROGRAM)],
            input=json.dumps([without_auto(table), table]),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        return [Note(*words) for words in json.loads(done.stdout.splitlines()[-1])]
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"no answer within {TIMEOUT_S} s") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise NoAnswerError(f"cannot be imported: {last}") from None
    except (IndexError, ValueError):
        raise NoAnswerError("no answer that can be read") from None


def without_auto(table: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as Hugging Face's integration hands it on, with some value for each ``auto``.

    Batch sizes become 1, everything else is left to its default. The loader is asked without
    ranks, and so without ``train_batch_size`` where that follows from the micro-batch.
    """
    result = copy.deepcopy(dict(table))
    _drop_auto(result)
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu")
    if sizes[1] in result:
        result.pop(sizes[0], None)
    if not any(name in result for name in sizes) and any(name in table for name in sizes):
        result["train_micro_batch_size_per_gpu"] = 1
    return result


def _drop_auto(table: dict[str, Any]) -> None:
    for name, value in list(table.items()):
        if isinstance(value, dict):
            _drop_auto(value)
        elif value == "auto":
            del table[name]
