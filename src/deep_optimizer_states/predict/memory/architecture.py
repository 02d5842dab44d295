"""Parameters of a model, tensor by tensor, and what autograd keeps of it for backward.

A GPT of this project is counted from its sizes, without torch. Any other model is built from its
Hugging Face configuration with neither weights nor data: its parameters are those of transformers'
class, and what autograd keeps is read off one forward of a model of one layer, and of one with a
layer more.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from deep_optimizer_states.predict.model import ModelError, ModelShape

FP32_BYTES = 4
MEGATRON_LOGIT_BYTES = 6
"""Bytes of a logit and its gradients: megatron-core's cross entropy works in place."""
LOSS_COPIES = 3
"""Arrays of logits when backward begins elsewhere: their logarithms, and two gradients of them."""
LAYER_COUNTS = ("num_hidden_layers", "num_decoder_layers", "decoder_layers")
"""Fields of Hugging Face configurations that count layers of a kind."""
DEFAULT_SEQUENCE = 512
"""Tokens of a sample of a model whose configuration names no most, as T5."""
WITHOUT_MASK = "torch_without_mask"
"""Name under which torch's attention is registered, where no batch has padding."""
NO_TRANSFORMERS = "needs transformers, which is not installed: pip install transformers"


@dataclass(frozen=True)
class Kept:
    """Bytes that a forward of one sample leaves for backward."""

    layer: float  # of a layer, on average
    largest: float  # of the layer that keeps most
    head: float  # outside the layers, logits left out
    logits: float  # logits and their gradients, when most of them are there


@dataclass(frozen=True)
class GptKept:
    """What autograd keeps of a GPT, in elements a token, by the operations of its layers."""

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
        """Return what one sample leaves; see :attr:`Architecture.kept` for the arguments."""
        if is_flash:
            attention = size * 2.0 * (self.inner + self.key_value) + FP32_BYTES * self.heads
        else:
            attention = size * (4.0 * self.inner + self.scores * self.heads * sequence)
            if self.softmax_fp32 and size < FP32_BYTES:
                attention += FP32_BYTES * self.heads * sequence
        layer = size * self.elements + FP32_BYTES * self.fp32_elements + attention
        head = size * self.head + FP32_BYTES * self.head_fp32
        return Kept(sequence * layer, sequence * layer, sequence * head, sequence * self.logits)


@dataclass(frozen=True, eq=False)
class Architecture:
    """A model as its memory depends on it; equal to itself alone.

    Attributes:
        blocks: Elements of each parameter in the model's order: of what comes before the layers, of
            each layer, and of what comes after them. One block where layers are not told apart.
        kept: Returns what autograd keeps of one sample, from the bytes of a weight, the tokens of
            the sample, and whether attention does without written scores.
    """

    name: str
    blocks: tuple[tuple[int, ...], ...]
    num_layers: int
    hidden: int
    vocab_size: int  # 0 where it has no logits
    sequence: int  # most tokens of a sample
    kept: Callable[[int, int, bool], Kept]
    tied_numel: int = 0  # of the second embedding that is dropped when both are tied
    has_experts: bool = False

    @property
    def tensors(self) -> list[int]:
        """Return the elements of each parameter, in the model's order."""
        return [numel for block in self.blocks for numel in block]

    @property
    def numel(self) -> int:
        """Return the number of parameters."""
        return sum(map(sum, self.blocks))


@functools.lru_cache(maxsize=64)
def architecture_of_shape(shape: ModelShape, tp: int = 1) -> Architecture:
    """Return a shipped model as megatron-core builds it, of one of ``tp`` ranks.

    megatron-core's norms keep no fp32 copy, and its layer's bytes are those that the authors' runs
    took.
    """
    first, *rest, norm, last = shape.tensors(tp)
    layer = tuple(rest[: len(rest) // shape.layers])
    rows = shape.padded_vocab_size(tp) // tp
    kept = GptKept(
        4 * shape.hidden + 3 * shape.ffn / tp,
        shape.heads // tp,
        scores=2,
        logits=MEGATRON_LOGIT_BYTES * rows,
    )
    blocks = ((first,), *(layer,) * shape.layers, (norm, last))
    return Architecture(
        shape.name, blocks, shape.layers, shape.hidden, rows, shape.seq_length, kept
    )


@functools.lru_cache(maxsize=64)
def gpt2_of_shape(shape: ModelShape, tp: int = 1) -> Architecture:
    """Return a GPT-2 of the shape's sizes as megatron-core builds it, of one of ``tp`` ranks."""
    hidden, ffn, inner = shape.hidden, shape.ffn // tp, shape.hidden // tp
    key_value = shape.kv_heads * (hidden // shape.heads) // tp
    attended = inner + 2 * key_value
    rows = shape.padded_vocab_size(tp) // tp
    norm = (hidden, hidden)
    attention = (inner * hidden, hidden, attended * hidden, attended)
    layer = (*norm, *attention, *norm, ffn * hidden, ffn, hidden * ffn, hidden)
    embeddings = (rows * hidden, shape.seq_length * hidden)
    kept = GptKept(
        4.0 * hidden + 2.0 * ffn,
        shape.heads // tp,
        inner,
        key_value,
        softmax_fp32=True,
        head=2.0 * hidden,
        logits=MEGATRON_LOGIT_BYTES * rows,
    )
    blocks = (embeddings, *(layer,) * shape.layers, norm)
    return Architecture(shape.name, blocks, shape.layers, hidden, rows, shape.seq_length, kept)


def read_architecture(path: Path) -> Architecture:
    """Return the model of a Hugging Face ``config.json``.

    Raises:
        ModelError: It cannot be read, or is of a kind that transformers does not know.
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
    """Return the language model of a Hugging Face configuration, trained as one.

    Args:
        table: ``model_type`` and the sizes of that type; transformers fills in what is left out.
        source: What errors begin with.

    Raises:
        ModelError: transformers is not installed, does not know the type or refuses a size.
    """
    table = table.get("text_config", table)
    config = _config_of(table, source)
    import torch

    with _refused_as(f"{source}: memory is not known of such a model"):
        num_layers = sum(_layer_counts(config).values())
        if not num_layers:
            raise ValueError("it counts its layers under another name")
        with torch.device("meta"):
            model = language_model(config)
        tensors = tuple(parameter.numel() for parameter in model.parameters())
        output = model.get_output_embeddings()
        is_tied = output is not None and output.weight is model.get_input_embeddings().weight
        return Architecture(
            name=str(table.get("_name_or_path") or table["model_type"]),
            blocks=(tensors,),
            num_layers=num_layers,
            hidden=config.hidden_size,
            vocab_size=config.vocab_size,
            sequence=getattr(config, "max_position_embeddings", None) or DEFAULT_SEQUENCE,
            kept=functools.cache(functools.partial(_measured, config, source, sum(tensors))),
            tied_numel=config.vocab_size * config.hidden_size * is_tied,
            has_experts=_has_experts(config),
        )


@dataclass(frozen=True)
class Forward:
    """What a forward of one sample left."""

    kept_bytes: int  # of what autograd saves, parameters and logits left out
    logits_bytes: int  # of one array of logits
    numel: int  # parameters of the model


def language_model(config: Any, attention: str | None = None) -> Any:  # noqa: ANN401
    """Build transformers' model of a configuration; an encoder alone predicts masked words.

    Args:
        config: Of transformers.
        attention: Name of its implementation; None for the model's own choice.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

    kind = transformers.AutoModelForCausalLM
    if config.is_encoder_decoder:
        kind = transformers.AutoModelForSeq2SeqLM
    elif type(config) in MODEL_FOR_MASKED_LM_MAPPING:
        kind = transformers.AutoModelForMaskedLM
    return kind.from_config(config, **({"attn_implementation": attention} if attention else {}))


def _config_of(table: Mapping[str, Any], source: str) -> Any:  # noqa: ANN401
    try:
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        raise ModelError(f"{source}: {NO_TRANSFORMERS}") from None
    transformers.logging.set_verbosity_error()
    kind = str(table.get("model_type"))
    if kind not in CONFIG_MAPPING:
        near = get_close_matches(kind, CONFIG_MAPPING, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ModelError(
            f"{source}: model_type = {kind!r}: {hint}transformers {transformers.__version__} knows "
            "no such model"
        )
    with _refused_as(f"{source}: transformers refuses it"):
        return transformers.AutoConfig.for_model(**{**table, "use_cache": False})


@contextlib.contextmanager
def _refused_as(words: str) -> Iterator[None]:
    """Turn whatever the code of a model raises into an error of one line."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - see above
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"{words}: {reason}") from None


def _layer_counts(config: Any) -> dict[str, int]:  # noqa: ANN401
    found = {name: getattr(config, name, None) for name in LAYER_COUNTS}
    return {name: count for name, count in found.items() if count}


def _has_experts(config: Any) -> bool:  # noqa: ANN401
    return any(getattr(config, name, None) for name in ("num_local_experts", "num_experts"))


def _measured(
    config: Any,  # noqa: ANN401
    source: str,
    whole_numel: int,
    size: int,
    sequence: int,
    is_flash: bool,
) -> Kept:
    """Return what one sample leaves: the difference that one more layer of each kind makes."""
    # torch multiplies a batch of experts in bf16 alone.
    times = size // 2 if _has_experts(config) else 1
    counts = _layer_counts(config)

    def forward(**layers: int) -> Forward:
        with _refused_as(f"{source}: a forward of it fails"):
            return _forward(_cut(config, counts | layers), size // times, sequence, is_flash)

    one = dict.fromkeys(counts, 1)
    least = forward(**one)
    more = {name: forward(**one | {name: 2}) for name in counts}
    each = {name: more[name].kept_bytes - least.kept_bytes for name in counts}
    head = least.kept_bytes - sum(each.values())
    layers = sum(counts[name] * each[name] for name in counts)
    numel = least.numel + sum((counts[n] - 1) * (more[n].numel - least.numel) for n in counts)
    if numel != whole_numel:  # layers differ, such as dense ones and experts
        layers = forward().kept_bytes - head
    average = layers / sum(counts.values())
    return Kept(
        layer=times * average,
        largest=times * max(average, *each.values()),
        head=times * head,
        logits=LOSS_COPIES * least.logits_bytes,
    )


def _cut(config: Any, layers: dict[str, int]) -> Any:  # noqa: ANN401
    """Return the configuration with so many layers of each kind."""
    found = copy.deepcopy(config)
    if getattr(config, "layer_types", None):
        found.layer_types = config.layer_types[: max(layers.values())]
    for name, count in layers.items():
        setattr(found, name, count)
    return found


def _forward(config: Any, size: int, sequence: int, is_flash: bool) -> Forward:  # noqa: ANN401
    """Run a forward of one sample on tensors without memory, dropout off."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # transformers makes no mask for an implementation of which it knows none, as of no padding.
    AttentionInterface.register(WITHOUT_MASK, sdpa_attention_forward)
    config.dtype = torch.float32 if size == FP32_BYTES else torch.bfloat16
    saved: dict[int, torch.Tensor] = {}  # one of the tensors of each storage

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with FakeTensorMode():
        model = language_model(config, WITHOUT_MASK if is_flash else "eager").eval()
        ids = torch.zeros(1, sequence, dtype=torch.int64)
        inputs = {"input_ids": ids, "labels": ids}
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(**inputs)
    for tensor in (*model.parameters(), *model.buffers()):
        saved.pop(tensor.untyped_storage()._cdata, None)
    num_bytes = {key: tensor.untyped_storage().nbytes() for key, tensor in saved.items()}
    wide = [key for key, found in saved.items() if found.numel() == sequence * config.vocab_size]
    logits_bytes = sum(num_bytes[key] for key in wide)
    numel = sum(parameter.numel() for parameter in model.parameters())
    return Forward(sum(num_bytes.values()) - logits_bytes, logits_bytes, numel)
