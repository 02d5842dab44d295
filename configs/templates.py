"""Tables of a study in which ``"{field}"`` stands for a field's value."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any


def filled(template: object, values: Mapping[str, Any]) -> Any:
    """Return a template with its fields put in.

    ``"{stride}"`` alone becomes the value with its type; within a longer text it becomes text.
    """
    if isinstance(template, Mapping):
        return {key: filled(value, values) for key, value in template.items()}
    if isinstance(template, list | tuple):
        return [filled(value, values) for value in template]
    if not isinstance(template, str):
        return template
    name = bound_field(template)
    if name is not None and name in values:
        return values[name]
    return template.format_map(values) if "{" in template else template


def laid_over(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two tables, table by table; what ``over`` says stands."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[key] = laid_over(old, value)
        else:
            merged[key] = value
    return merged


def fields_in(template: object) -> set[str]:
    """Return the fields that a template names.

    Raises:
        ValueError: its braces do not fit together.
    """
    if isinstance(template, Mapping):
        template = list(template.values())
    if isinstance(template, list | tuple):
        return {name for part in template for name in fields_in(part)}
    if not isinstance(template, str):
        return set()
    try:
        return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise ValueError(f"{template!r}: {error}") from None


def bound_field(value: object) -> str | None:
    """Return the field of a template that is one field alone; None for anything else."""
    if isinstance(value, str) and value.startswith("{") and value.endswith("}"):
        return value[1:-1]
    return None
