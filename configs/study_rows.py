"""The tables of ``study.toml`` as it stands in the file; :mod:`configs.study` resolves it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from packaging.requirements import InvalidRequirement, Requirement
from pydantic import Field, PositiveInt, field_validator, model_validator

from configs.fields import FieldRow
from configs.table import Table

GPU, TWO_RANKS = "gpu", "two-ranks"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._+-]*$"


class Gate(Table):
    """What must hold between an engine and the reference before a ratio is called a speed-up."""

    kind: Literal["bitwise", "close", "quality"] = "bitwise"
    """``bitwise``: losses, gradient norms and final state are equal; ``close``: ``quantity`` never
    differs by more than ``tolerance``; ``quality``: the mean of ``metric`` over ``seeds`` is worse
    by less than ``margin``, with ``confidence``."""
    quantity: Literal["loss", "grad_norm"] = "loss"
    """For ``close``: what is compared, iteration by iteration."""
    tolerance: float | None = Field(default=None, gt=0)
    """For ``close``: largest absolute difference."""
    metric: str = "validation_loss"
    """For ``quality``: the column of ``runs.csv`` that is compared; lower is better."""
    margin: float | None = Field(default=None, gt=0)
    """For ``quality``: how much worse than the reference's mean an engine may be."""
    seeds: PositiveInt = 3
    """For ``quality``: fewest seeds on each side."""
    confidence: float = Field(default=0.95, gt=0, lt=1)
    """For ``quality``: of the interval of the difference."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for kind, field in (("close", "tolerance"), ("quality", "margin")):
            if (self.kind == kind) != (getattr(self, field) is not None):
                raise ValueError(f"{field} goes with kind '{kind}', which needs it")
        return self

    @property
    def words(self) -> str:
        """What the gate asks for, in a sentence of a report."""
        if self.kind == "bitwise":
            return "equal to the reference in every bit"
        if self.kind == "close":
            return f"{self.quantity} within {self.tolerance:g} of the reference's"
        return (
            f"mean {self.metric} over {self.seeds} seeds worse than the reference's by less than "
            f"{self.margin:g} ({self.confidence:.0%} interval)"
        )


class Style(Table):
    """How an engine is drawn; colours should stay apart for colour-blind readers."""

    colour: str = ""
    """As matplotlib reads it; empty takes the next of a list."""
    dash: str | tuple[int, tuple[int, ...]] = "solid"
    marker: str = ""
    width: float = 1.8
    marker_size: float = 5.0
    hatch: str = ""


class Phase(Table):
    """A part of an iteration that is timed by itself; ``NAME_ms`` in metrics and tables."""

    title: str
    colour: str
    hatch: str = ""


class FieldLimits(Table):
    """What an engine asks of one of its fields."""

    default: Any = None
    """Its value where none is given; None: the field's own default."""
    minimum: float | None = None
    below: float | None = None


class Engine(Table):
    """One way to run a point: a change of DeepSpeed's config and what comes with it."""

    title: str
    """In legends."""
    tag: str = Field(max_length=4)
    """Shortest name, for below a bar."""
    description: str = ""
    """In a sentence, for ``--list`` and the study's reader."""
    aliases: tuple[str, ...] = ()
    """Other names that are understood."""
    style: Style = Style()
    trainer: str = ""
    """The only trainer that can run it; empty for any."""
    fields: dict[str, FieldLimits] = Field(default_factory=dict)
    """Fields of ``only_some_engines`` that it takes, and limits that it sets to others."""
    sets: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Fields of every point that the engine fixes; none of them can be given beside it. A field
    that one engine of a study fixes has its default under those that do not name it."""
    ds_config: dict[str, Any] = Field(default_factory=dict)
    """Laid over DeepSpeed's config; ``"{field}"`` stands for a field's value."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables of its ranks."""
    exact: bool = True
    """Whether its results are expected to be the reference's, bit for bit."""
    equals: str = ""
    """Another engine whose results it must have, bit for bit, beside what the gate asks for."""
    ends_update: bool | str = True
    """Whether the update is over when ``step()`` returns, so that the phases have their own times;
    or the name of a field that makes it not so when it is set."""
    needs: tuple[str, ...] = ()
    """``gpu``, ``two-ranks``, or a requirement such as ``deepspeed>=0.19.4``."""
    zero_init: bool = True
    """Whether the model may be partitioned while it is made."""
    keys: dict[str, Any] = Field(default_factory=dict)
    """Values of the study's ``engine_keys`` that mean this engine. ``"{field}"`` binds a field. A
    key that the engine or the point leaves out may have any value; the first engine fits then."""
    log: str = ""
    """How it reads in a log's name; empty: ``engine_NAME``."""

    @field_validator("needs")
    @classmethod
    def _needs_can_be_checked(cls, needs: tuple[str, ...]) -> tuple[str, ...]:
        for need in needs:
            try:
                if need not in (GPU, TWO_RANKS):
                    Requirement(need)
            except InvalidRequirement:
                raise ValueError(
                    f"{need!r}: give {GPU}, {TWO_RANKS} or a requirement as 'deepspeed>=0.19.4'"
                ) from None
        return needs


class Figure(Table):
    """A figure: one of the kinds of ``plots``, with what it shows."""

    kind: str
    """See ``plots.registry``."""
    title: str
    """What it shows, in a sentence."""
    x: str = ""
    """The field along the axis."""
    y: tuple[str, ...] = ()
    """Columns of ``runs.csv``."""
    complement: bool = False
    """Show one minus the field."""
    label: str = ""
    """Of the axis, where it is not the field's."""


class Companion(Table):
    """A process beside the ranks, one for every device that they use."""

    field: str
    """It is started when this field is not 0."""
    name: str
    module: str
    arguments: tuple[str, ...]
    """``{FIELD}``, ``{device}`` and ``{out}`` (its report, which it writes when it is ready)."""
    device_share: str = ""
    """Share of the device's time that it takes, for predictions: ``{FIELD}``."""


class Published(Table):
    """What the values of ``published.csv`` are of."""

    source: str
    conditions: dict[str, Any] = Field(default_factory=dict)
    """Fields of a point, and their values in every published run."""


class StudyFile(Table):
    """What ``study.toml`` says, with what it takes over from the study that it extends."""

    name: str = Field(pattern=NAME_PATTERN, max_length=40)
    """The folder's."""
    title: str
    """Of the text that it reproduces."""
    source: str = ""
    """Where that was published."""
    extends: str = ""
    """A study whose fields, engines, phases, figures, models and points are taken over."""
    is_default: bool = False
    """Whether it is run when none is named."""
    default_sweep: str = "basic"
    small_model: str = "tiny"
    """Model of every sweep's small form."""
    reference: str
    """The engine that the others are held against."""
    gate: Gate = Gate()
    phases: dict[str, Phase] = Field(default_factory=dict)
    """In the order they run."""
    fields: dict[str, FieldRow] = Field(default_factory=dict)
    """What the study varies beside the fields of every point."""
    engine_keys: tuple[str, ...] = ()
    """Keys that name an engine in another spelling; each engine's ``keys`` give their values."""
    engines: dict[Annotated[str, Field(pattern=NAME_PATTERN)], Engine]
    """In the order in which tables and figures show them."""
    figures: dict[str, Figure] = Field(default_factory=dict)
    results: dict[str, str] = Field(default_factory=dict)
    """Numbers that the last line of ``metrics.jsonl`` says of a run, columns of ``runs.csv``, to
    what they mean."""
    companions: dict[str, Companion] = Field(default_factory=dict)
    ds_config: dict[str, Any] = Field(default_factory=dict)
    """Laid over DeepSpeed's config for every engine."""
    published: Published | None = None

    @property
    def set_by_engines(self) -> tuple[str, ...]:
        """Fields of every point that the engines fix, so that the engine's name says them."""
        return tuple(dict.fromkeys(name for row in self.engines.values() for name in row.sets))

    def as_table(self) -> dict[str, Any]:
        """The study as it travels with its runs."""
        return self.model_dump(mode="json")

    def as_json(self) -> str:
        """:meth:`as_table` as text."""
        return json.dumps(self.as_table())
