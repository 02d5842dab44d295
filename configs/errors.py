"""Errors a user can mend, and the words for them: field, value, why, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


class ConfigError(ValueError):
    """A setting is wrong; the message names it, its value and the way out."""


class explain:
    """Builders of messages, read as ``explain.unknown(...)``."""

    @staticmethod
    def unknown(kind: str, name: str, known: Iterable[str]) -> str:
        """``unknown model '7': did you mean '7B'? known: ...``."""
        names = list(known)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.3)
        hint = f"did you mean '{near[0]}'? " if near else ""
        return f"unknown {kind} {name!r}: {hint}known: {', '.join(names)}"

    @staticmethod
    def validation(
        error: ValidationError, source: str, model: type[BaseModel] | None = None
    ) -> str:
        """One line a wrong field; an unknown field gets its nearest neighbour."""
        lines = []
        for item in error.errors():
            where = ".".join(str(part) for part in item["loc"])
            message = item["msg"].removeprefix("Value error, ")
            if not where:
                lines.append(message)
            elif item["type"] == "extra_forbidden" and model is not None and "." not in where:
                lines.append(explain.unknown("field", where, model.model_fields))
            elif item["type"] == "extra_forbidden":
                lines.append(f"unknown field '{where}'")
            elif item["type"] == "missing":
                lines.append(f"field '{where}' is missing")
            elif isinstance(item["input"], dict):
                lines.append(f"field '{where}': {message}")
            else:
                lines.append(f"field '{where}' = {item['input']!r}: {message}")
        return f"{source}: " + "; ".join(lines)
