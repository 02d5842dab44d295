"""The base of everything that is read from a file: frozen, and no unknown field passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from configs.errors import ConfigError, explain


class Table(BaseModel):
    """A table of a TOML or JSON file, checked."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    @classmethod
    def read(cls, table: Mapping[str, Any], source: str, context: object = None) -> Self:
        """Check a table; the context is for the validators.

        Raises:
            ConfigError: a field is wrong; names source, field, value and remedy.
        """
        try:
            return cls.model_validate(table, context=context)
        except ValidationError as error:
            raise ConfigError(explain.validation(error, source, cls)) from None
