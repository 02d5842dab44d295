"""The parameters of a GPT as megatron-core builds it, counted here and nowhere else.

``llama`` has SwiGLU, RMSNorm, rotary positions, untied embeddings and no bias; ``gpt2`` has
LayerNorm, biases, learned positions and one embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

VOCABULARY_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of this, times the tensor-parallel degree."""
Shape = tuple[int, ...]


class Sizes(Protocol):
    """The sizes of a model, which a table of the harness and one of the package both have."""

    @property
    def architecture(self) -> Literal["llama", "gpt2"]:
        """Kind of the layers."""

    @property
    def hidden(self) -> int:
        """Hidden size."""

    @property
    def ffn(self) -> int:
        """Inner size of the feed-forward block."""

    @property
    def layers(self) -> int:
        """Transformer layers."""

    @property
    def heads(self) -> int:
        """Attention heads."""

    @property
    def kv_heads(self) -> int:
        """Key-value heads."""

    @property
    def seq_length(self) -> int:
        """Tokens a sample."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, before padding."""


@dataclass(frozen=True)
class Parameters:
    """Shapes of the parameters of one tensor-parallel rank, in the model's order."""

    before: tuple[Shape, ...]
    """The embedding, then learned positions if there are any."""
    layer: tuple[Shape, ...]
    """Of each layer."""
    after: tuple[Shape, ...]
    """The last norm, then the output layer if it is not the embedding."""


def padded_vocab_size(vocab_size: int, tp: int = 1) -> int:
    """Return the rows of the whole embedding, padded as Megatron does for ``tp`` ranks."""
    multiple = VOCABULARY_MULTIPLE * tp
    return math.ceil(vocab_size / multiple) * multiple


def parameters_of(model: Sizes, tp: int = 1) -> Parameters:
    """Return the shapes of the parameters of one of ``tp`` ranks."""
    return _shapes(model, tp, padded_vocab_size(model.vocab_size, tp) // tp)


def _shapes(model: Sizes, tp: int, vocab_rows: int) -> Parameters:
    hidden, ffn, inner = model.hidden, model.ffn // tp, model.hidden // tp
    qkv = (hidden + 2 * model.kv_heads * (hidden // model.heads)) // tp
    embedding, vector = (vocab_rows, hidden), (hidden,)
    if model.architecture == "gpt2":
        norm = (vector, vector)
        attention = ((hidden, inner), vector, (qkv, hidden), (qkv,))
        feed_forward = ((ffn, hidden), (ffn,), (hidden, ffn), vector)
        positions = (model.seq_length, hidden)
        layer: tuple[Shape, ...] = (*norm, *attention, *norm, *feed_forward)
        return Parameters((embedding, positions), layer, norm)
    # megatron-core makes the attention's output projection before the one to Q, K and V.
    layer = (vector, (hidden, inner), (qkv, hidden), vector, (2 * ffn, hidden), (hidden, ffn))
    return Parameters((embedding,), layer, (vector, embedding))


def num_elements(shapes: Iterable[Shape]) -> int:
    """Return the elements of parameters of these shapes."""
    return sum(map(math.prod, shapes))


def num_parameters(model: Sizes, tp: int = 1) -> int:
    """Return the trainable parameters of the whole model, over all ``tp`` ranks.

    Parameters that every such rank holds whole count once, and so do tied embeddings.
    """
    whole = _shapes(model, 1, padded_vocab_size(model.vocab_size, tp))
    outside = num_elements(whole.before) + num_elements(whole.after)
    return outside + model.layers * num_elements(whole.layer)


def layers_of_stages(layers: int, pp: int) -> tuple[int, ...]:
    """Return the layers of each stage of a pipeline.

    Stages differ by one layer at most. The inner ones take one more first, then the first: the
    last has the logits to compute, the first only looks tokens up.

    Args:
        layers: Of the whole model.
        pp: Stages, at most as many as there are layers.
    """
    even, more = divmod(layers, pp)
    order = [*range(1, pp - 1), 0, pp - 1]
    return tuple(even + (stage in order[:more]) for stage in range(pp))
