"""A study as data: a folder with ``study.toml``, models, points, sweeps and published figures.

``study.toml`` declares what the harness itself does not know: the fields that the study varies, the
engines that it compares, the phases of an iteration, the figures, and what must hold before a ratio
of times is called a speed-up; docs/studies.md explains every key. The resolved study travels with
the runs as JSON, so that whoever reads them later needs no folder of ours.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from packaging.requirements import InvalidRequirement, Requirement
from pydantic import (
    AfterValidator,
    Field,
    PositiveInt,
    PrivateAttr,
    create_model,
    model_validator,
)

from configs.errors import ConfigError, explain
from configs.fields import CORE_FIELDS, FieldRow
from configs.files import read_toml
from configs.schema import MODEL_PREFIX, Model, Point
from configs.table import NAME_PATTERN, Table
from configs.templates import fields_in, laid_over

_BATCH = ("accumulation", "global_batch_size")
"""Two ways to say the same; one that is laid over replaces the other."""
STUDIES_DIR = Path(__file__).resolve().parent / "studies"
STUDY_FILE = "study.toml"
GPU, TWO_RANKS = "gpu", "two-ranks"


class Gate(Table):
    """The condition under which a ratio to the reference is called a speed-up.

    ``bitwise``: losses, gradient norms and final state are equal. ``close``: ``quantity`` never
    differs by more than ``tolerance``. ``quality``: the mean of ``metric`` over ``seeds`` is worse
    by less than ``margin``, with ``confidence``.
    """

    kind: Literal["bitwise", "close", "quality"] = "bitwise"
    quantity: Literal["loss", "grad_norm"] = "loss"
    tolerance: float | None = Field(default=None, gt=0)
    metric: str = "validation_loss"  # A column of runs.csv; lower is better
    margin: float | None = Field(default=None, gt=0)
    seeds: PositiveInt = 3  # fewest seeds on each side
    confidence: float = Field(default=0.95, gt=0, lt=1)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for kind, field in (("close", "tolerance"), ("quality", "margin")):
            if (self.kind == kind) != (getattr(self, field) is not None):
                raise ValueError(f"{field} goes with kind '{kind}', which needs it")
        return self

    @property
    def words(self) -> str:
        """The gate's condition, in a sentence of a report."""
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

    colour: str = ""  # as matplotlib reads it; empty takes the next of a list
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
    """Limits of a field under one engine; a ``default`` of None is the field's own."""

    default: Any = None
    minimum: float | None = None
    below: float | None = None


def _need(text: str) -> str:
    try:
        if text not in (GPU, TWO_RANKS):
            Requirement(text)
    except InvalidRequirement:
        raise ValueError(f"give {GPU}, {TWO_RANKS} or a requirement as 'x>=2'") from None
    return text


class Engine(Table):
    """One way to run a point: a change of DeepSpeed's config and what comes with it."""

    title: str  # in legends
    description: str = ""
    aliases: tuple[str, ...] = ()
    style: Style = Style()
    trainer: str = ""  # the only trainer that can run it; empty for any
    fields: dict[str, FieldLimits] = Field(default_factory=dict)
    """Fields of ``only_some_engines`` that it takes, and limits that it sets to others."""
    sets: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Fields of every point that the engine fixes; none of them can be given against it. A field
    that one engine of a study fixes has its default under those that do not name it."""
    ds_config: dict[str, Any] = Field(default_factory=dict)
    """Laid over DeepSpeed's config; ``"{field}"`` stands for a field's value."""
    exact: bool = True  # whether its results are expected to be the reference's, bit for bit
    equals: str = ""
    """Another engine whose results it must have, bit for bit, whatever the gate asks for."""
    ends_update: bool | str = True
    """True where the update is over when ``step()`` returns, so that phases have their own times;
    or the name of a field that makes it not so when it is set."""
    needs: tuple[Annotated[str, AfterValidator(_need)], ...] = ()
    """``gpu``, ``two-ranks``, or a requirement such as ``deepspeed>=0.19.4``."""
    zero_init: bool = True  # whether the model may be partitioned while it is made
    log: str = ""  # how it reads in a log's name; empty: engine_NAME


Columns = Annotated[tuple[str, ...], Field(min_length=1)]
"""Columns of ``runs.csv``."""


class WholeFigure(Table):
    """A figure of all that the tables hold of its kind."""

    kind: Literal["breakdown", "loss", "models", "memory", "utilisation"]
    title: str  # what it shows, in a sentence


class ResultsFigure(Table):
    """A figure of results of whole runs."""

    kind: Literal["results", "tradeoff"]
    title: str
    y: Columns


class SweptFigure(Table):
    """A figure of columns against a field."""

    kind: Literal["swept"]
    title: str
    x: str  # the field along the axis
    y: Columns
    label: str = ""  # of the axis, where it is not the field's


Figure = Annotated[WholeFigure | ResultsFigure | SweptFigure, Field(discriminator="kind")]
"""A figure that a study declares; :mod:`plots.registry` draws its kind."""


class Result(Table):
    """A column of ``runs.csv`` that the study is about; a text alone is its title."""

    title: str  # what it is, in words
    unit: str = ""
    better: Literal["", "higher", "lower"] = ""
    """Reports open with the columns that say it; the others are in the tables alone."""

    @model_validator(mode="before")
    @classmethod
    def _of_title(cls, value: object) -> object:
        return {"title": value} if isinstance(value, str) else value


class Question(Table):
    """What the text asks, and the results by which runs answer it."""

    text: str
    by: tuple[str, ...]  # names of results


class Companion(Table):
    """A process beside the ranks, one for every device that they use."""

    field: str  # it is started when this field is not 0
    name: str
    module: str
    arguments: tuple[str, ...]
    """``{FIELD}``, ``{device}`` and ``{out}`` (its report, which it writes when it is ready)."""
    device_share: str = ""  # share of the device's time that it takes, for predictions: {FIELD}


class Published(Table):
    """Source and conditions of the values of ``published.csv``."""

    source: str
    conditions: dict[str, Any] = Field(default_factory=dict)
    """Fields of a point, and their values in every published run."""
    figure: str = ""
    """Figure of the sweep of the same name which the text is about. ``predicted.svg`` of the
    study's folder has it as simulated; reports of runs without a GPU show it."""


class _Batch(Table):
    """Fields whose product is the global batch."""

    accumulation: PositiveInt
    micro_batch_size: PositiveInt = 1
    dp: PositiveInt = 1


class Study(Table):
    """A resolved ``study.toml``; :func:`load_study` reads it, :func:`study_from` reads it back."""

    name: str = Field(pattern=NAME_PATTERN, max_length=40)  # the folder's
    title: str  # of the text that it reproduces
    source: str = ""  # where that was published
    extends: str = ""
    """A study whose fields, engines, phases, figures, models and points are taken over."""
    is_default: bool = False  # whether it is run when none is named
    default_sweep: str = "basic"
    small_model: str = "tiny"  # model of every sweep's small form
    reference: str  # the engine that the others are compared with
    gate: Gate = Gate()
    phases: dict[str, Phase] = Field(default_factory=dict)  # in the order they run
    fields: dict[str, FieldRow] = Field(default_factory=dict)
    """Fields that the study varies beside those of every point."""
    engines: dict[Annotated[str, Field(pattern=NAME_PATTERN)], Engine]
    """In the order in which tables and figures show them."""
    figures: dict[str, Figure] = Field(default_factory=dict)
    results: dict[str, Result] = Field(default_factory=dict)
    """Columns of ``runs.csv`` that it argues with; numbers of the last line of ``metrics.jsonl``
    become columns by being named here."""
    question: Question | None = None
    elsewhere: dict[str, str] = Field(default_factory=dict)
    """What the text argues with and no run shows, to the command or page that does."""
    companions: dict[str, Companion] = Field(default_factory=dict)
    ds_config: dict[str, Any] = Field(default_factory=dict)
    """Laid over DeepSpeed's config for every engine."""
    published: Published | None = None

    _folders: tuple[Path, ...] = PrivateAttr(())
    """Where it was read from, then where the study was that it extends; empty for a study that came
    with a run."""

    @model_validator(mode="after")
    def _refers_to_what_there_is(self) -> Self:
        for name in self.fields:
            if name in Point.model_fields:
                raise ValueError(f"field '{name}' is one of every point; choose another name")
        for where, kind, names, known in self._references():
            for name in names:
                if name and name not in known:
                    raise ValueError(where + explain.unknown(kind, name, known))
        owners: dict[str, str] = {}
        for name, engine in self.engines.items():
            for word in (name, *engine.aliases):
                if (owner := owners.setdefault(_spelled(word), name)) != name:
                    raise ValueError(f"engines '{owner}' and '{name}' share a name")
        return self

    def _references(self) -> Iterator[tuple[str, str, Iterable[str], Iterable[str]]]:
        """Yield where names stand, what they name, the names, and the names that there are."""
        of_point = [*self.fields, *Point.model_fields, "accumulation", "num_ranks"]
        settable = [name for name in Point.model_fields if name not in ("name", "model", "engine")]
        yield "", "reference engine", [self.reference], self.engines
        yield "ds_config: ", "field", fields_in(self.ds_config), of_point
        asked = self.question.by if self.question else ()
        yield "question: ", "result", asked, self.results
        shown = [self.published.figure] if self.published else []
        yield "published: ", "figure", shown, self.figures
        for key, figure in self.figures.items():
            yield f"figure '{key}': ", "field", [getattr(figure, "x", "")], of_point
        for key, companion in self.companions.items():
            used = fields_in([companion.name, companion.arguments, companion.device_share])
            yield f"companion '{key}': ", "field", [companion.field], of_point
            yield f"companion '{key}': ", "field", used - {"device", "out"}, of_point
        for key, engine in self.engines.items():
            used = fields_in([engine.ds_config, engine.log])
            yield f"engine '{key}': ", "field", used, of_point
            yield f"engine '{key}': ", "field of the study", engine.fields, self.fields
            yield f"engine '{key}', sets: ", "field of every point", engine.sets, settable
            yield f"engine '{key}', equals: ", "engine", [engine.equals], self.engines

    @property
    def set_by_engines(self) -> tuple[str, ...]:
        """Fields of every point that the engines fix, so that the engine's name says them."""
        return tuple(dict.fromkeys(name for row in self.engines.values() for name in row.sets))

    def fixed_value(self, engine: str, name: str) -> Any:
        """Return the value that an engine has of a field that engines fix."""
        return self.engines[engine].sets.get(name, Point.model_fields[name].default)

    @functools.cached_property
    def all_fields(self) -> dict[str, FieldRow]:
        """Fields of every point and those of the study, in the order in which names list them."""
        return {**CORE_FIELDS, **self.fields}

    @functools.cached_property
    def point_type(self) -> type[Point]:
        """:class:`configs.schema.Point` with the study's fields."""
        engine = Field(default=self.reference, description=", ".join(self.engines))
        fields: dict[str, Any] = {
            name: (row.annotation, Field(default=row.default, description=row.description))
            for name, row in self.fields.items()
        }
        made: type[Point] = create_model("Point", __base__=Point, engine=(str, engine), **fields)
        made.study = self
        return made

    def as_table(self) -> dict[str, Any]:
        """Return the study as it travels with its runs."""
        return self.model_dump(mode="json")

    def as_json(self) -> str:
        """Return :meth:`as_table` as text."""
        return json.dumps(self.as_table())

    @functools.cached_property
    def _engine_names(self) -> dict[str, str]:
        engines = self.engines.items()
        return {_spelled(word): key for key, row in engines for word in (key, *row.aliases)}

    def engine_name(self, value: object) -> object:
        """Return the canonical name of an engine given by any name; other values pass through."""
        if not isinstance(value, str):
            return value
        return self._engine_names.get(_spelled(value), _spelled(value))

    def takers(self, field: str) -> list[str]:
        """Return the engines that take a field of some engines."""
        return [key for key, engine in self.engines.items() if field in engine.fields]

    def engine_of(self, table: Mapping[str, Any]) -> Engine | None:
        """Return the engine of a point's table, by default the reference; None if it is unknown."""
        return self.engines.get(str(self.engine_name(table.get("engine", self.reference))))

    def make_point(self, table: Mapping[str, Any], source: str = "point") -> Point:
        """Build a point from a table of fields, the model's defaults filling what it leaves out.

        ``model`` is the name of a model of the study or a table of its fields, of which
        ``model.hidden`` and the like replace one. The engine may be given by any of its names.
        ``accumulation``, micro-batches a rank sums before an update, may stand for
        ``global_batch_size``.

        Raises:
            ConfigError: a field is unknown or wrong; names field, value and remedy.
        """
        fields = {key: value for key, value in table.items() if not key.startswith(MODEL_PREFIX)}
        if all(key in fields for key in _BATCH):
            raise ConfigError(f"{source}: give {' or '.join(_BATCH)}, not both")
        model = fields.get("model")
        if isinstance(model, str | int | float):
            model, defaults = self.load_model(str(model))
            fields = {**defaults, **fields}
        elif model is None:
            raise ConfigError(f"{source}: field 'model' is missing; give the name of a model")
        of_model = {
            key.removeprefix(MODEL_PREFIX): value
            for key, value in table.items()
            if key.startswith(MODEL_PREFIX)
        }
        fields["model"] = {**dict(model), **of_model} if of_model else model
        fields["engine"] = self.engine_name(fields.get("engine", self.reference))
        if engine := self.engine_of(fields):
            limits = engine.fields.items()
            defaults = {name: row.default for name, row in limits if row.default is not None}
            fields = {**engine.sets, **defaults, **fields}
        if "accumulation" in fields:
            given = {key: fields[key] for key in _Batch.model_fields if key in fields}
            batch = _Batch.read(given, source)
            del fields["accumulation"]
            fields["global_batch_size"] = batch.accumulation * batch.micro_batch_size * batch.dp
        return self.point_type.read(fields, source)

    def overlaid(self, table: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of a point's table with fields laid over it; values may be text.

        An engine that is given replaces the table's as a whole, with the fields that it alone
        takes; a field that the new engine takes as well stays unless it is given anew.
        """
        result = dict(table)
        if "engine" in over:
            engine = self.engine_of(over)
            for field, row in self.fields.items():
                if row.only_some_engines and not (engine and field in engine.fields):
                    result.pop(field, None)
        if any(key in over for key in _BATCH):
            for key in _BATCH:
                result.pop(key, None)
        return {**result, **over}

    def files(self, kind: str) -> dict[str, Path]:
        """Return the files of ``models``, ``points`` or ``sweeps`` by their stems.

        Those of the study that it extends are among them.
        """
        found: dict[str, Path] = {}
        for folder in self._folders:
            for path in sorted((folder / kind).glob("*.toml")):
                found.setdefault(path.stem, path)
        return found

    @property
    def folder(self) -> Path | None:
        """Where it was read from; None for a study that came with a run."""
        return self._folders[0] if self._folders else None

    def model_names(self) -> list[str]:
        """Return the names of the study's models, smallest first."""
        models = [self.load_model(name)[0] for name in self.files("models")]
        return [model.name for model in sorted(models, key=Model.num_parameters)]

    def load_model(self, name: str) -> tuple[Model, dict[str, Any]]:
        """Return a model of the study and the fields of a point that go with it by default.

        Raises:
            ConfigError: no such model (the nearest is named), or a field is wrong.
        """
        files = self.files("models")
        if name not in files:
            raise ConfigError(explain.unknown("model", name, files))
        table = read_toml(files[name])
        defaults = table.pop("defaults", {})
        return Model.read(table, str(files[name])), defaults


def _spelled(word: str) -> str:
    """Return a name in the one spelling in which names are compared."""
    return word.strip().lower().replace("_", "-").replace(" ", "-")


def folders_of_studies() -> list[str]:
    """Return the names of the shipped studies' folders, and of their results."""
    return sorted(path.parent.name for path in STUDIES_DIR.glob(f"*/{STUDY_FILE}"))


def study_names() -> list[str]:
    """Return the names of the shipped studies, the default first."""
    studies = [load_study(name) for name in folders_of_studies()]
    return [study.name for study in sorted(studies, key=lambda one: (not one.is_default, one.name))]


@functools.cache
def default_study() -> Study:
    """Return the study that is meant when none is named."""
    return load_study(study_names()[0])


def load_study(name_or_folder: str | Path) -> Study:
    """Load a shipped study by its name, or one of the user's own by its folder.

    Raises:
        ConfigError: no such study (the nearest is named), or its file is wrong.
    """
    for folder in (STUDIES_DIR / name_or_folder, Path(name_or_folder)):
        if (folder / STUDY_FILE).is_file():
            return _load_folder(folder.resolve())
    unknown = explain.unknown("study", str(name_or_folder), folders_of_studies())
    raise ConfigError(f"{unknown}; or give a folder with a {STUDY_FILE}")


@functools.cache
def _load_folder(folder: Path) -> Study:
    table = {"name": folder.name, **read_toml(folder / STUDY_FILE)}
    folders = [folder]
    if base_name := table.get("extends"):
        sibling = folder.parent / str(base_name)
        base = load_study(sibling if (sibling / STUDY_FILE).is_file() else str(base_name))
        inherited = base.model_dump(mode="json", exclude_unset=True, exclude={"name", "is_default"})
        table = laid_over(inherited, table)
        folders += base._folders
    study = _same(Study.read(table, str(folder / STUDY_FILE)))
    study._folders = tuple(folders)
    return study


def study_from(table: Mapping[str, Any], source: str) -> Study:
    """Return a study that travelled with runs.

    Raises:
        ConfigError: it is not one.
    """
    try:
        return _same(Study.read(table, source))
    except ConfigError as error:
        raise ConfigError(f"{error}: not a study") from None


_KNOWN: dict[str, Study] = {}


def _same(study: Study) -> Study:
    """Return one object for equal studies, so that their points are of one type."""
    return _KNOWN.setdefault(study.as_json(), study)


def make_point(
    table: Mapping[str, Any], source: str = "point", study: Study | None = None
) -> Point:
    """Return :meth:`Study.make_point` of a study, by default of the default one."""
    return (study or default_study()).make_point(table, source)
