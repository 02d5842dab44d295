"""Models: sizes, the parameters of a rank, and what autograd keeps of a forward."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.predict import gpt
from deep_optimizer_states.toml_io import did_you_mean, explain, read_toml

FP32_BYTES = 4
LOGIT_BYTES = 6
"""Bytes of a logit and its gradients: megatron-core's cross entropy works in place."""
MODELS_FILE = Path(__file__).with_name("models.toml")
Size = Annotated[int, Field(strict=True, ge=1)]
Blocks = tuple[tuple[int, ...], ...]


class ModelError(DeepOptimizerStatesError, ValueError):
    """There is no such model, or its file is wrong."""


@dataclass(frozen=True)
class Kept:
    """Bytes that a forward of one sample leaves for backward."""

    layer: float  # of a layer, on average
    largest: float  # of the layer that keeps most
    head: float  # outside the layers, logits left out
    logits: float  # logits and their gradients, when most of them are there
    unknown: str = ""  # why nothing of it is known; all sizes are 0 then


@dataclass(frozen=True)
class GptKept:
    """Count what autograd keeps of a GPT, in elements a token, by the operations of its layers."""

    elements: float  # of a layer, in the type of the weights, attention left out
    heads: int
    inner: int = 0  # width of the queries, as far as they are kept
    key_value: int = 0  # width of the keys and of the values
    scores: int = 1  # arrays of scores in the type of the weights where attention writes them
    softmax_fp32: bool = False  # written scores are kept in fp32 as well
    fp32_elements: float = 0.0  # of a layer, in fp32 whatever the type of the weights
    head: float = 0.0  # outside the layers
    head_fp32: float = 0.0
    logits: float = 0.0  # bytes a token of logits and their gradients

    def __call__(self, size: int, sequence: int, is_flash: bool) -> Kept:
        """Return what one sample leaves; see :meth:`Model.kept` for the arguments."""
        if is_flash:
            attention = size * 2.0 * (self.inner + self.key_value) + FP32_BYTES * self.heads
        else:
            attention = size * (4.0 * self.inner + self.scores * self.heads * sequence)
            if self.softmax_fp32 and size < FP32_BYTES:
                attention += FP32_BYTES * self.heads * sequence
        layer = size * self.elements + FP32_BYTES * self.fp32_elements + attention
        head = size * self.head + FP32_BYTES * self.head_fp32
        return Kept(sequence * layer, sequence * layer, sequence * head, sequence * self.logits)


KeptOf = Callable[[int, int, bool], Kept]
"""From bytes of a weight, tokens of a sample, and whether attention does without scores."""


@dataclass(frozen=True)
class Model:
    """A GPT as megatron-core builds it; :mod:`deep_optimizer_states.predict.gpt` counts it."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    hidden: Size
    ffn: Size
    layers: Size
    heads: Size
    kv_heads: Size
    seq_length: Size = 2048
    vocab_size: Size = 50257
    architecture: Literal["llama", "gpt2"] = "llama"
    tied_numel: int = field(default=0, init=False)  # see CountedModel
    has_experts: bool = field(default=False, init=False)
    checkpoint: str = field(default="", init=False)

    def padded_vocab_size(self, tp: int = 1) -> int:
        """Return the rows of the embedding, padded as Megatron does for ``tp`` ranks."""
        return gpt.padded_vocab_size(self.vocab_size, tp)

    def blocks(self, tp: int = 1) -> Blocks:
        """Return the elements of each parameter of one of ``tp`` ranks, in the model's order.

        The first block comes before the layers, the last one after them, each other is a layer.
        """
        parameters = gpt.parameters_of(self, tp)
        before, layer, after = (
            tuple(map(math.prod, shapes))
            for shapes in (parameters.before, parameters.layer, parameters.after)
        )
        return before, *(layer,) * self.layers, after

    def tensors(self, tp: int = 1) -> list[int]:
        """Return the elements of each parameter of one of ``tp`` ranks, in the model's order."""
        return list(itertools.chain.from_iterable(self.blocks(tp)))

    @property
    def numel(self) -> int:
        """Return the number of parameters."""
        return sum(self.tensors())

    @property
    def has_time(self) -> bool:
        """Return whether the model of time knows its layers."""
        return self.architecture == "llama"

    def layer_numel(self, tp: int = 1) -> float:
        """Return the parameters of a layer on one of ``tp`` ranks, on average."""
        return sum(map(sum, self.blocks(tp)[1:-1])) / self.layers

    def kept_of(self, tp: int = 1) -> KeptOf:
        """Return the function that says what autograd keeps of one sample on one of ``tp`` ranks.

        megatron-core's norms keep no fp32 copy; a layer's bytes are those of the authors' runs.
        """
        hidden, heads = self.hidden, self.heads // tp
        logits = float(LOGIT_BYTES * self.padded_vocab_size(tp) // tp)
        if self.architecture == "llama":
            return GptKept(4 * hidden + 3 * self.ffn / tp, heads, scores=2, logits=logits)
        key_value = self.kv_heads * (hidden // self.heads) // tp
        return GptKept(
            4.0 * hidden + 2.0 * (self.ffn // tp),
            heads,
            hidden // tp,
            key_value,
            softmax_fp32=True,
            head=2.0 * hidden,
            logits=logits,
        )


@dataclass(frozen=True)
class CountedModel(Model):
    """A model whose parameters are given one by one.

    It has a time where its layers are told apart and every token passes through all of them.
    """

    own_blocks: Blocks = ()  # as Model.blocks; one block where layers are not told apart
    own_kept: KeptOf | None = None
    tied_numel: int = 0  # elements of the second embedding that is dropped when both are tied
    has_experts: bool = False
    checkpoint: str = ""  # type of the weights it is read from; empty for one without any

    @property
    def has_time(self) -> bool:
        """Return whether its layers were told apart, and no token goes to some experts alone."""
        return len(self.own_blocks) == self.layers + 2 and not self.has_experts

    def blocks(self, tp: int = 1) -> Blocks:
        """Return the parameters that were given, whatever ``tp`` is."""
        return self.own_blocks

    def kept_of(self, tp: int = 1) -> KeptOf:
        """Return the function that was given."""
        assert self.own_kept
        return self.own_kept


_ADAPTER = TypeAdapter(Model)


@functools.cache
def _shipped() -> dict[str, dict[str, Any]]:
    return read_toml(MODELS_FILE, ModelError)


def model_names() -> list[str]:
    """Return the names of the shipped models, smallest first."""
    return list(_shipped())


def load_model(name_or_file: str | Path) -> tuple[Model, dict[str, int]]:
    """Return a shipped model by its name, or any by the path of its TOML file.

    Returns:
        The model, and what it is run with unless told otherwise (``[defaults]`` of the file).

    Raises:
        ModelError: There is none (the nearest is named), or a field is wrong.
    """
    path, name = Path(name_or_file), str(name_or_file)
    if name in _shipped():
        table = {"name": name, **_shipped()[name]}
        defaults = {"micro_batch_size": table.pop("micro_batch_size", 1)}
        return model_from_table(table, name), defaults
    if path.suffix != ".toml":
        raise ModelError(
            f"unknown model '{name}': {did_you_mean(name, _shipped(), cutoff=0.0)}known: "
            f"{', '.join(_shipped())}; or give a TOML file with name, hidden, ffn, layers, heads "
            "and kv_heads"
        )
    table = read_toml(path, ModelError)
    defaults = table.pop("defaults", {})
    return model_from_table(table, str(path)), defaults


def model_from_table(table: dict[str, Any], source: str = "model") -> Model:
    """Build a model from the fields of a model file, of which ``[defaults]`` is no part.

    Raises:
        ModelError: A field is missing, unknown or impossible.
    """
    try:
        model = _ADAPTER.validate_python(table)
    except ValidationError as error:
        known = [item.name for item in dataclasses.fields(Model) if item.init]
        raise ModelError(f"{source}: {explain(error, known)}") from None
    if model.hidden % model.heads or model.heads % model.kv_heads:
        raise ModelError(
            f"{source}: hidden {model.hidden} must be a multiple of heads {model.heads}, and that "
            f"of kv_heads {model.kv_heads}"
        )
    return model
