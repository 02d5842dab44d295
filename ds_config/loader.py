"""Asks the installed DeepSpeed itself whether it takes a configuration.

DeepSpeed takes seconds to import and writes into the log while it does, so it is asked in a process
of its own.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

TIMEOUT_S = 120
_PROGRAM = """
import json, logging, sys
table = json.load(sys.stdin)
import deepspeed
logging.disable(logging.CRITICAL)
from deepspeed.runtime.config import DeepSpeedConfig
try:
    DeepSpeedConfig(table)
except BaseException as error:
    said = str(error)
    if hasattr(error, "errors"):
        said = "; ".join(".".join(map(str, e["loc"])) + ": " + e["msg"] for e in error.errors())
    print(json.dumps(said or type(error).__name__))
else:
    print(json.dumps(""))
"""


class NoAnswerError(RuntimeError):
    """DeepSpeed could not be asked; the message says why."""


def refusal(table: Mapping[str, Any]) -> str:
    """Why the installed DeepSpeed refuses a configuration; empty if it takes it.

    Raises:
        NoAnswerError: it cannot be imported, or did not answer in two minutes.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _PROGRAM],
            input=json.dumps(without_auto(table)),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        answer: str = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"no answer within {TIMEOUT_S} s") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise NoAnswerError(f"cannot be imported: {last}") from None
    except (IndexError, ValueError):
        raise NoAnswerError("no answer that can be read") from None
    return answer


def without_auto(table: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as Hugging Face's integration hands it on, with some value for each ``auto``.

    Batch sizes become 1, everything else is left to its default.
    """
    result = copy.deepcopy(dict(table))
    _drop_auto(result)
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu")
    if not any(name in result for name in sizes) and any(name in table for name in sizes):
        result["train_micro_batch_size_per_gpu"] = 1
    return result


def _drop_auto(table: dict[str, Any]) -> None:
    for name, value in list(table.items()):
        if isinstance(value, dict):
            _drop_auto(value)
        elif value == "auto":
            del table[name]
