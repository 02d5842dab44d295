"""A DeepSpeed JSON of the user's own, laid over what the harness makes of a point."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.files import read_given_json
from configs.schema import Point
from configs.templates import laid_over
from ds_config.explain import explain
from ds_config.release import Answer, NoAnswerError, ask
from launch.trainers.protocol import PLUGIN_BLOCK

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
_ANSWERS: dict[str, Answer | None] = {}
"""What DeepSpeed said of a file; None where it could not be asked. It is asked once, not for every
point of a sweep: that takes seconds, and points differ in what the harness makes, which is no fault
of the file."""


def read_user_json(path: Path) -> dict[str, Any]:
    """Read and check the file; values that are ``auto`` are left out, so that the point's stand.

    Raises:
        ConfigError: it cannot be read, is no JSON object, or chooses what the study's engines
            choose.
    """
    table = read_given_json(path)
    if PLUGIN_BLOCK in table:
        raise ConfigError(f"{path}: {PLUGIN_BLOCK}: choose an engine of the study instead")
    return _without_auto(table)


def with_user_json(
    config: Mapping[str, Any], table: Mapping[str, Any], point: Point, path: Path
) -> dict[str, Any]:
    """Return DeepSpeed's config of a point with the user's JSON laid over it.

    Raises:
        ConfigError: the file contradicts the point, or itself, or DeepSpeed would refuse it or read
            over a key of it; names key, value and remedy.
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
    answer = _asked(table, made, path)
    if answer is None:
        return made
    # What is wrong without the file, too, is no fault of it.
    without, found = (
        explain(side, one, num_ranks=point.dp)
        for side, one in ((config, replace(answer, refusals=[])), (made, answer))
    )
    known = [*without.unknown, *without.faults]
    notes = [note for note in (*found.unknown, *found.faults) if note not in known]
    if notes:
        texts = [f"{n.key}: {n.text}" + (f"; {n.remedy}" if n.remedy else "") for n in notes]
        raise ConfigError(f"{path}: {'. '.join(texts)}")
    return made


def _asked(table: Mapping[str, Any], made: Mapping[str, Any], path: Path) -> Answer | None:
    text = json.dumps(table, sort_keys=True)
    if text not in _ANSWERS:
        try:
            _ANSWERS[text] = ask(made)
        except NoAnswerError as error:  # the run itself will say what ails DeepSpeed
            sys.stderr.write(f"{path}: its keys are not checked: {error}\n")
            _ANSWERS[text] = None
    return _ANSWERS[text]


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
