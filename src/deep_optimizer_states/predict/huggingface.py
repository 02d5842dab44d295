"""Any language model of Hugging Face's from its configuration, built without weights or data.

Its parameters are those of transformers' class, and what autograd keeps is read off a forward on
tensors without memory, layer by layer. Code of such a model is anybody's: what it does not compute
on such tensors is not known of it, and what holds without activations still is.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import itertools
import json
import logging
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from deep_optimizer_states.predict.model import (
    FP32_BYTES,
    Blocks,
    CountedModel,
    Kept,
    ModelError,
)
from deep_optimizer_states.toml_io import did_you_mean

LOSS_COPIES = 3
"""Arrays of logits when backward begins elsewhere: their logarithms, and two gradients of them."""
LAYER_COUNTS = ("num_hidden_layers", "num_decoder_layers", "decoder_layers")
"""Fields of configurations that count layers of a kind, in most families."""
SIZES = (
    *(*LAYER_COUNTS, "n_layer", "n_layers", "hidden_size", "n_embd", "d_model", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads", "n_head", "num_heads"),
)
"""Fields without which there is no model; feed-forward parts some families have none of."""
VALUES_NEEDED = ("DataDependentOutputException", "DynamicOutputShapeException")
"""Names of what torch raises where code asks a tensor without memory for a value, or by one."""
CHECKPOINT_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Fields of configurations that count experts."""
FFN_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size")
"""Fields of configurations that say how wide a layer's inner state is."""
FFN_OF_HIDDEN = 4
"""How many times the hidden size it is where no field says it."""
DEFAULT_SEQUENCE = 512
"""Tokens of a sample of a model whose configuration names no most, as T5."""
WITHOUT_MASK = "torch_without_mask"
"""Name under which torch's attention is registered, where no batch has padding."""
ATTENTION = {True: (WITHOUT_MASK, None, "eager"), False: ("eager", None)}
"""By whether scores are done without: implementations in the order in which they are tried; None
for a model's own choice. A model that has its own table of them does not know the first, and one
that caps its scores knows none that does without them."""


def read_config(path: Path) -> CountedModel:
    """Return the model of a ``config.json``, to be trained on from the checkpoint beside it.

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
    model = model_of_config(table, str(path))
    return dataclasses.replace(model, checkpoint=_checkpoint_type(table))


def _checkpoint_type(table: Mapping[str, Any]) -> str:
    """Return the type of the weights that lie beside a configuration, fp32 where it names none."""
    tables = (_text_part(table), table)
    given = (one.get(name) for one in tables for name in ("dtype", "torch_dtype"))
    return CHECKPOINT_TYPES.get(str(next(filter(None, given), "")).removeprefix("torch."), "fp32")


def model_of_config(table: Mapping[str, Any], source: str = "config.json") -> CountedModel:
    """Return the language model of a configuration, trained as one.

    Args:
        table: ``model_type`` and the sizes of that type; transformers fills in what is left out.
        source: What errors begin with.

    Raises:
        ModelError: transformers is not installed, does not know the type or refuses a size.
    """
    whole, table = table, _text_part(table)
    _refuse_impossible_sizes(table, source)
    config = _config_of(table, source)
    name = str(table.get("_name_or_path") or table["model_type"])
    if whole is not table:
        name += f" (the text part of {whole.get('model_type') or 'its model'} alone)"
    import torch

    with _refused_as(f"{source}: memory is not known of such a model"):
        with torch.device("meta"):
            model = language_model(config)
        counts = (_value(config, name) or 0 for name in LAYER_COUNTS)
        layers = layers_of(model)
        num_layers = sum(counts) or len(layers) or 1
        embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
        inputs = getattr(embedding, "weight", embedding)
        outputs = getattr(output, "weight", inputs)
        longest = _value(config, "max_position_embeddings")
        return CountedModel(
            name=name,
            hidden=inputs.shape[1],
            ffn=_first_number(config, FFN_WIDTHS) or FFN_OF_HIDDEN * inputs.shape[1],
            layers=num_layers,
            heads=_first_number(config, ("num_attention_heads",)),
            kv_heads=_first_number(config, ("num_key_value_heads", "num_attention_heads")),
            seq_length=longest if type(longest) is int and longest > 0 else DEFAULT_SEQUENCE,
            vocab_size=inputs.shape[0],
            own_blocks=_blocks(model, layers),
            own_kept=functools.cache(
                functools.partial(_measured, config, num_layers, outputs.shape[0])
            ),
            tied_numel=inputs.numel() * (output is not None and outputs is inputs),
            has_experts=any(_value(config, name) for name in EXPERT_COUNTS),
        )


def _refuse_impossible_sizes(table: Mapping[str, Any], source: str) -> None:
    given = {name: value for name, value in table.items() if type(value) is int}
    has_layers = any(given.get(name, 0) > 0 for name in LAYER_COUNTS)
    for name in SIZES:
        least = 0 if has_layers and name in LAYER_COUNTS else 1  # an encoder, or a decoder, alone
        if given.get(name, least) < least:
            raise ModelError(f"{source}: {name} = {given[name]}: give at least {least}")


def _first_number(config: Any, names: Iterable[str]) -> int:
    """Return the first of some fields that is a number; 0 where none is."""
    given = (_value(config, name) for name in names)
    return next((value for value in given if type(value) is int), 0)


def _value(config: Any, name: str) -> Any:
    """Return a field; None where there is none, and the most of what layers have of their own."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers from 5.23 on says so of a field that layers have
        return max(getattr(layer, name, None) or 0 for layer in config.per_layer_config)


def _blocks(model: Any, layers: list[Any]) -> Blocks:
    """Return the elements of each parameter: before the layers, layer by layer, behind them.

    What stands between two layers, as an encoder's last norm, is counted with the one before.
    """
    layer_of = {id(one): at for at, layer in enumerate(layers, 1) for one in layer.parameters()}
    blocks: list[list[int]] = [[] for _ in range(len(layers) + 2)]
    at = 0
    for parameter in model.parameters():
        own = layer_of.get(id(parameter))
        if own is None and at == len(layers):
            own = at + 1
        at = max(at, own or 0)
        blocks[at].append(parameter.numel())
    return tuple(map(tuple, blocks))


def _text_part(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the language model in one that has other parts too."""
    text = table.get("text_config")
    return text if isinstance(text, Mapping) else table


def language_model(config: Any, attention: str | None = None) -> Any:
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


def _config_of(table: Mapping[str, Any], source: str) -> Any:
    try:
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        raise ModelError(
            f"{source}: needs transformers, which is not installed: pip install transformers"
        ) from None
    transformers.logging.set_verbosity_error()
    kind = str(table.get("model_type"))
    if kind not in CONFIG_MAPPING:
        hint = did_you_mean(kind, CONFIG_MAPPING, cutoff=0.6)
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
        raise ModelError(f"{words}: {in_a_line(error)}") from None


def layers_of(model: Any) -> list[Any]:
    """Return what a model lists in place of naming it: its layers, as far as a list goes."""
    import torch

    if isinstance(model, torch.nn.ModuleList):
        return list(model)
    return list(itertools.chain.from_iterable(layers_of(child) for child in model.children()))


def _measured(
    config: Any, num_layers: int, vocab_size: int, size: int, sequence: int, is_flash: bool
) -> Kept:
    """Return what one sample leaves, or why that is not known.

    What a model does not compute in a type, as torch's experts on a CPU in fp32, is measured in the
    other one.
    """
    failed: list[str] = []
    for measured_size in (size, FP32_BYTES if size < FP32_BYTES else FP32_BYTES // 2):
        for attention in ATTENTION[is_flash]:
            try:
                saved = _forward(config, measured_size, sequence, attention)
            except Exception as error:  # noqa: BLE001 - whatever the code of a model raises
                failed.append(in_a_line(error))
            else:
                return saved.kept(sequence * vocab_size, num_layers, size / measured_size)
    # The last attempt is the one that asks for least.
    reason = f"a forward of it on tensors without memory fails: {failed[-1]}"
    return Kept(0.0, 0.0, 0.0, 0.0, unknown=reason)


def in_a_line(error: Exception) -> str:
    """Return what an error of somebody else's code says, cut short; else its type."""
    text = " ".join(str(error).split())[:200] or type(error).__name__
    if type(error).__name__ in VALUES_NEEDED:
        return f"its code asks for values, which they do not have ({text})"
    return text


def _forward(config: Any, size: int, sequence: int, attention: str | None) -> _Saved:
    """Run a forward of one sample on tensors without memory, dropout off."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # transformers makes no mask for an implementation of which it knows none, as of no padding.
    AttentionInterface.register(WITHOUT_MASK, sdpa_attention_forward)
    config = copy.deepcopy(config)  # a model writes to its own what it was built with
    config.dtype = torch.float32 if size == FP32_BYTES else torch.bfloat16
    with _silent(), FakeTensorMode():
        with _without_values():
            model = language_model(config, attention).eval()
        saved = _Saved(layers_of(model))
        ids = torch.zeros(1, sequence, dtype=torch.int64)
        inputs = {"input_ids": ids, "labels": ids}
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            model(**inputs)
    saved.leave_out([*model.parameters(), *model.buffers()])
    return saved


class _Saved:
    """Tensors that autograd saves in a forward, one of each storage, by the layer under way."""

    def __init__(self, layers: list[Any]) -> None:
        self._tensors: dict[int, tuple[int, Any]] = {}
        self._calls, self._call = 0, 0  # of a layer; the call under way, 0 outside
        for layer in layers:
            layer.register_forward_pre_hook(self._enter)
            layer.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self._calls += 1
        self._call = self._calls

    def _leave(self, *_: Any) -> None:
        self._call = 0

    def pack(self, tensor: Any) -> Any:
        self._tensors.setdefault(tensor.untyped_storage()._cdata, (self._call, tensor))
        return tensor

    def leave_out(self, tensors: list[Any]) -> None:
        for tensor in tensors:
            self._tensors.pop(tensor.untyped_storage()._cdata, None)

    def kept(self, logits_numel: int, num_layers: int, scale: float) -> Kept:
        """Return what one sample leaves, times ``scale``; logits are told by their size."""
        layers: defaultdict[int, float] = defaultdict(float)
        logits = 0.0
        for call, tensor in self._tensors.values():
            num_bytes = scale * tensor.untyped_storage().nbytes()
            if tensor.numel() == logits_numel:
                logits += num_bytes
            else:
                layers[call] += num_bytes
        head = layers.pop(0, 0.0)
        largest = max(layers.values(), default=0.0)
        return Kept(sum(layers.values()) / num_layers, largest, head, LOSS_COPIES * logits)


def _without_values() -> Any:
    """Build no initial weights, some of which look at values that such tensors do not have."""
    for name in ("initialization", "modeling_utils"):  # from 5 on; before
        found = getattr(importlib.import_module(f"transformers.{name}"), "no_init_weights", None)
        if found is not None:
            return found()
    return contextlib.nullcontext()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep off the screen what the code of a model warns of, and what torch says of its failure."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = was_disabled
