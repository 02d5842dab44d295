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
    """A copy of ``table`` with ``overrides`` laid over it.

    An engine given in either spelling replaces the table's as a whole, with the fields that it
    alone takes; a field that the new engine takes as well stays unless it is given anew.

    Args:
        table: fields of a point, as read from TOML.
        overrides: field (``iterations``), key of an engine in the study's other spelling, or field
            of the model (``model.hidden``) to value; values may be text.
        study: whose fields they are; the default one without it.

    Raises:
        ConfigError: a model's field is changed where the table names no known model.
    """
    study = study or default_study()
    result = dict(table)
    keys = [key for key in study.engine_keys if key in overrides]
    if "engine" in overrides or keys:
        name = study.engine_name(overrides.get("engine", ""))
        taken = study.engines[str(name)].fields if name in study.engines else {}
        if any(key in result for key in study.engine_keys):
            result = study.without_engine_keys(result, "point")
        for field, row in study.fields.items():
            if row.only_some_engines and field not in taken:
                result.pop(field, None)
        result.pop("engine", None)
    for one, other in (_BATCH, _BATCH[::-1]):
        if one in overrides:
            result.pop(other, None)
    of_model = {
        key.removeprefix(MODEL_PREFIX): value
        for key, value in overrides.items()
        if key.startswith(MODEL_PREFIX)
    }
    result.update({k: v for k, v in overrides.items() if not k.startswith(MODEL_PREFIX)})
    return _with_model_fields(result, of_model, study) if of_model else result


def _with_model_fields(
    table: dict[str, Any], of_model: Mapping[str, Any], study: Study
) -> dict[str, Any]:
    model = table.get("model")
    if isinstance(model, Mapping):
        return {**table, "model": {**model, **of_model}}
    if model is None:
        raise ConfigError(
            f"{MODEL_PREFIX}{next(iter(of_model))}: the point names no model to change"
        )
    loaded, defaults = study.load_model(str(model))
    if "accumulation" in table:
        defaults = {key: value for key, value in defaults.items() if key != "global_batch_size"}
    return {**defaults, **table, "model": {**loaded.model_dump(), **of_model}}
