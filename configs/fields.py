"""Fields of a point as rows: what values they take, and how a value reads in names and figures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from configs.table import Table

_TYPES: dict[str, type] = {"int": int, "float": float, "str": str, "bool": bool}


class FieldRow(Table):
    """A field."""

    type: Literal["int", "float", "str", "bool"] = "int"
    default: bool | int | float | str = 0
    choices: tuple[str, ...] = ()  # of a text, where not every one will do
    description: str = ""  # what it sets, with its unit; shown by --help
    spellings: tuple[str, ...] = ()  # other names of its option
    title: str  # before the value in names, labels and legends: stride for stride 2
    minimum: float | None = None
    maximum: float | None = None
    below: float | None = None
    is_count: bool = False  # A number of elements, which reads 10M
    unit: str = ""  # after the value in names, labels and legends
    zero: str = ""  # what 0 is called where it is no place on an axis, such as no limit at all
    only_some_engines: bool = False
    """Engines that do not list it have it at its default; where set, it belongs to their name."""
    in_pairs: Literal["same", "prefer", "free"] = "same"
    """``same``: a run and its reference must agree in it; ``prefer``: times depend on it, results
    do not; ``free``: it may differ."""
    log: str = ""  # before the value in a log's name
    axis: str = ""  # label of a figure's axis; empty: the title
    log_axis: bool = False  # values double or grow tenfold

    @model_validator(mode="after")
    def _default_has_the_type(self) -> Self:
        kind = type(self.default)
        if kind is not _TYPES[self.type] and (self.type, kind) != ("float", int):
            raise ValueError(f"default {self.default!r} is no {self.type}")
        if self.choices and self.default not in self.choices:
            raise ValueError(f"default {self.default!r} is none of {', '.join(self.choices)}")
        return self

    @property
    def annotation(self) -> Any:
        """The field's type with its limits."""
        if self.choices:
            return Literal[self.choices]
        kind: Any = _TYPES[self.type]
        return Annotated[kind, Field(ge=self.minimum, le=self.maximum, lt=self.below)]

    def text(self, value: object) -> str:
        """Return a value as names show it: ``10M``, ``0.5``, ``bf16``."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return str(value)
        return count(value) if self.is_count else f"{value:g}"

    def words(self, value: object) -> str:
        """Return title and value: ``stride 2``; a switch that is on is its title alone."""
        if self.type == "bool":
            return self.title if value else f"no {self.title}"
        if self.zero and not value:
            return self.zero
        return f"{self.title} {self.text(value)} {self.unit}".strip()

    @property
    def axis_label(self) -> str:
        """Label of a figure's axis."""
        return self.axis or self.title


def shaped_links(rates: Iterable[object]) -> str:
    """Return what figures and reports say of shaped links: ``20, 50 Mbit/s links, shaped``.

    Args:
        rates: ``link_mbit`` of the runs; what is not known counts as a link as it is.

    Returns:
        Empty where no link is shaped.
    """
    known = [rate if isinstance(rate, int | float) and rate > 0 else 0 for rate in rates]
    shaped = sorted({rate for rate in known if rate})
    if not shaped:
        return ""
    text = f"{', '.join(f'{rate:g}' for rate in shaped)} Mbit/s links, shaped"
    return text if all(known) else f"{text}, and links as they are"


def count(number: float) -> str:
    """Return a number of elements with its magnitude: ``10M``, ``1.5B``."""
    for divisor, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= divisor:
            return f"{number / divisor:.4g}{letter}"
    return f"{number:g}"


CORE_FIELDS: dict[str, FieldRow] = {
    "model": FieldRow(type="str", default="", title="", axis="model"),
    "tp": FieldRow(title="TP", default=1, axis="tensor-parallel ranks", log_axis=True),
    "pp": FieldRow(title="PP", default=1, axis="pipeline stages", log_axis=True),
    "dp": FieldRow(title="DP", default=1, axis="data-parallel ranks", log_axis=True),
    "link_mbit": FieldRow(
        title="link",
        unit="Mbit/s",
        zero="links as they are",
        axis="shaped links (Mbit/s)",
    ),
    "micro_batch_size": FieldRow(
        title="micro-batch", default=1, axis="micro-batch (samples)", log_axis=True
    ),
    "accumulation": FieldRow(
        title="accumulation", default=1, axis="micro-batches before an update", log_axis=True
    ),
    "global_batch_size": FieldRow(
        title="global batch", default=1, axis="global batch (samples)", log_axis=True
    ),
    "iterations": FieldRow(title="iterations", default=10, in_pairs="prefer"),
    "seed": FieldRow(title="seed", default=1234),
    "dtype": FieldRow(type="str", title="", default="bf16", axis="type"),
    "zero_stage": FieldRow(title="stage", default=3, axis="ZeRO stage"),
    "data_prefix": FieldRow(type="str", title="data", default="", in_pairs="free"),
}
"""Fields of every point whose names do not read well, in the order in which names list them."""


def field_row(fields: dict[str, FieldRow], name: str) -> FieldRow:
    """Return the row of a field, made from its name where nobody wrote one."""
    return fields.get(name) or FieldRow(
        type="str", default="", title=name.removeprefix("model.").replace("_", " ")
    )
