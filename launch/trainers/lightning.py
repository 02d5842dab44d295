"""Lightning's program for film reviews, each of its strategies an engine of a study."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from configs.schema import Model, Point
from deep_optimizer_states.predict.memory.architecture import FP32_BYTES, Architecture, GptKept
from deep_optimizer_states.predict.memory.setting import Setting
from deep_optimizer_states.predict.workload import WorkloadError
from launch.ds_json import deepspeed_config
from launch.hosts.ranks import Program
from launch.records.run_folder import RunFolder
from launch.simulate.workloads import setting_of_point
from launch.trainers.protocol import Trainer

MODULE = "launch.frameworks.imdb.train"
WITHOUT_DEEPSPEED = "without_deepspeed"
"""Key of an engine's ``ds_config`` that leaves DeepSpeed out altogether."""
_LIGHTNINGS_OWN = ("optimizer", "gradient_accumulation_steps", "gradient_clipping")
"""What Lightning itself puts into DeepSpeed's config, and refuses to find there."""
NUM_CLASSES = 2
_DATA = ("synthetic-reviews", "imdb-reviews")


def _prepared(name: str, makes: bool) -> str | None:
    # Tokenizing needs packages that no other trainer loads.
    from launch.frameworks.imdb.files import prefix_if_made, prepared

    return prepared(name) if makes else prefix_if_made(name)


def encoder_of(model: Model, on_gpu: bool) -> Architecture:
    """Count the parameters of the classifier, and what autograd keeps of it.

    It has no output layer over the vocabulary. Dropout keeps masks: a byte a value on a GPU, and on
    a CPU a number, for the scores too.
    """
    hidden, ffn = model.hidden, model.ffn
    square, norm = (hidden * hidden, hidden), (hidden, hidden)
    attention = (3 * hidden * hidden, 3 * hidden, *square)
    layer = (*attention, *norm, ffn * hidden, ffn, hidden * ffn, hidden, *norm)
    classifier = (*square, NUM_CLASSES * hidden, NUM_CLASSES)
    of_masks = FP32_BYTES if on_gpu else 1  # how many numbers of a mask take the room of one
    kept = GptKept(
        4.0 * hidden + 2.0 * ffn,
        model.heads,
        inner=hidden,
        key_value=hidden,
        scores=3,
        fp32_elements=(2.0 * hidden + ffn) / of_masks,
        head_fp32=hidden / of_masks,
    )
    blocks = ((model.vocab_size * hidden,), *(layer,) * model.layers, classifier)
    return Architecture(model.name, blocks, model.layers, hidden, 0, model.seq_length, kept)


@dataclass(frozen=True)
class LightningTrainer(Trainer):
    """The program of film reviews, by :mod:`launch.frameworks.imdb.train`."""

    name: ClassVar[str] = "lightning"
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    own_data: ClassVar[Mapping[str, Callable[[str, bool], str | None]]] = dict.fromkeys(
        _DATA, _prepared
    )
    writes_metrics: ClassVar[bool] = True
    end_mark: ClassVar[str] = "'end' line in metrics.jsonl"

    @classmethod
    def of(cls, given: Namespace) -> Self:
        """It has no options."""
        return cls()

    def refuse(self, point: Point) -> list[str]:
        """Why this trainer cannot run a point."""
        reasons = super().refuse(point)
        if point.tp > 1:
            reasons.append(f"tp = {point.tp}: --trainer {self.name} splits no layer; give tp = 1")
        if point.data_prefix not in _DATA:
            reasons.append(
                f"data_prefix = {point.data_prefix!r}: --trainer {self.name} reads reviews; give "
                f"{' or '.join(map(repr, _DATA))}"
            )
        missing = [name for name in ("dropout", "loader_workers") if name not in point.values]
        if missing:
            reasons.append(
                f"the study has no field {missing[0]!r}, which --trainer {self.name} needs"
            )
        return reasons

    def ds_config(self, point: Point) -> dict[str, Any]:
        """DeepSpeed's config of a run; empty for an engine that goes without DeepSpeed."""
        config = deepspeed_config(point)
        if config.pop(WITHOUT_DEEPSPEED, False):
            return {}
        return {key: value for key, value in config.items() if key not in _LIGHTNINGS_OWN}

    def settings(self, point: Point, on_gpu: bool) -> list[Setting]:
        """Say what the ranks hold: the encoder, whose attention writes its scores on a CPU."""
        if "dropout" not in point.values:
            raise WorkloadError(f"dropout: the study has no such field, which {self.name} needs")
        return [setting_of_point(point, encoder_of(point.model, on_gpu), is_flash=on_gpu)]

    def program(self, point: Point, folder: Path, data_prefix: str) -> Program:
        """What every rank runs; point and data stand in the folder."""
        run_json = folder / "run.json"
        return Program(MODULE, (str(run_json),), run_json)

    def has_ended(self, folder: RunFolder, point: Point) -> bool:
        """Whether the program wrote its last line."""
        return folder.has_ended()
