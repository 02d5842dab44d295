"""Fields given on the command line, laid over a point's table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.errors import ConfigError
from configs.schema import PAPER_KEYS, Engine, engine_by_any_name, load_model

MODEL_PREFIX = "model."
"""``model.hidden`` changes one field of the model that the point names."""

_BATCH = ("accumulation", "global_batch_size")
"""Two ways to say the same; one that is laid over replaces the other."""


def apply_overrides(table: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``table`` with ``overrides`` laid over it.

    An engine mode given in either spelling replaces the table's mode as a whole, so that
    ``--engine vanilla`` works on a hybrid point; a hybrid point keeps its stride unless a new one
    is given.

    Args:
        table: fields of a point, as read from TOML.
        overrides: field (``stride``), paper's key (``part_grads_async``) or field of the model
            (``model.hidden``) to value; values may be text.

    Raises:
        ConfigError: a model's field is changed where the table names no known model.
    """
    result = dict(table)
    by_name = "engine" in overrides
    by_paper_keys = any(key in overrides for key in PAPER_KEYS)
    if by_name or by_paper_keys:
        stays_hybrid = by_name and engine_by_any_name(overrides["engine"]) == Engine.HYBRID
        replaced = [*PAPER_KEYS, "engine", *([] if stays_hybrid else ["stride"])]
        gap = result.get("prefetch_optimizer_gap")
        for key in replaced:
            result.pop(key, None)
        if stays_hybrid and gap:
            result.setdefault("stride", gap)
    for one, other in (_BATCH, _BATCH[::-1]):
        if one in overrides:
            result.pop(other, None)
    of_model = {
        key.removeprefix(MODEL_PREFIX): value
        for key, value in overrides.items()
        if key.startswith(MODEL_PREFIX)
    }
    result.update({k: v for k, v in overrides.items() if not k.startswith(MODEL_PREFIX)})
    return _with_model_fields(result, of_model) if of_model else result


def _with_model_fields(table: dict[str, Any], of_model: Mapping[str, Any]) -> dict[str, Any]:
    model = table.get("model")
    if isinstance(model, Mapping):
        return {**table, "model": {**model, **of_model}}
    if model is None:
        raise ConfigError(
            f"{MODEL_PREFIX}{next(iter(of_model))}: the point names no model to change"
        )
    loaded, defaults = load_model(str(model))
    of_defaults = defaults.model_dump()
    if "accumulation" in table:
        del of_defaults["global_batch_size"]
    return {**of_defaults, **table, "model": {**loaded.model_dump(), **of_model}}
