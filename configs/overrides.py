"""Fields given on the command line, laid over a point's table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.errors import ConfigError
from configs.schema import Model
from configs.study import Study, default_study

MODEL_PREFIX = "model."
"""``model.hidden`` changes one field of the model that the point names."""
MODEL_FIELDS = {MODEL_PREFIX + name: field for name, field in Model.model_fields.items()}
"""Fields of a model as a point's overrides name them."""

_BATCH = ("accumulation", "global_batch_size")
"""Two ways to say the same; one that is laid over replaces the other."""


def apply_overrides(
    table: Mapping[str, Any], overrides: Mapping[str, Any], study: Study | None = None
) -> dict[str, Any]:
    """Return a copy of a point's table with ``overrides`` laid over it.

    An engine that is given replaces the table's as a whole, with the fields that it alone takes; a
    field that the new engine takes as well stays unless it is given anew.

    Args:
        table: fields of a point, as read from TOML.
        overrides: field (``iterations``) or field of the model (``model.hidden``) to value; values
            may be text.
        study: whose fields they are; the default one without it.

    Raises:
        ConfigError: a model's field is changed where the table names no known model.
    """
    study, result = study or default_study(), dict(table)
    if "engine" in overrides:
        engine = study.engine_of(overrides)
        for field, row in study.fields.items():
            if row.only_some_engines and not (engine and field in engine.fields):
                result.pop(field, None)
    for one, other in (_BATCH, _BATCH[::-1]):
        if one in overrides:
            result.pop(other, None)
    result |= {key: v for key, v in overrides.items() if not key.startswith(MODEL_PREFIX)}
    of_model = {
        key.removeprefix(MODEL_PREFIX): value
        for key, value in overrides.items()
        if key.startswith(MODEL_PREFIX)
    }
    if not of_model:
        return result
    model = result.get("model")
    if isinstance(model, Mapping):
        return {**result, "model": {**model, **of_model}}
    if model is None:
        name = f"{MODEL_PREFIX}{next(iter(of_model))}"
        raise ConfigError(f"{name}: the point names no model to change")
    loaded, defaults = study.load_model(str(model))
    if "accumulation" in result:
        defaults.pop("global_batch_size", None)
    return {**defaults, **result, "model": {**loaded.model_dump(), **of_model}}
