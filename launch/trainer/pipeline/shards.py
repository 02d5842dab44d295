"""A rank's file of a checkpoint: weights by names that tell their place in the whole model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from configs.errors import ConfigError

FORMAT = 2
"""Of a rank's file; the first format had a list of weights without names."""
WORD_EMBEDDING = "embedding.word_embeddings.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def file_name(rank: int) -> str:
    """Name of a rank's file in a checkpoint's folder."""
    return f"rank-{rank:05d}.pt"


def named_weights(model: Any) -> dict[str, torch.nn.Parameter]:  # noqa: ANN401 - GPTModel
    """A stage's weights by the names that they have in a model without a pipeline.

    megatron-core counts the layers of every stage from 0, and calls the last stage's copy of a tied
    embedding an output layer: here both copies have one name.
    """
    numbers = [layer.layer_number - 1 for layer in model.decoder.layers]

    def whole(name: str) -> str:
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            return WORD_EMBEDDING
        return _LAYER.sub(lambda found: f"decoder.layers.{numbers[int(found[1])]}.", name)

    return {whole(name): weight for name, weight in model.named_parameters()}


def description(model: Any, groups: Any) -> dict[str, Any]:  # noqa: ANN401 - megatron-core's
    """What merging needs to know of a rank's weights.

    Returns:
        ``format``; ``place``: the rank's index in each kind of group; ``split_along``: for each
        weight the axis along which tensor-parallel ranks have a part each, None where all have
        the same.
    """

    def axis(weight: Any) -> int | None:  # noqa: ANN401 - a parameter with megatron-core's marks
        is_split = getattr(weight, "tensor_model_parallel", False)
        return weight.partition_dim if is_split else None

    return {
        "format": FORMAT,
        "place": {name: getattr(groups, name).rank() for name in ("tp", "pp", "dp")},
        "split_along": {name: axis(weight) for name, weight in named_weights(model).items()},
    }


def read_shard(path: Path, device: torch.device | str = "cpu", **options: Any) -> dict[str, Any]:  # noqa: ANN401
    """Read a rank's file.

    Args:
        path: of the file.
        device: where tensors go.
        options: of ``torch.load``.

    Raises:
        ConfigError: it cannot be read, or is of the format before this one.
    """
    try:
        # Queries and errors have keys that are tuples, which is all that is not a tensor.
        state = torch.load(path, map_location=device, weights_only=True, **options)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if state.get("format") != FORMAT:
        raise ConfigError(
            f"{path}: format = {state.get('format', 1)}: this trainer reads {FORMAT}, in which "
            "weights have names; train anew, or continue with the version that saved it"
        )
    return dict(state)
