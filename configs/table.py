"""The base of everything that is read from a file: frozen, and no unknown field passes."""

from pydantic import BaseModel, ConfigDict


class Table(BaseModel):
    """A table of a TOML or JSON file, checked."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )
