"""Shapes of models: the shipped ones of ``models.toml``, or any from a file."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from deep_optimizer_states.checks import explain, read_toml
from deep_optimizer_states.errors import DeepOptimizerStatesError

VOCABULARY_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of this, times the tensor-parallel degree."""
MODELS_FILE = Path(__file__).with_name("models.toml")
Size = Annotated[int, Field(strict=True, ge=1)]


class ModelError(DeepOptimizerStatesError, ValueError):
    """There is no such model, or its file is wrong."""


@dataclass(frozen=True)
class ModelShape:
    """A GPT with SwiGLU, RMSNorm, rotary positions, untied embeddings and no bias."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    hidden: Size
    ffn: Size
    layers: Size
    heads: Size
    kv_heads: Size
    seq_length: Size = 2048
    vocab_size: Size = 50257

    def padded_vocab_size(self, tp: int = 1) -> int:
        """Return the rows of the embedding, padded as Megatron does for ``tp`` ranks."""
        multiple = VOCABULARY_MULTIPLE * tp
        return math.ceil(self.vocab_size / multiple) * multiple

    def tensors(self, tp: int = 1) -> list[int]:
        """Return the elements of each parameter of a tensor-parallel rank, in the model's order."""
        kv_rows = 2 * self.kv_heads * (self.hidden // self.heads)
        layer = [
            self.hidden,
            self.hidden * self.hidden // tp,  # the attention's output, which Megatron makes first
            (self.hidden + kv_rows) * self.hidden // tp,
            self.hidden,
            2 * self.hidden * self.ffn // tp,
            self.hidden * self.ffn // tp,
        ]
        embedding = self.padded_vocab_size(tp) * self.hidden // tp
        return [embedding, *(layer * self.layers), self.hidden, embedding]

    def num_parameters(self, tp: int = 1) -> int:
        """Return the trainable parameters of the model; replicated ones count once."""
        norms = (2 * self.layers + 1) * self.hidden
        return (sum(self.tensors(tp)) - norms) * tp + norms


_ADAPTER = TypeAdapter(ModelShape)


def _shipped() -> dict[str, dict[str, Any]]:
    return read_toml(MODELS_FILE, ModelError)


def model_names() -> list[str]:
    """Return the names of the shipped models, smallest first."""
    return list(_shipped())


def load_model(name_or_file: str | Path) -> tuple[ModelShape, dict[str, int]]:
    """Return a shipped model by its name, or any by the path of its TOML file.

    Returns:
        The shape, and what it is run with unless told otherwise (``[defaults]`` of the file).

    Raises:
        ModelError: There is none (the nearest is named), or a field is wrong.
    """
    path, name, shipped = Path(name_or_file), str(name_or_file), _shipped()
    if name in shipped:
        defaults = {"micro_batch_size": shipped[name].pop("micro_batch_size", 1)}
        return model_from_table({"name": name, **shipped[name]}, name), defaults
    if path.suffix != ".toml":
        near = get_close_matches(name, shipped, n=1, cutoff=0.0)
        raise ModelError(
            f"unknown model '{name}': did you mean '{near[0]}'? known: {', '.join(shipped)}; "
            "or give a TOML file with name, hidden, ffn, layers, heads and kv_heads"
        )
    table = read_toml(path, ModelError)
    defaults = table.pop("defaults", {})
    return model_from_table(table, str(path)), defaults


def model_from_table(table: dict[str, Any], source: str = "model") -> ModelShape:
    """Build a shape from the fields of a model file, of which ``[defaults]`` is no part.

    Raises:
        ModelError: A field is missing, unknown or impossible.
    """
    try:
        shape = _ADAPTER.validate_python(table)
    except ValidationError as error:
        known = [item.name for item in dataclasses.fields(ModelShape)]
        raise ModelError(f"{source}: {explain(error, known)}") from None
    if shape.hidden % shape.heads or shape.heads % shape.kv_heads:
        raise ModelError(
            f"{source}: hidden {shape.hidden} must be a multiple of heads {shape.heads}, and that "
            f"of kv_heads {shape.kv_heads}"
        )
    return shape
