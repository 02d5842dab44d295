"""A study as data: a folder with ``study.toml``, models, points, sweeps and published figures.

``study.toml`` declares what the harness itself does not know: the fields that the study varies, the
engines that it compares, the phases of an iteration, the figures, and what must hold before a ratio
of times is called a speed-up. The resolved study travels with the runs as JSON, so that whoever
reads them later needs no folder of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import (
    Field,
    PrivateAttr,
    TypeAdapter,
    ValidationError,
    create_model,
    model_validator,
)

from configs.errors import ConfigError, explain
from configs.fields import CORE_FIELDS, FieldRow
from configs.schema import Model, Point, read_toml
from configs.study_rows import (
    Companion as Companion,
    Engine as Engine,
    Figure as Figure,
    Gate as Gate,
    Phase as Phase,
    Published as Published,
    StudyFile,
    Style as Style,
)
from configs.templates import bound_field, fields_in, laid_over

STUDIES_DIR = Path(__file__).resolve().parent / "studies"
STUDY_FILE = "study.toml"


class Study(StudyFile):
    """A resolved ``study.toml``; :func:`load_study` reads it, :func:`study_from` reads it back."""

    _folders: tuple[Path, ...] = PrivateAttr(())
    """Where it was read from, then where the study was that it extends; empty for a study that came
    with a run."""

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
        known = [*self.fields, *Point.model_fields, "accumulation", "num_ranks"]
        for what, field in self._uses():
            if field and field not in known:
                raise ValueError(f"{what}: {explain.unknown('field', field, known)}")
        return self

    def _uses(self) -> Iterator[tuple[str, str]]:
        """Where a field is named, and which."""
        yield from (("ds_config", name) for name in fields_in(self.ds_config))
        for key, figure in self.figures.items():
            yield f"figure '{key}'", figure.x
        for key, companion in self.companions.items():
            templates: list[Any] = [companion.name, companion.arguments, companion.device_share]
            names = {companion.field, *fields_in(templates)} - {"device", "out"}
            yield from ((f"companion '{key}'", name) for name in names)
        for key, engine in self.engines.items():
            templates = [engine.ds_config, engine.environment, engine.log, engine.keys]
            yield from ((f"engine '{key}'", name) for name in fields_in(templates))

    def _check_engine(self, name: str, engine: Engine) -> None:
        settable = [key for key in Point.model_fields if key not in ("name", "model", "engine")]
        for field, value in engine.sets.items():
            if field not in settable:
                reason = explain.unknown("field of every point", field, settable)
                raise ValueError(f"engine '{name}', sets: {reason}")
            try:
                TypeAdapter(Point.model_fields[field].rebuild_annotation()).validate_python(value)
            except ValidationError as error:
                reason = error.errors()[0]["msg"]
                raise ValueError(f"engine '{name}', sets: {field} = {value!r}: {reason}") from None
        if engine.equals and engine.equals not in self.engines:
            reason = explain.unknown("engine", engine.equals, self.engines)
            raise ValueError(f"engine '{name}', equals: {reason}")
        for kind, given, known in (
            ("field of the study", engine.fields, self.fields),
            ("engine key", engine.keys, self.engine_keys),
        ):
            for word in given:
                if word not in known:
                    raise ValueError(f"engine '{name}': {explain.unknown(kind, word, known)}")

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

    @functools.cached_property
    def _engine_names(self) -> dict[str, str]:
        return {
            spelled(word): name
            for name, engine in self.engines.items()
            for word in (name, *engine.aliases)
        }

    def engine_name(self, value: object) -> object:
        """Canonical name of an engine given by any of its names; other values pass through."""
        if not isinstance(value, str):
            return value
        return self._engine_names.get(spelled(value), spelled(value))

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
        values = {key: _whole_number(key, value, source) for key, value in given.items()}
        twice = [key for key in fields if key in self._bound_by_keys]
        if twice:
            raise ConfigError(
                f"{source}: give {', '.join(twice)} or {', '.join(given)}, not both: the latter "
                "says the former"
            )
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

    @functools.cached_property
    def _bound_by_keys(self) -> set[str]:
        """Fields that engine keys give."""
        values = (value for engine in self.engines.values() for value in engine.keys.values())
        return {name for value in values if (name := bound_field(value)) is not None}

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
            fields = {**self.engines[str(engine)].sets, **fields}
        if "accumulation" in fields:
            names = ("accumulation", "micro_batch_size", "dp")
            factors = [_whole_number(name, fields.get(name, 1), source) for name in names]
            if factors[0] < 1:
                raise ConfigError(f"{source}: accumulation = {factors[0]}: give 1 or more")
            fields["global_batch_size"] = factors[0] * factors[1] * factors[2]
            del fields["accumulation"]
        return self.point_type.read(fields, source)

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
        return self._folders[0] if self._folders else None

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
        return Model.read(table, str(files[name])), defaults


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
        table = laid_over(inherited, table)
        folders += base._folders
    study = _same(Study.read(table, str(folder / STUDY_FILE)))
    study._folders = tuple(folders)
    return study


def study_from(table: Mapping[str, Any], source: str) -> Study:
    """A study that travelled with runs.

    Raises:
        ConfigError: it is not one.
    """
    try:
        return _same(Study.read(table, source))
    except ConfigError as error:
        raise ConfigError(f"{error}: not a study") from None


_KNOWN: dict[str, Study] = {}


def _same(study: Study) -> Study:
    """One object for equal studies, so that their points are of one type."""
    return _KNOWN.setdefault(study.as_json(), study)


def make_point(
    table: Mapping[str, Any], source: str = "point", study: Study | None = None
) -> Point:
    """:meth:`Study.make_point` of a study, by default of the default one."""
    return (study or default_study()).make_point(table, source)


def _bind(keys: Mapping[str, Any], values: Mapping[str, int]) -> dict[str, int] | None:
    """Fields that the values given give, or None where these are another engine's."""
    bound: dict[str, int] = {}
    for key, wanted in keys.items():
        if (field := bound_field(wanted)) is not None:
            bound[field] = values.get(key, 0)
        elif values.get(key, wanted) != wanted:
            return None
    return bound


def _whole_number(key: str, value: str | float, source: str) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{source}: {key} = {value!r}: give a whole number") from None
