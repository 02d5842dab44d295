"""The base of everything that is read from a file: frozen, and no unknown field passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from configs.errors import ConfigError, explain

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._+-]*$"
"""Pattern of names that become names of files."""


class Table(BaseModel):
    """A table of a TOML or JSON file, checked."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )

    @classmethod
    def read(cls, table: Mapping[str, Any], source: str) -> Self:
        """Check a table.

        Raises:
            ConfigError: a field is wrong; names source, field, value and remedy.
        """
        try:
            return cls.model_validate(table)
        except ValidationError as error:
            raise ConfigError(f"{source}: {'; '.join(_lines(error, cls))}") from None


def _lines(error: ValidationError, model: type[BaseModel]) -> Iterator[str]:
    """Yield a line for each wrong field; an unknown one gets its nearest neighbour."""
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden" and "." not in where:
            yield explain.unknown("field", where, model.model_fields)
        elif not where:
            yield message
        elif item["type"] == "missing":
            yield f"field '{where}' is missing"
        elif isinstance(item["input"], dict):  # too long to show
            yield f"field '{where}': {message}"
        else:
            yield f"field '{where}' = {item['input']!r}: {message}"
