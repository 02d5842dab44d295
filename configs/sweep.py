"""A sweep: a grid of points that are run one after the other and compared."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from configs.errors import ConfigError, explain
from configs.files import read_toml
from configs.naming import name_points
from configs.schema import MODEL_FIELDS, Point
from configs.study import Study, default_study, folders_of_studies
from configs.table import NAME_PATTERN, Table

AUTO_MODEL = "auto"
"""Stands for the study's largest model that fits the machine, or its small one without a GPU."""


def _lists(table: object) -> object:
    """Return a grid's values as lists: one that stands alone is a list of one."""
    if not isinstance(table, Mapping):
        return table
    return {key: value if isinstance(value, list) else [value] for key, value in table.items()}


Values = Annotated[list[Any], Field(min_length=1)]
Grid = Annotated[dict[str, Values], BeforeValidator(_lists)]


MOST_REPEATS = 1000
"""Of a sweep; each is a run of minutes."""
TAKEN_NAMES = r"single|simulated-.*"
"""Folders beside those of sweeps: runs started one by one, and predictions."""


class _Form(Table):
    """The runs of a sweep, at one size."""

    point: dict[str, Any] = Field(default_factory=dict)
    """Fields of :class:`configs.schema.Point` that every run shares."""
    grid: Grid = Field(default_factory=dict)
    """Field to its values; every combination is a cell, the first field varies slowest."""
    exclude: tuple[Grid, ...] = ()
    """Points to leave out: those that have one of the values given in every field given."""
    engines: tuple[Grid, ...] = ()
    """Engines that run every cell, in this order; a list of values stands for one engine each."""
    repeats: PositiveInt = Field(default=1, le=MOST_REPEATS)  # how often the whole list is run

    @model_validator(mode="after")
    def _each_field_is_given_once(self) -> Self:
        for key in self.grid:
            if any(key in engine for engine in self.engines):
                raise ValueError(f"field '{key}' is given by grid and by engines; keep one")
        return self

    def models(self) -> list[Any]:
        """Return the models that it asks for: names, or tables of a model's fields."""
        point = [self.point["model"]] if "model" in self.point else []
        lists = [table.get("model", []) for table in (self.grid, *self.engines)]
        return [*point, *itertools.chain(*lists)]


class Sweep(_Form):
    """A file of a study's ``sweeps``."""

    name: str = Field(pattern=NAME_PATTERN, max_length=80)
    """Name of the sweep and of its results folder."""
    description: str = ""  # what it shows, in a line
    figures: tuple[str, ...] = ("iteration-breakdown", "loss")  # figures of plots that show it
    results: tuple[str, ...] = ()
    """Results of the study that the report opens with; by default all that say which is better."""
    model: str = AUTO_MODEL
    """A model of the study, or ``auto`` for the largest that fits; unused beside ``grid.model``."""
    auto_fits: Literal["all", "reference"] = "all"
    """Whose points the model ``auto`` has to fit; others that do not are left out by name."""
    engines: tuple[Grid, ...] = Field(min_length=1)
    tiny: _Form | None = None
    """The same on the study's small model, in minutes on a CPU; what it leaves out is the
    sweep's."""
    study: Study
    """Whose engines and fields it has; no field of the file."""

    @model_validator(mode="after")
    def _has_a_folder_of_its_own(self) -> Self:
        # Sweeps of the default study lie beside the folders of the other studies.
        is_study = self.study is default_study() and self.name in folders_of_studies()
        if is_study or re.fullmatch(TAKEN_NAMES, self.name):
            raise ValueError(
                f"name = '{self.name}': its results folder is for other runs; choose another"
            )
        return self

    @model_validator(mode="after")
    def _known_fields(self) -> Self:
        known = [*self.study.point_type.model_fields, "accumulation", *MODEL_FIELDS]
        for form in (self, self.tiny or _Form()):
            for table in (form.point, form.grid, *form.exclude, *form.engines):
                for key in table:
                    if key not in known:
                        raise ValueError(explain.unknown("field", key, known))
        return self

    @model_validator(mode="after")
    def _known_results(self) -> Self:
        for name in self.results:
            if name not in self.study.results:
                raise ValueError(explain.unknown("result", name, self.study.results))
        return self

    @model_validator(mode="after")
    def _known_models(self) -> Self:
        """Look at both forms, so that a typo shows wherever the file is read."""
        forms = (self, self.tiny or _Form())
        asked = [self.model, *itertools.chain(*(form.models() for form in forms))]
        tables = [model for model in asked if isinstance(model, Mapping)]
        known = [AUTO_MODEL, *self.study.files("models"), *(str(t.get("name")) for t in tables)]
        rules = itertools.chain(*(form.exclude for form in forms))
        excluded = itertools.chain(*(rule.get("model", []) for rule in rules))
        for name in (*asked, *excluded):
            # A study that came with a run has no files.
            if self.study.folder and not isinstance(name, Mapping) and str(name) not in known:
                raise ValueError(explain.unknown("model", str(name), known))
        return self

    @property
    def own_models(self) -> str:
        """The models of its full form, in words."""
        names = [str(one.get("name") if isinstance(one, Mapping) else one) for one in self.models()]
        if not names and self.model == AUTO_MODEL:
            return "the largest that fits"
        return ", ".join(dict.fromkeys(names)) or self.model

    def small(self) -> Sweep:
        """Return the sweep at the size of the study's small model."""
        form = self.tiny or _Form()
        given: dict[str, Any] = {name: getattr(form, name) for name in form.model_fields_set}
        # What the file says it shows is of its own size.
        words = f"{self.description} (small form, on {self.study.small_model})"
        given["description"] = words.strip()
        if "model" not in given.get("grid", {}):
            given["model"] = self.study.small_model
            for name in ("grid", "point"):
                table = given.get(name, getattr(self, name))
                given[name] = {key: value for key, value in table.items() if key != "model"}
        return self.model_copy(update=given)

    def with_engines(self, words: str) -> tuple[Sweep, str]:
        """Return the sweep with other engines of its study in place of its own.

        An engine that the sweep lists keeps the fields that the sweep gives it.

        Args:
            words: ``NAME,NAME``, by any of their names.

        Returns:
            The sweep, and the reference engine if it was added in front of the others, else empty.

        Raises:
            ConfigError: no such engine; the nearest is named.
        """
        study, rows = self.study, []
        for word in words.split(","):
            name = str(study.engine_name(word))
            if name not in study.engines:
                raise ConfigError(f"--engines: {explain.unknown('engine', word, study.engines)}")
            rows += self._rows_of(name)
        added = "" if any(row["engine"] == study.reference for row in rows) else study.reference
        rows = [*(self._rows_of(added) if added else ()), *rows]
        engines = tuple({key: [value] for key, value in row.items()} for row in rows)
        return self.model_copy(update={"engines": engines}), added

    def _engine_rows(self) -> list[dict[str, Any]]:
        """Return the engines, each by its canonical name with one value of every field."""
        study = self.study
        rows = [row for lists in self.engines for row in _product(lists)]
        return [
            row | {"engine": study.engine_name(row.get("engine", study.reference))} for row in rows
        ]

    def _rows_of(self, name: str) -> list[dict[str, Any]]:
        return [row for row in self._engine_rows() if row["engine"] == name] or [{"engine": name}]

    @property
    def leaves_model_open(self) -> bool:
        """True where the machine decides which model is run."""
        return self.model == AUTO_MODEL and "model" not in {*self.grid, *self.point}

    def points(self, model: str | None, overrides: Mapping[str, str] | None = None) -> list[Point]:
        """Return every point once, named, in the order of a repeat.

        Args:
            model: model of every point, in place of the sweep's own; None keeps that.
            overrides: fields to set in every run, over those of the sweep; names tell them.

        Raises:
            ConfigError: a field is wrong, or nothing is left; names it and the sweep.
        """
        source, study = f"sweep '{self.name}'", self.study
        over = dict(overrides or {})
        some = {name for name, row in study.fields.items() if row.only_some_engines}
        unused, found = some & over.keys(), dict[str, Point]()
        for table in self._tables(model):
            # A field of some engines is set for those that take it.
            engine = study.engine_of(table)
            taken = set(engine.fields) if engine else set()
            unused -= taken
            given = {name: value for name, value in over.items() if name not in some - taken}
            point = study.make_point(study.overlaid(table, given), source=source)
            if not any(_matches(point, rule, study) for rule in self.exclude):
                found.setdefault(point.model_copy(update={"name": ""}).model_dump_json(), point)
        for name in unused:
            takers = " and ".join(study.takers(name))
            raise ConfigError(
                f"{source}: {name} = {over[name]!r}: none of its engines takes that; {takers} would"
            )
        if not found:
            raise ConfigError(f"{source}: every point is excluded")
        return name_points(list(found.values()), study, over)

    def sizing_points(self, model: str, overrides: Mapping[str, str]) -> list[Point]:
        """Return the points that have to fit for the model ``auto`` to be this one."""
        found = self.points(model, overrides)
        own = [point for point in found if point.engine == self.study.reference]
        return own if own and self.auto_fits == "reference" else found

    def _tables(self, model: str | None) -> Iterator[dict[str, Any]]:
        shared, grid = {"model": self.model, **self.point}, dict(self.grid)
        if model:
            shared["model"] = model
            grid.pop("model", None)
        for cell in _product(grid):
            with_cell = self.study.overlaid(shared, cell)
            for row in self._engine_rows():
                yield self.study.overlaid(with_cell, row)


def _product(lists: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists, values, strict=True))


def _matches(point: Point, rule: Mapping[str, Sequence[Any]], study: Study) -> bool:
    for key, values in rule.items():
        wanted = [study.engine_name(value) if key == "engine" else value for value in values]
        if point.value(key) not in wanted:
            return False
    return True


def make_sweep(table: Mapping[str, Any], study: Study | None = None) -> Sweep:
    """Make a sweep of a study from a table of its fields.

    Raises:
        ConfigError: a field is wrong; names field, value and remedy.
    """
    return Sweep.read({**table, "study": study or default_study()}, "sweep")


def sweep_names(study: Study | None = None) -> list[str]:
    """Return the names of a study's sweeps."""
    return sorted((study or default_study()).files("sweeps"))


def load_sweep(name_or_path: str, study: Study | None = None) -> Sweep:
    """Read a sweep of a study by its name, or one of the user's own by its path.

    Raises:
        ConfigError: no such sweep (the nearest is named), or a field is wrong.
    """
    study = study or default_study()
    files = study.files("sweeps")
    path = files.get(name_or_path, Path(name_or_path))
    if path.suffix != ".toml":
        raise ConfigError(explain.unknown("sweep", name_or_path, sorted(files)))
    return Sweep.read({**read_toml(path), "study": study}, str(path))
