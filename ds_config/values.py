"""Whether a value is one that DeepSpeed takes, as its models check it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from ds_config.expressions import Key, KeyFact

_TYPES: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str, "Path": str}


def wrong_values(
    values: Mapping[Key, Any], known: Mapping[Key, KeyFact]
) -> Iterator[tuple[str, str, str]]:
    """Values that a release refuses: key, what is wrong, remedy.

    Args:
        values: Every key of the configuration with its value.
        known: Keys of the release.
    """
    for key, value in values.items():
        fact = known.get(key)
        if fact is None or fact.removed or value == "auto":
            continue
        is_block = any(inner[: len(key)] == key and inner != key for inner in known)
        if is_block:
            if not isinstance(value, Mapping) and not _may_be_plain(key, value, fact):
                yield ".".join(key), f"= {value!r} is no block", "give an object: {...}"
        elif kind := _expected(fact):
            try:
                TypeAdapter(kind).validate_python(value)
            except ValidationError as error:
                message = error.errors()[0]["msg"].removeprefix("Input should be ")
                yield ".".join(key), f"= {value!r}", f"give {message}"


def _may_be_plain(key: Key, value: Any, fact: KeyFact) -> bool:  # noqa: ANN401
    if value is None:
        return not fact.is_model or fact.type.startswith("Optional")
    return key == ("zero_optimization",) and isinstance(value, bool)


def _expected(fact: KeyFact) -> Any:  # noqa: ANN401
    """The type of a field of a model, or of a plain key whose default shows that it is a switch."""
    if not fact.is_model:
        return bool if isinstance(fact.default, bool) else None
    if fact.choices:
        # An enumeration of numbers takes a number; pydantic would take `true` for 1.
        return Literal[tuple(fact.choices)]
    name = fact.type.removeprefix("Optional[")
    kind = _TYPES.get(name.rstrip("]"))
    if kind is None:
        return None
    limited = Annotated[kind, Field(**fact.limits)] if fact.limits else kind  # type: ignore[call-overload]
    return limited | None if fact.type.startswith("Optional") else limited
