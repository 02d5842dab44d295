"""A sweep: a grid of points that are run one after the other and compared."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    model_validator,
)

from configs.errors import ConfigError, explain
from configs.naming import name_points
from configs.overrides import MODEL_PREFIX, apply_overrides
from configs.schema import (
    CONFIGS_DIR,
    PAPER_KEYS,
    Model,
    Point,
    engine_by_any_name,
    make_point,
    read_toml,
)

AUTO_MODEL = "auto"
"""Stands for the largest shipped model that fits the machine, or ``tiny`` without a GPU."""
TINY_MODEL = "tiny"
"""Model of every sweep's small form."""
MOST_POINTS = 10_000
"""Points of a sweep above which it must be a mistake."""


def _lists(table: object) -> object:
    """A grid's values as lists: one that stands alone is a list of one."""
    if not isinstance(table, Mapping):
        return table
    return {key: value if isinstance(value, list) else [value] for key, value in table.items()}


Grid = Annotated[dict[str, list[Any]], BeforeValidator(_lists)]


class _Form(BaseModel):
    """What a sweep runs, at one size."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    point: dict[str, Any] = Field(default_factory=dict)
    """Fields of :class:`configs.schema.Point` that every run shares."""
    grid: Grid = Field(default_factory=dict)
    """Field to its values; every combination is a cell, the first field varies slowest."""
    exclude: tuple[Grid, ...] = ()
    """Points to leave out: those that have one of the values given in every field given."""
    engines: tuple[Grid, ...] = ()
    """Engines that run every cell, in this order; a list of values stands for one engine each."""
    repeats: PositiveInt = 1
    """How often the whole list is run."""

    @model_validator(mode="after")
    def _known_fields(self) -> Self:
        known = [*Point.model_fields, "accumulation", *PAPER_KEYS]
        known += [MODEL_PREFIX + name for name in Model.model_fields]
        for table in (self.point, self.grid, *self.exclude, *self.engines):
            for key, values in table.items():
                if key not in known:
                    raise ValueError(explain.unknown("field", key, known))
                if values == []:
                    raise ValueError(f"field '{key}' has no value")
        for key in self.grid:
            if any(key in engine for engine in self.engines):
                raise ValueError(f"field '{key}' is given by grid and by engines; keep one")
        return self


class Sweep(_Form):
    """A file of ``configs/sweeps``."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=80)
    """Name of the sweep and of its results folder."""
    description: str = ""
    """What it shows, in a line."""
    figures: tuple[str, ...] = ("iteration-breakdown", "loss")
    """Figures of ``plots`` that show it."""
    model: str = AUTO_MODEL
    """A shipped model, or ``auto`` for the largest that fits; of no use beside ``grid.model``."""
    engines: tuple[Grid, ...] = Field(min_length=1)
    """Engines that run every cell, in this order; a list of values stands for one engine each."""
    tiny: _Form | None = None
    """The same on the model ``tiny``, in minutes on a CPU; what it leaves out is the sweep's."""

    def small(self) -> Sweep:
        """The sweep at the size of ``tiny``."""
        form = self.tiny or _Form()
        given: dict[str, Any] = {name: getattr(form, name) for name in form.model_fields_set}
        # What the file says it shows is of its own size.
        given["description"] = f"{self.description} (small form, on {TINY_MODEL})".strip()
        if "model" in given.get("grid", {}):
            return self.model_copy(update=given)
        grid = {key: v for key, v in given.get("grid", self.grid).items() if key != "model"}
        point = {key: v for key, v in given.get("point", self.point).items() if key != "model"}
        return self.model_copy(update={**given, "grid": grid, "point": point, "model": TINY_MODEL})

    @property
    def leaves_model_open(self) -> bool:
        """Whether the machine decides which model is run."""
        return self.model == AUTO_MODEL and "model" not in {*self.grid, *self.point}

    def points(self, model: str | None, overrides: Mapping[str, str] | None = None) -> list[Point]:
        """Every point once, named, in the order of a repeat.

        Args:
            model: model of every point, in place of the sweep's own; None keeps that.
            overrides: fields to set in every run, over those of the sweep.

        Raises:
            ConfigError: a field is wrong, or nothing is left; names it and the sweep.
        """
        source = f"sweep '{self.name}'"
        over = dict(overrides or {})
        found: dict[str, Point] = {}
        for number, table in enumerate(self._tables(model)):
            if number >= MOST_POINTS:
                raise ConfigError(f"{source}: more than {MOST_POINTS} points")
            point = make_point(apply_overrides(table, over), source=source)
            if not any(_matches(point, rule, source) for rule in self.exclude):
                found.setdefault(point.model_copy(update={"name": ""}).model_dump_json(), point)
        if not found:
            raise ConfigError(f"{source}: every point is excluded")
        return name_points(list(found.values()))

    def _tables(self, model: str | None) -> Iterator[dict[str, Any]]:
        grid = {key: v for key, v in self.grid.items() if not (model and key == "model")}
        own = {"model": model or self.model}
        for cell in _product(grid):
            for engine in self.engines:
                for chosen in _product(engine):
                    shared = {**own, **self.point, **({"model": model} if model else {})}
                    yield apply_overrides(apply_overrides(shared, cell), chosen)


def _product(lists: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists, values, strict=True))


def _matches(point: Point, rule: Mapping[str, Sequence[Any]], source: str) -> bool:
    return all(_value(point, key, source) in _plain(key, values) for key, values in rule.items())


def _plain(key: str, values: Sequence[Any]) -> list[Any]:
    return [engine_by_any_name(value) for value in values] if key == "engine" else list(values)


def _value(point: Point, key: str, source: str) -> Any:  # noqa: ANN401 - any field of a point
    if key == "model":
        return point.model.name
    if key in PAPER_KEYS:
        raise ConfigError(f"{source}: exclude engines by 'engine' and 'stride', not by '{key}'")
    if key.startswith(MODEL_PREFIX):
        return getattr(point.model, key.removeprefix(MODEL_PREFIX))
    return getattr(point, key)


def sweep_names() -> list[str]:
    """Names of the shipped sweeps."""
    return sorted(path.stem for path in (CONFIGS_DIR / "sweeps").glob("*.toml"))


def load_sweep(name_or_path: str) -> Sweep:
    """Read ``configs/sweeps/NAME.toml``, or a sweep of the user's own by its path.

    Raises:
        ConfigError: no such sweep (the nearest is named), or a field is wrong.
    """
    path = CONFIGS_DIR / "sweeps" / f"{name_or_path}.toml"
    if name_or_path not in sweep_names():
        path = Path(name_or_path)
        if path.suffix != ".toml":
            raise ConfigError(explain.unknown("sweep", name_or_path, sweep_names()))
    try:
        return Sweep(**read_toml(path))
    except ValidationError as error:
        raise ConfigError(explain.validation(error, source=str(path), model=Sweep)) from None
