"""A study as data: a folder with ``study.toml``, models, points, sweeps and published figures.

``study.toml`` declares what the harness itself does not know: the fields that the study varies, the
engines that it compares, the phases of an iteration, the figures, and what must hold before a ratio
of times is called a speed-up. The resolved study travels with the runs as JSON, so that whoever
reads them later needs no folder of ours.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, ValidationError, create_model, model_validator

from configs.errors import ConfigError, explain
from configs.fields import CORE_FIELDS, FieldRow
from configs.schema import Model, Point, read_toml
from configs.table import Table

STUDIES_DIR = Path(__file__).resolve().parent / "studies"
STUDY_FILE = "study.toml"
GPU, TWO_RANKS = "gpu", "two-ranks"
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._+-]*$"


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
    """Fields of ``only_some_engines`` that it takes."""
    ds_config: dict[str, Any] = Field(default_factory=dict)
    """Laid over DeepSpeed's config; ``"{field}"`` stands for a field's value."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables of its ranks."""
    exact: bool = True
    """Whether its results are expected to be the reference's, bit for bit."""
    ends_update: bool | str = True
    """Whether the update is over when ``step()`` returns, so that the phases have their own times;
    or the name of a field that makes it not so when it is set."""
    needs: tuple[str, ...] = ()
    """``gpu``, ``two-ranks``, or a requirement such as ``deepspeed>=0.19.4``."""
    zero_init: bool = True
    """Whether the model may be partitioned while it is made."""
    host_bytes: float = Field(default=18, ge=0)
    """Host memory a parameter, at least, with its state offloaded."""
    device_bytes: float = Field(default=0, ge=0)
    """Memory of the device a parameter, at least, beside weights and gradients."""
    keys: dict[str, Any] = Field(default_factory=dict)
    """Values of the study's ``engine_keys`` that mean this engine; ``"{field}"`` binds a field, and
    a key that is left out may have any value."""
    log: str = ""
    """How it reads in a log's name; empty: ``engine_NAME``."""


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


class Published(Table):
    """What the values of ``published.csv`` are of."""

    source: str
    conditions: dict[str, Any] = Field(default_factory=dict)
    """Fields of a point, and their values in every published run."""


class Study(Table):
    """A resolved ``study.toml``; :func:`load_study` reads it, :func:`study_from` reads it back."""

    name: str = Field(pattern=_NAME, max_length=40)
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
    engines: dict[Annotated[str, Field(pattern=_NAME)], Engine]
    """In the order in which tables and figures show them."""
    figures: dict[str, Figure] = Field(default_factory=dict)
    companions: dict[str, Companion] = Field(default_factory=dict)
    ds_config: dict[str, Any] = Field(default_factory=dict)
    """Laid over DeepSpeed's config for every engine."""
    published: Published | None = None

    @model_validator(mode="after")
    def _refers_to_what_there_is(self) -> Self:
        if self.reference not in self.engines:
            raise ValueError(explain.unknown("reference engine", self.reference, self.engines))
        for name in self.fields:
            if name in Point.model_fields:
                raise ValueError(f"field '{name}' is one of every point; choose another name")
        names: dict[str, str] = {}
        for name, engine in self.engines.items():
            self._check_engine(name, engine)
            for word in (name, *engine.aliases):
                if names.setdefault(spelled(word), name) != name:
                    raise ValueError(f"engines '{names[spelled(word)]}' and '{name}' share a name")
        known = {*self.fields, *Point.model_fields, "accumulation"}
        uses = [(f"figure '{name}'", row.x) for name, row in self.figures.items()]
        uses += [(f"companion '{name}'", row.field) for name, row in self.companions.items()]
        for what, field in uses:
            if field and field not in known:
                raise ValueError(f"{what}: {explain.unknown('field', field, known)}")
        return self

    def _check_engine(self, name: str, engine: Engine) -> None:
        some = [key for key, row in self.fields.items() if row.only_some_engines]
        for field in engine.fields:
            if field not in some:
                reason = explain.unknown("field of some engines", field, some)
                raise ValueError(f"engine '{name}': {reason}")
        for key in engine.keys:
            if key not in self.engine_keys:
                reason = explain.unknown("engine key", key, self.engine_keys)
                raise ValueError(f"engine '{name}': {reason}")

    @functools.cached_property
    def all_fields(self) -> dict[str, FieldRow]:
        """Fields of every point and those of the study, in the order in which names list them."""
        return {**CORE_FIELDS, **self.fields}

    @functools.cached_property
    def point_type(self) -> type[Point]:
        """:class:`configs.schema.Point` with the study's fields."""
        fields: dict[str, Any] = {
            name: (row.annotation, Field(default=row.default, description=row.description))
            for name, row in self.fields.items()
        }
        made: type[Point] = create_model("Point", __base__=Point, **fields)
        made.study = self
        return made

    def engine_name(self, value: object) -> object:
        """Canonical name of an engine given by any of its names; other values pass through."""
        if not isinstance(value, str):
            return value
        key = spelled(value)
        for name, engine in self.engines.items():
            if key in (spelled(word) for word in (name, *engine.aliases)):
                return name
        return key

    def without_engine_keys(self, table: Mapping[str, Any], source: str) -> dict[str, Any]:
        """A table in which the engine is given by its name alone.

        Raises:
            ConfigError: both spellings are there, or no engine has such keys.
        """
        fields = dict(table)
        given = {key: fields.pop(key) for key in self.engine_keys if key in fields}
        if not given:
            return fields
        if "engine" in fields:
            raise ConfigError(
                f"{source}: give the engine by its name or by {', '.join(given)}, not both"
            )
        values = {key: _whole_number(key, given.get(key, 0), source) for key in self.engine_keys}
        for name, engine in self.engines.items():
            bound = _bind(engine.keys, values)
            if engine.keys and bound is not None:
                return {**fields, "engine": name, **bound}
        shown = ", ".join(f"{key} = {value}" for key, value in values.items())
        known = "; ".join(
            f"{name}: {', '.join(f'{key} {value}' for key, value in engine.keys.items())}"
            for name, engine in self.engines.items()
            if engine.keys
        )
        raise ConfigError(
            f"{source}: {shown} is no engine of study '{self.name}'; known are {known}"
        )

    def make_point(self, table: Mapping[str, Any], source: str = "point") -> Point:
        """Build a point from a table of fields, the model's defaults filling what it leaves out.

        ``model`` is the name of a model of the study or a table of its fields. The engine may be
        given by any of its names or by the study's ``engine_keys``. ``accumulation``, micro-batches
        a rank sums before an update, may stand for ``global_batch_size``.

        Raises:
            ConfigError: a field is unknown or wrong; names field, value and remedy.
        """
        fields = dict(table)
        if "accumulation" in fields and "global_batch_size" in fields:
            raise ConfigError(f"{source}: give accumulation or global_batch_size, not both")
        model = fields.get("model")
        if isinstance(model, str | int | float):
            loaded, defaults = self.load_model(str(model))
            fields = {**defaults, **fields, "model": loaded}
        elif model is None:
            raise ConfigError(f"{source}: field 'model' is missing; give the name of a model")
        fields = self.without_engine_keys(fields, source)
        engine = fields["engine"] = self.engine_name(fields.get("engine", self.reference))
        if engine in self.engines:
            for name, limits in self.engines[str(engine)].fields.items():
                if limits.default is not None:
                    fields.setdefault(name, limits.default)
        if "accumulation" in fields:
            names = ("accumulation", "micro_batch_size", "dp")
            factors = [_whole_number(name, fields.get(name, 1), source) for name in names]
            if factors[0] < 1:
                raise ConfigError(f"{source}: accumulation = {factors[0]}: give 1 or more")
            fields["global_batch_size"] = factors[0] * factors[1] * factors[2]
            del fields["accumulation"]
        try:
            return self.point_type(**fields)
        except ValidationError as error:
            raise ConfigError(
                explain.validation(error, source=source, model=self.point_type)
            ) from None

    def load_point(self, path: Path) -> Point:
        """Read one point from a TOML file.

        Raises:
            ConfigError: the file is missing, is not TOML, or a field is wrong.
        """
        return self.make_point(read_toml(path), source=str(path))

    def files(self, kind: str) -> dict[str, Path]:
        """Files of ``models``, ``points`` or ``sweeps`` by their stems, with those it extends."""
        found: dict[str, Path] = {}
        for folder in self._folders:
            for path in sorted((folder / kind).glob("*.toml")):
                found.setdefault(path.stem, path)
        return found

    @property
    def folder(self) -> Path | None:
        """Where it was read from; None for a study that came with a run."""
        folders = self._folders
        return folders[0] if folders else None

    @property
    def _folders(self) -> tuple[Path, ...]:
        return _FOLDERS.get(self.as_json(), ())

    def model_names(self) -> list[str]:
        """Names of the study's models, smallest first."""
        models = [self.load_model(name)[0] for name in self.files("models")]
        return [model.name for model in sorted(models, key=Model.num_parameters)]

    def load_model(self, name: str) -> tuple[Model, dict[str, Any]]:
        """A model of the study and the fields of a point that go with it by default.

        Raises:
            ConfigError: no such model (the nearest is named), or a field is wrong.
        """
        files = self.files("models")
        if name not in files:
            raise ConfigError(explain.unknown("model", name, files))
        table = read_toml(files[name])
        defaults = table.pop("defaults", {})
        try:
            return Model(**table), defaults
        except ValidationError as error:
            raise ConfigError(explain.validation(error, source=str(files[name]))) from None

    def as_json(self) -> str:
        """The study as it travels with its runs."""
        return self._json

    @functools.cached_property
    def _json(self) -> str:
        return json.dumps(self.model_dump(mode="json"))


_FOLDERS: dict[str, tuple[Path, ...]] = {}
"""Where the studies of this process were read from, by their JSON."""


def spelled(word: str) -> str:
    """A name in the one spelling in which names are compared."""
    return word.strip().lower().replace("_", "-").replace(" ", "-")


def study_names() -> list[str]:
    """Names of the shipped studies, the default first."""
    names = sorted(path.parent.name for path in STUDIES_DIR.glob(f"*/{STUDY_FILE}"))
    return sorted(names, key=lambda name: not load_study(name).is_default)


@functools.cache
def default_study() -> Study:
    """The study that is meant when none is named."""
    return load_study(study_names()[0])


def load_study(name_or_folder: str | Path) -> Study:
    """A shipped study by its name, or one of the user's own by its folder.

    Raises:
        ConfigError: no such study (the nearest is named), or its file is wrong.
    """
    folder = STUDIES_DIR / name_or_folder
    if not (folder / STUDY_FILE).is_file():
        folder = Path(name_or_folder)
        if not (folder / STUDY_FILE).is_file():
            names = [path.parent.name for path in STUDIES_DIR.glob(f"*/{STUDY_FILE}")]
            raise ConfigError(
                f"{explain.unknown('study', str(name_or_folder), sorted(names))}; "
                f"or give a folder with a {STUDY_FILE}"
            )
    return _load_folder(folder.resolve())


@functools.cache
def _load_folder(folder: Path) -> Study:
    table = {"name": folder.name, **read_toml(folder / STUDY_FILE)}
    folders = [folder]
    if base_name := table.get("extends"):
        sibling = folder.parent / str(base_name)
        base = load_study(sibling if (sibling / STUDY_FILE).is_file() else str(base_name))
        inherited = base.model_dump(mode="json", exclude_unset=True, exclude={"name", "is_default"})
        table = _laid_over(inherited, table)
        folders += base._folders
    try:
        study = Study(**table)
    except ValidationError as error:
        raise ConfigError(explain.validation(error, str(folder / STUDY_FILE), Study)) from None
    _FOLDERS[study.as_json()] = tuple(folders)
    return _same(study.as_json(), study)


def study_from(table: Mapping[str, Any], source: str) -> Study:
    """A study that travelled with runs.

    Raises:
        ConfigError: it is not one.
    """
    try:
        study = Study(**table)
    except (ValidationError, TypeError) as error:
        reason = explain.validation(error, source) if isinstance(error, ValidationError) else source
        raise ConfigError(f"{reason}: not a study") from None
    return _same(study.as_json(), study)


_KNOWN: dict[str, Study] = {}


def _same(text: str, study: Study) -> Study:
    """One object for equal studies, so that their points are of one type."""
    return _KNOWN.setdefault(text, study)


def make_point(
    table: Mapping[str, Any], source: str = "point", study: Study | None = None
) -> Point:
    """:meth:`Study.make_point` of a study, by default of the default one."""
    return (study or default_study()).make_point(table, source)


def load_point(path: Path, study: Study | None = None) -> Point:
    """:meth:`Study.load_point` of a study, by default of the default one."""
    return (study or default_study()).load_point(path)


def filled(template: object, values: Mapping[str, Any]) -> Any:  # noqa: ANN401 - what a TOML holds
    """A template with its fields put in.

    ``"{stride}"`` alone becomes the value with its type; within a longer text it becomes text.
    """
    if isinstance(template, Mapping):
        return {key: filled(value, values) for key, value in template.items()}
    if isinstance(template, list | tuple):
        return [filled(value, values) for value in template]
    if not isinstance(template, str):
        return template
    name = _bound_field(template)
    if name is not None and name in values:
        return values[name]
    return template.format_map(values) if "{" in template else template


def _laid_over(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables merged, table by table; what ``over`` says stands."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _laid_over(old, value) if both else value  # type: ignore[arg-type]
    return merged


laid_over = _laid_over


def _bound_field(value: object) -> str | None:
    if isinstance(value, str) and value.startswith("{") and value.endswith("}"):
        return value[1:-1]
    return None


def _bind(keys: Mapping[str, Any], values: Mapping[str, int]) -> dict[str, int] | None:
    """Fields that values of engine keys give, or None where they are another engine's."""
    bound: dict[str, int] = {}
    for key, wanted in keys.items():
        if (field := _bound_field(wanted)) is not None:
            bound[field] = values[key]
        elif values[key] != wanted:
            return None
    return bound


def _whole_number(key: str, value: str | float, source: str) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{source}: {key} = {value!r}: give a whole number") from None
