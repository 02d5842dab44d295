"""Any language model of Hugging Face's from its configuration, built without weights or data.

Its parameters are those of transformers' class, and what autograd keeps is read off two forwards on
tensors without memory: of the whole model, and of one with a single layer of each kind.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deep_optimizer_states.checks import did_you_mean
from deep_optimizer_states.predict.model import FP32_BYTES, CountedModel, Kept, ModelError

LOSS_COPIES = 3
"""Arrays of logits when backward begins elsewhere: their logarithms, and two gradients of them."""
LAYER_COUNTS = ("num_hidden_layers", "num_decoder_layers", "decoder_layers")
"""Fields of configurations that count layers of a kind."""
DEFAULT_SEQUENCE = 512
"""Tokens of a sample of a model whose configuration names no most, as T5."""
WITHOUT_MASK = "torch_without_mask"
"""Name under which torch's attention is registered, where no batch has padding."""


def read_config(path: Path) -> CountedModel:
    """Return the model of a ``config.json``.

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
    return model_of_config(table, str(path))


def model_of_config(table: Mapping[str, Any], source: str = "config.json") -> CountedModel:
    """Return the language model of a configuration, trained as one.

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
        return CountedModel(
            name=str(table.get("_name_or_path") or table["model_type"]),
            hidden=config.hidden_size,
            ffn=0,  # such a model has no time, which alone depends on these
            layers=num_layers,
            heads=0,
            kv_heads=0,
            seq_length=getattr(config, "max_position_embeddings", None) or DEFAULT_SEQUENCE,
            vocab_size=config.vocab_size,
            own_blocks=(tensors,),
            own_kept=functools.cache(functools.partial(_measured, config, source)),
            tied_numel=config.vocab_size * config.hidden_size * is_tied,
            has_experts=_has_experts(config),
        )


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
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"{words}: {reason}") from None


def _layer_counts(config: Any) -> dict[str, int]:
    found = {name: getattr(config, name, None) for name in LAYER_COUNTS}
    return {name: count for name, count in found.items() if count}


def _has_experts(config: Any) -> bool:
    return any(getattr(config, name, None) for name in ("num_local_experts", "num_experts"))


def _measured(config: Any, source: str, size: int, sequence: int, is_flash: bool) -> Kept:
    """Return what one sample leaves; layers of several kinds count as their average."""
    # torch multiplies a batch of experts in bf16 alone.
    times = size // 2 if _has_experts(config) else 1
    counts = _layer_counts(config)
    with _refused_as(f"{source}: a forward of it fails"):
        whole, logits = _forward(config, size // times, sequence, is_flash)
        least, _ = _forward(_cut(config, counts), size // times, sequence, is_flash)
    layers = sum(counts.values())
    layer = (whole - least) / (layers - len(counts)) if layers > len(counts) else whole / layers
    head = times * max(0.0, whole - layers * layer)  # below 0 where the first layer keeps less
    return Kept(times * layer, times * layer, head, float(LOSS_COPIES * logits))


def _cut(config: Any, counts: Mapping[str, int]) -> Any:
    """Return the configuration with one layer of each kind."""
    found = copy.deepcopy(config)
    if getattr(config, "layer_types", None):
        found.layer_types = config.layer_types[:1]
    for name in counts:
        setattr(found, name, 1)
    return found


def _forward(config: Any, size: int, sequence: int, is_flash: bool) -> tuple[int, int]:
    """Run a forward of one sample on tensors without memory, dropout off.

    Returns:
        Bytes that autograd saves, parameters and logits left out; bytes of one array of logits.
    """
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
    wide = [found for found in saved.values() if found.numel() == sequence * config.vocab_size]
    sizes = [sum(t.untyped_storage().nbytes() for t in found) for found in (saved.values(), wide)]
    return sizes[0] - sizes[1], sizes[1]
