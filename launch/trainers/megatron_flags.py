"""Flags of Megatron-DeepSpeed's ``pretrain_gpt.py`` for a point, and its DeepSpeed config.

Pure functions. The names are those of the commit in ``third_party/versions.toml``; nobody edits
what comes out. Megatron-DeepSpeed makes optimizer and learning-rate schedule itself, from flags.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.schema import Point
from configs.templates import filled
from launch.ds_json import deepspeed_config


@dataclass(frozen=True)
class MegatronFiles:
    """What the flags point to."""

    data_prefix: str
    """Prefix of the ``.bin`` and ``.idx``."""
    ds_config: Path
    """DeepSpeed's config."""
    index_cache: Path
    """Folder for the order of samples; the data set itself may be read-only."""


_ONLY = {
    "model.architecture": "llama",
    "attention": "local",
    "dtype": "bf16",
    "zero_stage": 3,
    "offload_optimizer": "cpu",
    "offload_param": "none",
    "save_interval": 0,
    "eval_interval": 0,
}
"""Fields that these flags say in one way alone, which is the paper's."""


_FLAGS = """
--tensor-model-parallel-size {point.tp}
--num-layers {model.layers}
--hidden-size {model.hidden}
--ffn-hidden-size {model.ffn}
--num-attention-heads {model.heads}
--num-key-value-heads {model.kv_heads}
--seq-length {model.seq_length}
--max-position-embeddings {model.seq_length}
--use-rotary-position-embeddings
--untie-embeddings-and-output-weights
--swiglu
--normalization rmsnorm
--disable-bias-linear
--bf16
--no-query-key-layer-scaling
--attention-dropout 0
--hidden-dropout 0
--data-path {files.data_prefix}
--data-impl mmap
--data-cache-path {files.index_cache}
--split {point.split}
--tokenizer-type NullTokenizer
--vocab-size {vocab_size}
--micro-batch-size {point.micro_batch_size}
--global-batch-size {point.global_batch_size}
--train-iters {point.iterations}
--seed {point.seed}
--lr {point.lr}
--min-lr {point.min_lr}
--lr-decay-style cosine
--lr-warmup-iters {point.lr_warmup_iterations}
--weight-decay {point.weight_decay}
--clip-grad {point.clip_grad}
--optimizer adam
--adam-beta1 {point.adam_beta1}
--adam-beta2 {point.adam_beta2}
--adam-eps {point.adam_eps}
--log-interval 1
--save-interval {never}
--eval-interval {never}
--eval-iters 0
--deepspeed
--deepspeed_config {files.ds_config}
--zero-stage 3
--no-pipeline-parallel
--cpu-optimizer
"""
"""Split into words before values are filled in, so that a value may hold blanks."""


def flag_limits(point: Point, paper_keys: bool) -> list[str]:
    """What a point asks for that the flags, or the paper's fork, cannot say."""
    reasons = [
        f"{field} = {given!r}: --trainer megatron-deepspeed knows {value!r} alone; give that"
        for field, value in _ONLY.items()
        if (given := operator.attrgetter(field)(point)) != value
    ]
    if not paper_keys:
        return reasons
    if not point.row.keys:
        reasons.append(f"engine '{point.engine}': the paper's fork has no keys for it")
    if point.values.get("just_in_time"):
        reasons.append("just_in_time = true: the paper's fork has no such forward; give false")
    if point.values.get("stride") == 1:
        reasons.append("stride = 1: the paper's fork needs 2 or more")
    return reasons


def megatron_flags(point: Point, files: MegatronFiles, on_gpu: bool) -> list[str]:
    """Arguments of ``pretrain_gpt.py``.

    Args:
        point: the run; one that :func:`flag_limits` has nothing against.
        files: data, DeepSpeed's config, cache.
        on_gpu: whether the ranks use CUDA; without it Megatron's fused kernels are switched off.
    """
    words = [*_FLAGS.split()]
    if point.activation_checkpointing:
        words += ["--checkpoint-activations", "--deepspeed-activation-checkpointing"]
    # Of no effect under DeepSpeed, but on by default, and refused without apex.
    words.append("--no-gradient-accumulation-fusion")
    if not on_gpu:
        words += ["--no-masked-softmax-fusion", "--distributed-backend", "gloo"]
    values = {
        "point": point,
        "model": point.model,
        "files": files,
        # The text is tokens already. This tokenizer counts its end of document to the vocabulary,
        # as the last token, which is where GPT-2's is.
        "vocab_size": point.model.vocab_size - 1,
        # Neither a checkpoint nor an evaluation within a run.
        "never": point.iterations + 1,
    }
    return [word.format_map(values) for word in words]


def megatron_ds_config(point: Point, paper_keys: bool) -> dict[str, Any]:
    """DeepSpeed's config for Megatron-DeepSpeed: without the optimizer, which comes from flags.

    Args:
        point: the run.
        paper_keys: ask for the engine in the keys of the paper's fork of DeepSpeed, in place of our
            plugin's block.
    """
    config = deepspeed_config(point)
    del config["optimizer"]
    block = config.pop("deep_optimizer_states", None)
    if not paper_keys:
        return config if block is None else {**config, "deep_optimizer_states": block}
    # A hybrid update brings its asynchronous gradients with it.
    default = {
        "prefetch_optimizer": 0,
        "part_grads_async": int(block is not None),
        "prefetch_optimizer_gap": 0,
    }
    own = filled(point.row.keys, point.values)
    keys = {key: value for key, value in own.items() if not isinstance(value, list)}
    ratio = point.value("offload_ratio")
    config["zero_optimization"]["offload_optimizer"] |= {"ratio": ratio, **default, **keys}
    return config
