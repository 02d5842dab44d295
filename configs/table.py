"""The base of everything that is read from a file: frozen, and no unknown field passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from configs.errors import ConfigError
from deep_optimizer_states.toml_io import Words, explain

_WORDS = Words(kind="field", field="field '{}'")
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._+-]*$"
"""Pattern of names that become names of files."""


class Table(BaseModel):
    """A table of a TOML or JSON file, checked."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def read(cls, table: Mapping[str, Any], source: str) -> Self:
        """Check a table.

        Raises:
            ConfigError: a field is wrong; names source, field, value and remedy.
        """
        try:
            return cls.model_validate(table)
        except ValidationError as error:
            raise ConfigError(f"{source}: {explain(error, cls.model_fields, _WORDS)}") from None
