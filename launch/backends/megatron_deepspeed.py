"""A checkout of Megatron-DeepSpeed, the user's own: its flags, and its config of DeepSpeed.

Flags have the names of the commit in ``third_party/versions.toml``. Megatron-DeepSpeed makes
optimizer and learning-rate schedule itself, from flags.
"""

from __future__ import annotations

import functools
import operator
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from configs.errors import ConfigError
from configs.files import last_lines
from configs.schema import Point
from launch.backends.protocol import Trainer
from launch.ds_json import deepspeed_config
from launch.feasibility import Host, probe_machine, runs_on_gpu
from launch.identity import git_state
from launch.launchers import Program
from launch.records import RunFolder

_SCRIPT = Path(__file__).with_name("run_megatron.py")
_CONSUMED = re.compile(r"\| consumed samples:\s*(\d+) \|")
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
"""Fields that the flags say in one way alone, which is the paper's."""
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
--data-path {data_prefix}
--data-impl mmap
--data-cache-path {folder}/index-cache
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
--deepspeed_config {folder}/ds_config.json
--zero-stage 3
--no-pipeline-parallel
--cpu-optimizer
"""
"""Split into words before values are filled in, so that a value may hold blanks."""


@dataclass(frozen=True)
class MegatronDeepSpeed(Trainer):
    """The script ``pretrain_gpt.py`` of a checkout that the user names."""

    name: ClassVar[str] = "megatron-deepspeed"
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "--megatron-dir": {
            "type": Path,
            "metavar": "DIR",
            "help": "a checkout of Megatron-DeepSpeed",
        },
        "--megatron-flag": {
            "action": "append",
            "default": [],
            "metavar": "WORD",
            "help": "one more word of pretrain_gpt.py's flags: --megatron-flag=--use-flash-attn-v2",
        },
    }
    writes_metrics: ClassVar[bool] = False
    end_mark: ClassVar[str] = "last iteration in the log"

    megatron_dir: Path
    """The checkout; it is compiled in part when it is run, so it must be writable."""
    more_flags: tuple[str, ...] = ()
    """Added to the checkout's flags."""

    @classmethod
    def of(cls, given: Namespace) -> Self:
        if given.megatron_dir is None:
            raise ConfigError(f"--trainer {cls.name} needs --megatron-dir DIR, its checkout")
        directory = given.megatron_dir.resolve()
        if not (directory / "pretrain_gpt.py").is_file():
            raise ConfigError(
                f"--megatron-dir {str(given.megatron_dir)!r}: no pretrain_gpt.py there; "
                "`make third-party NAME=megatron-deepspeed` makes a checkout"
            )
        return cls(directory, tuple(given.megatron_flag))

    @property
    def versions(self) -> dict[str, str]:
        state = git_state(self.megatron_dir) or {}
        commit = state.get("commit", "no git checkout")
        changes = state.get("changes_sha256", "")[:16]
        text = f"{commit}+{changes}" if changes else str(commit)
        flags = " ".join(self.more_flags)
        return {self.name: text, **({"megatron-flags": flags} if flags else {})}

    def refuse(self, point: Point) -> list[str]:
        return super().refuse(point) + [
            f"{field} = {given!r}: --trainer megatron-deepspeed knows {value!r} alone; give that"
            for field, value in _ONLY.items()
            if (given := operator.attrgetter(field)(point)) != value
        ]

    def ds_config(self, point: Point) -> dict[str, Any]:
        config = deepspeed_config(point)
        del config["optimizer"]
        return config

    def program(self, point: Point, folder: Path, data_prefix: str) -> Program:
        flags = megatron_flags(point, folder, data_prefix, runs_on_gpu(point, this_machine()))
        words = (str(self.megatron_dir), *flags, *self.more_flags)
        return Program(str(_SCRIPT), words, is_module=False)

    def environment(self, point: Point) -> dict[str, str]:
        return {} if runs_on_gpu(point, this_machine()) else {"DS_ACCELERATOR": "cpu"}

    def has_ended(self, folder: RunFolder, point: Point) -> bool:
        found = (_CONSUMED.search(line) for line in last_lines(folder.log, 2000, 2**20))
        consumed = max((int(match[1]) for match in found if match), default=0)
        return consumed >= point.iterations * point.global_batch_size


this_machine: Callable[[], Host] = functools.cache(probe_machine)
"""Asked once: it may start a process that loads torch."""


def megatron_flags(point: Point, folder: Path, data_prefix: str, on_gpu: bool) -> list[str]:
    """Return the arguments of ``pretrain_gpt.py``; without CUDA no fused kernels of Megatron's.

    The order of samples is kept in the run's folder, since data may be read-only.
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
        "data_prefix": data_prefix,
        "folder": folder,
        # The text is tokens already. This tokenizer counts its end of document to the vocabulary,
        # as the last token, which is where GPT-2's is.
        "vocab_size": point.model.vocab_size - 1,
        # Neither a checkpoint nor an evaluation within a run.
        "never": point.iterations + 1,
    }
    return [word.format_map(values) for word in words]
