"""Parameters of a model, tensor by tensor, and what autograd keeps of its layers.

Both are counted from sizes alone: from a Hugging Face ``config.json``, or from a shape that the
performance model knows. Counts equal those of transformers' classes, and the bytes that a layer
keeps were read off the tensors that autograd saves (tests hold both).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from deep_optimizer_states.predict.model import ModelError, ModelShape

FP32_BYTES = 4
MEGATRON_LOGIT_BYTES = 6
"""Its own cross entropy works in place."""


@dataclass(frozen=True)
class Layer:
    """One kind of layer.

    Attributes:
        tensors: Elements of each of its parameters, in the model's order.
        count: How many there are.
        kept: Elements a token that autograd keeps in the type of the weights, attention left out.
        kept_fp32: Elements a token that it keeps in fp32 whatever that type is.
        inner: Width of the queries; of keys and values it is ``key_value``.
        key_value: See there.
        heads: Of attention.
        attentions: Attentions a layer: a decoder that also reads an encoder has two.
        softmax_fp32: Written scores are kept in fp32 too, beside the type of the weights.
        kept_twice: Of ``kept_fp32``, elements that 16-bit training keeps in its own type as well.
        scores: Arrays of written scores in the type of the weights.
        has_bias_scores: Its first attention adds learned scores, which no flash kernel takes: its
            scores are written, in fp32, whatever is asked for.
    """

    tensors: tuple[int, ...]
    count: int
    kept: float
    kept_fp32: float
    inner: int
    key_value: int
    heads: int
    attentions: int = 1
    softmax_fp32: bool = False
    has_bias_scores: bool = False
    kept_twice: float = 0.0
    scores: int = 1

    @property
    def numel(self) -> int:
        """Its parameters."""
        return sum(self.tensors)

    def kept_bytes(self, size: int, tokens: int, sequence: int, is_flash: bool) -> float:
        """Bytes that autograd keeps of one layer.

        Args:
            size: Bytes of a weight.
            tokens: Of the micro-batch.
            sequence: Of one sample.
            is_flash: Whether attention does not write its scores.
        """
        twice = self.kept_twice if size < FP32_BYTES else 0.0
        each = size * (self.kept + twice) + FP32_BYTES * self.kept_fp32
        written = size * 4 * self.inner + size * self.scores * self.heads * sequence
        if self.softmax_fp32 and size < FP32_BYTES:
            written += FP32_BYTES * self.heads * sequence
        flash = size * 2 * (self.inner + self.key_value) + FP32_BYTES * self.heads
        biased = FP32_BYTES * (3 * self.inner + self.heads * sequence) + size * self.inner
        for idx in range(self.attentions):
            if not is_flash:
                each += written
            else:
                each += biased if self.has_bias_scores and not idx else flash
        return each * tokens


@dataclass(frozen=True)
class Architecture:
    """A model as its memory depends on it.

    Attributes:
        name: Printed beside figures.
        first: Parameters before the layers, in the model's order.
        layers: Its kinds of layers, in order.
        last: Parameters after them.
        hidden: Width of what goes from layer to layer.
        vocab_size: Width of its logits.
        sequence: Most tokens of a sample.
        logits_fp32: The loss is computed from fp32 logits, as transformers does for causal models.
        has_experts: Its feed-forward is a mixture of experts.
        logit_bytes: Of a logit and its gradients where they are known together; else three arrays.
        head_kept: Elements a token kept in the type of the weights, outside layers and logits.
        head_kept_fp32: The same in fp32.
        is_tied: The output layer is the embedding, of which two are made at first.
    """

    name: str
    first: tuple[int, ...]
    layers: tuple[Layer, ...]
    last: tuple[int, ...]
    hidden: int
    vocab_size: int
    sequence: int
    logits_fp32: bool = True
    head_kept: float = 0.0
    head_kept_fp32: float = 0.0
    is_tied: bool = False
    logit_bytes: float = 0.0
    has_experts: bool = False

    @property
    def tied_numel(self) -> int:
        """Elements of the embedding that is dropped when both are tied."""
        return self.vocab_size * self.hidden if self.is_tied else 0

    @property
    def tensors(self) -> list[int]:
        """Elements of each parameter tensor, in the model's order."""
        inner = (numel for layer in self.layers for numel in layer.tensors * layer.count)
        return [*self.first, *inner, *self.last]

    @property
    def numel(self) -> int:
        """Its parameters."""
        return sum(self.tensors)

    @property
    def num_layers(self) -> int:
        """Of every kind."""
        return sum(layer.count for layer in self.layers)


def read_architecture(path: Path) -> Architecture:
    """A model from a Hugging Face ``config.json``.

    Raises:
        ModelError: It cannot be read, or is of a kind that is not known; names those that are.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path}: is no JSON: {error}") from None
    if not isinstance(table, dict):
        raise ModelError(f"{path}: is no JSON object; give a Hugging Face config.json")
    return architecture_of(table, str(path))


def architecture_of(table: Mapping[str, Any], source: str = "config.json") -> Architecture:
    """A model from the fields of a Hugging Face configuration.

    Args:
        table: ``model_type`` and the sizes of that type.
        source: What errors begin with.

    Raises:
        ModelError: The type is not known, or a size is missing or no whole number.
    """
    table = table.get("text_config", table)
    kind = table.get("model_type")
    make = _KINDS.get(str(kind))
    if make is None:
        near = get_close_matches(str(kind), _KINDS, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ModelError(
            f"{source}: model_type = {kind!r}: {hint}memory is known of {', '.join(_KINDS)}"
        )
    return make(_Fields(table, source))


def architecture_of_shape(shape: ModelShape, tp: int = 1) -> Architecture:
    """A model that the performance model knows, as megatron-core builds it, of one of ``tp`` ranks.

    megatron-core's norms keep no fp32 copy, and its layer's bytes are those that the authors' runs
    took.
    """
    first, *rest, norm, last = shape.tensors(tp)
    tensors = tuple(rest[: len(rest) // shape.layers])
    layer = Layer(
        tensors, shape.layers, 4 * shape.hidden + 3 * shape.ffn / tp, 0.0, 0, 0,
        shape.heads // tp, scores=2,
    )  # fmt: skip
    rows = shape.padded_vocab_size(tp) // tp
    return Architecture(
        shape.name, (first,), (layer,), (norm, last), shape.hidden, rows, shape.seq_length,
        logit_bytes=MEGATRON_LOGIT_BYTES,
    )  # fmt: skip


def gpt2_of_shape(shape: ModelShape, tp: int = 1) -> Architecture:
    """Count a GPT-2 with its shape's sizes, as megatron-core builds it, of one of ``tp`` ranks."""
    hidden, ffn, inner = shape.hidden, shape.ffn // tp, shape.hidden // tp
    key_value = shape.kv_heads * (hidden // shape.heads) // tp
    attended = inner + 2 * key_value
    norm = (hidden, hidden)
    attention = (inner * hidden, hidden, attended * hidden, attended)
    layer = Layer(
        (*norm, *attention, *norm, ffn * hidden, ffn, hidden * ffn, hidden), shape.layers,
        4.0 * hidden + 2.0 * ffn, 0.0, inner, key_value, shape.heads // tp, softmax_fp32=True,
    )  # fmt: skip
    rows = shape.padded_vocab_size(tp) // tp
    return Architecture(
        shape.name, (rows * hidden, shape.seq_length * hidden), (layer,), norm, hidden, rows,
        shape.seq_length, head_kept=2.0 * hidden, logit_bytes=MEGATRON_LOGIT_BYTES,
    )  # fmt: skip


class _Fields:
    """Sizes of a configuration, by any of the names that they go by."""

    def __init__(self, table: Mapping[str, Any], source: str) -> None:
        self._table, self._source = table, source
        self.name = str(table.get("_name_or_path") or table["model_type"])

    def size(self, *names: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = next((self._table[n] for n in names if self._table.get(n) is not None), default)
        if type(value) is not int or value < 1:
            wrong = "is missing" if value is None else f"= {value!r}: give a whole number above 0"
            raise ModelError(f"{self._source}: {names[0]} {wrong}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """A switch."""
        return bool(self._table.get(name, default))

    def text(self, name: str, default: str) -> str:
        """A word."""
        return str(self._table.get(name) or default)


def _llama(of: _Fields, biases: str = "", head_norms: bool = False) -> Architecture:
    hidden, ffn = of.size("hidden_size"), of.size("intermediate_size")
    heads = of.size("num_attention_heads")
    head = of.size("head_dim", default=hidden // heads)
    inner, key_value = heads * head, of.size("num_key_value_heads", default=heads) * head
    has_bias = of.flag("attention_bias")
    attention = []
    for name, out, into in (
        ("q", inner, hidden), ("k", key_value, hidden), ("v", key_value, hidden),
        ("o", hidden, inner),
    ):  # fmt: skip
        attention += [out * into, *([out] if has_bias or name in biases else [])]
    attention += [head, head] if head_norms else []
    has_mlp_bias = of.flag("mlp_bias")
    mlp, kept = _gated(hidden, ffn, has_mlp_bias), 4.0 * ffn
    if "num_local_experts" in of._table:
        experts, top = of.size("num_local_experts"), of.size("num_experts_per_tok", default=2)
        mlp = [experts * hidden, experts * 2 * ffn * hidden, experts * ffn * hidden]
        kept = top * (4.0 * ffn + 2 * hidden)
    kept += 2 * inner + 2 * key_value if head_norms else 0
    layer = Layer(
        (*attention, *mlp, hidden, hidden), of.size("num_hidden_layers"), 4.0 * hidden + kept,
        2.0 * hidden, inner, key_value, heads, softmax_fp32=True,
    )  # fmt: skip
    vocab = of.size("vocab_size")
    output = () if of.flag("tie_word_embeddings") else (vocab * hidden,)
    return Architecture(
        of.name, (vocab * hidden,), (layer,), (hidden, *output), hidden, vocab,
        of.size("max_position_embeddings", default=2048), head_kept=2.0 * hidden,
        head_kept_fp32=hidden, is_tied=not output,
        has_experts="num_local_experts" in of._table,
    )  # fmt: skip


def _gated(hidden: int, ffn: int, has_bias: bool) -> list[int]:
    rows = ((ffn, hidden), (ffn, hidden), (hidden, ffn))
    sizes = [(out * into, *([out] if has_bias else [])) for out, into in rows]
    return list(itertools.chain.from_iterable(sizes))


def _gpt2(of: _Fields) -> Architecture:
    hidden, heads = of.size("n_embd", "hidden_size"), of.size("n_head", "num_attention_heads")
    ffn = of.size("n_inner", default=4 * hidden)
    norm = (hidden, hidden)
    mlp = (hidden * ffn, ffn, ffn * hidden, hidden)
    tensors = (*norm, 3 * hidden * hidden, 3 * hidden, hidden * hidden, hidden, *norm, *mlp)
    layer = Layer(
        tensors, of.size("n_layer", "num_hidden_layers"), 4.0 * hidden + _kept_by_act(of, ffn), 0.0,
        hidden, hidden, heads,
    )  # fmt: skip
    vocab, length = of.size("vocab_size"), of.size("n_positions", "max_position_embeddings")
    output = () if of.flag("tie_word_embeddings", True) else (vocab * hidden,)
    return Architecture(
        of.name, (vocab * hidden, length * hidden), (layer,), (*norm, *output), hidden, vocab,
        length, head_kept=2.0 * hidden, is_tied=not output,
    )  # fmt: skip


def _kept_by_act(of: _Fields, ffn: int) -> float:
    """GELU by tanh as transformers writes it out keeps four arrays, the exact one its input."""
    return (5.0 if of.text("activation_function", "gelu_new") == "gelu_new" else 2.0) * ffn


def _bert(of: _Fields) -> Architecture:
    hidden, ffn = of.size("hidden_size"), of.size("intermediate_size")
    heads, vocab = of.size("num_attention_heads"), of.size("vocab_size")
    square, norm = (hidden * hidden, hidden), (hidden, hidden)
    mlp = (ffn * hidden, ffn, hidden * ffn, hidden)
    layer = Layer(
        (*square * 4, *norm, *mlp, *norm), of.size("num_hidden_layers"), 4.0 * hidden + 2.0 * ffn,
        0.0, hidden, hidden, heads,
    )  # fmt: skip
    length, types = (
        of.size("max_position_embeddings", default=512),
        of.size("type_vocab_size", default=2),
    )
    output = () if of.flag("tie_word_embeddings", True) else (vocab * hidden,)
    return Architecture(
        of.name, (vocab * hidden, length * hidden, types * hidden, *norm), (layer,),
        (vocab, *square, *norm, *output), hidden, vocab, length, logits_fp32=False,
        head_kept=5.0 * hidden, is_tied=not output,
    )  # fmt: skip


def _t5(of: _Fields) -> Architecture:
    """Its embeddings are tied whatever its configuration says, as transformers builds it."""
    hidden, ffn, heads = of.size("d_model"), of.size("d_ff"), of.size("num_heads")
    inner = heads * of.size("d_kv", default=hidden // heads)
    is_gated = of.text("feed_forward_proj", "relu").startswith("gated")
    mlp = (hidden * ffn,) * (3 if is_gated else 2)
    kept_mlp = (7.0 if is_gated else 1.0) * ffn
    attention, vocab = (inner * hidden,) * 4, of.size("vocab_size")
    bias = of.size("relative_attention_num_buckets", default=32) * heads

    def stack(count: int, attentions: int) -> list[Layer]:
        """The first layer alone has the learned scores, between its attention and its norm."""
        norms = attentions + 1
        crossed = (*attention, hidden) * (attentions - 1)
        rest = (hidden, *crossed, *mlp, hidden)
        wide = float(norms * hidden)
        sizes = (2 * wide + kept_mlp, wide, inner, inner, heads, attentions, False, True, wide)
        first = Layer((*attention, bias, *rest), 1, *sizes)
        return [first, Layer((*attention, *rest), count - 1, *sizes)]

    encoder, decoder = of.size("num_layers"), of.size("num_decoder_layers", "num_layers")
    norm = Layer((hidden,), 1, 2.0 * hidden, hidden, 0, 0, 0, attentions=0, kept_twice=hidden)
    layers = (*stack(encoder, 1), norm, *stack(decoder, 2))
    return Architecture(
        of.name, (vocab * hidden,), layers, (hidden,), hidden, vocab, 512,
        logits_fp32=False, head_kept=3.0 * hidden, head_kept_fp32=hidden,
        is_tied=True,
    )  # fmt: skip


_KINDS = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": lambda of: _llama(of, biases="qkv"),
    "qwen3": lambda of: _llama(of, head_norms=True),
    "mixtral": _llama,
    "t5": _t5,
    "bert": _bert,
}
