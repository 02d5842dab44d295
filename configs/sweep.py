"""A sweep: points that are run one after the other and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from configs.errors import ConfigError, explain
from configs.overrides import apply_overrides
from configs.schema import CONFIGS_DIR, Engine, Point, make_point, read_toml

AUTO_MODEL = "auto"
"""Stands for the largest shipped model that fits the machine, or ``tiny`` without a GPU."""


class Sweep(BaseModel):
    """A file of ``configs/sweeps``: common fields, and the engines that run them."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=80)
    """Name of the sweep and of its results folder."""
    description: str = ""
    """What it shows, in a line."""
    model: str = AUTO_MODEL
    """A shipped model, or ``auto`` for the largest that fits."""
    point: dict[str, Any] = Field(default_factory=dict)
    """Fields of :class:`configs.schema.Point` that every run shares."""
    engines: tuple[dict[str, Any], ...] = Field(min_length=1)
    """Fields of one engine each (``engine``, ``stride`` or the paper's keys); run in this order."""

    def points(self, model: str, overrides: dict[str, str] | None = None) -> list[Point]:
        """The runs of this sweep, in order.

        Args:
            model: name of the model where the sweep leaves it open (``auto``).
            overrides: fields to set in every run, over those of the sweep.

        Raises:
            ConfigError: a field is wrong; names it and the sweep.
        """
        result = []
        for engine in self.engines:
            table = apply_overrides({**self.point, "model": model, **engine}, overrides or {})
            point = make_point(table, source=f"sweep '{self.name}'")
            named = point.model_copy(update={"name": point.name or point_label(point)})
            result.append(named)
        return result


def point_label(point: Point) -> str:
    """Short name of a run: ``tiny vanilla``, ``tiny hybrid stride 2``."""
    stride = f" stride {point.stride}" if point.engine is Engine.HYBRID else ""
    return f"{point.model.name} {point.engine.value}{stride}"


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
