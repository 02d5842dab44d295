"""The harness's trainer with a pipeline: megatron-core's GPT over TP, PP and DP."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from configs.schema import Point
from deep_optimizer_states.predict.memory.architecture import FP32_BYTES, GptKept
from deep_optimizer_states.predict.memory.setting import Setting
from launch.ds_json import deepspeed_config
from launch.simulate.workloads import gpt_of, setting_of_point
from launch.trainers.own import OwnTrainer
from optimus_cc.settings import Settings

MODULE = "launch.trainer.pipeline.pretrain_gpt"
COMPRESSION = "optimus_cc"
"""Key of ``ds_config.json`` that holds what is compressed."""
_KEPT = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "zero_optimization",
    COMPRESSION,
)
"""What of a run's ``ds_config.json`` means something without DeepSpeed."""


def _errors_bytes(point: Point, stage: int, numel: int) -> float:
    """Bytes of what messages and gradients of a stage left out; queries are small beside them."""
    settings = Settings(**deepspeed_config(point).get(COMPRESSION, {}))
    if not settings.use_error_feedback:
        return 0.0
    message = point.model.seq_length * point.micro_batch_size * point.model.hidden
    kept = message * (settings.inter_grad_comp and stage > 0)
    kept += numel * (settings.compresses_gradients_of(stage) and point.dp > 1)
    return float(FP32_BYTES * kept)


@dataclass(frozen=True)
class PipelineTrainer(OwnTrainer):
    """megatron-core's GPT over stages, shards and replicas, whose communication may be compressed.

    There is no DeepSpeed: optimizer state is on the device of the rank, whole.
    """

    name: ClassVar[str] = "megatron-pipeline"
    default_module: ClassVar[str] = MODULE
    module: str = MODULE

    def refuse(self, point: Point) -> list[str]:
        """Why this trainer cannot run a point."""
        needed = {"zero_stage": 0, "offload_optimizer": "none", "offload_param": "none"}
        reasons = [
            f"{name} = {getattr(point, name)!r}: --trainer {self.name} runs without DeepSpeed; "
            f"give {name} = {value!r}"
            for name, value in needed.items()
            if getattr(point, name) != value
        ]
        if self.user_json is not None:
            reasons.append(
                f"--deepspeed-config {self.user_json}: --trainer {self.name} runs without "
                "DeepSpeed; leave it out"
            )
        if point.dtype == "fp16":
            reasons.append(
                f"dtype = 'fp16': --trainer {self.name} has no loss scale; give 'bf16' or 'fp32'"
            )
        if point.dtype == "bf16" and point.grad_accum_dtype == "fp32":
            reasons.append(
                f"grad_accum_dtype = 'fp32': --trainer {self.name} sums a bf16 model's gradients "
                "in bf16; give grad_accum_dtype = 'bf16', or dtype = 'fp32'"
            )
        if point.model.layers < point.pp:
            reasons.append(
                f"pp = {point.pp}: a stage needs a layer, and the model has {point.model.layers}; "
                "give a smaller pp"
            )
        return [*reasons, *self._cannot_continue(point)]

    def settings(self, point: Point, on_gpu: bool) -> list[Setting]:
        """Say what a rank of each stage holds.

        In 1F1B a stage keeps as many micro-batches' activations as there are stages from it on.
        """
        whole, last = gpt_of(point), point.pp - 1
        first, *rest, end = whole.blocks
        assert isinstance(whole.kept, GptKept)
        found = []
        for stage, layers in enumerate(point.model.layers_of_stages(point.pp)):
            blocks, kept = rest[:layers], replace(whole.kept, head=0.0, logits=0.0)
            if not stage:
                blocks = [first, *blocks]
            if stage == last:
                is_tied = last and point.model.architecture == "gpt2"
                blocks, kept = [*blocks, end, first[:1] if is_tied else ()], whole.kept
            part = replace(whole, blocks=tuple(blocks), num_layers=layers, kept=kept)
            found.append(
                setting_of_point(
                    point,
                    part,
                    in_flight=min(last - stage + 1, point.accumulation),
                    compression_bytes=_errors_bytes(point, stage, part.numel),
                )
            )
        return found

    def _cannot_continue(self, point: Point) -> list[str]:
        """Queries and errors of the compression belong to the engine that made them."""
        if self.checkpoint is None:
            return []
        saved = self.checkpoint.point.get("engine")
        other = (
            f"engine = {point.engine!r}: the checkpoint {self.checkpoint.path} was saved with "
            f"{saved!r}; give that, or begin without a checkpoint"
        )
        return [*([other] if saved != point.engine else []), *self.checkpoint.differences(point)]

    def ds_config(self, point: Point) -> dict[str, Any]:
        """What of DeepSpeed's config the program reads: batch sizes and compression."""
        config = deepspeed_config(point)
        return {key: config[key] for key in _KEPT if key in config}
