"""Points of the harness as workloads of the performance model.

Who updates the optimizer state is read from the JSON that DeepSpeed gets, so that a prediction is
of the very run that would be started.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import tomllib
from collections.abc import Mapping
from typing import Any

from configs.schema import Point
from configs.study import default_study
from configs.templates import filled
from deep_optimizer_states.config import read_settings, translate_paper_keys
from deep_optimizer_states.errors import ConfigError
from deep_optimizer_states.predict.memory.architecture import (
    Architecture,
    architecture_of_shape,
    gpt2_of_shape,
)
from deep_optimizer_states.predict.memory.setting import Setting, setting_of
from deep_optimizer_states.predict.model import ModelShape, model_from_table
from deep_optimizer_states.predict.workload import STOCK, StockOffload, Workload, WorkloadError
from launch.ds_json import deepspeed_config

PAPER_MACHINES = ("a100x4", "h100x4")
"""Profiles fitted to the paper's figures, and so to its software."""
PAPER_SOFTWARE = "software.toml"
"""File of the default study that describes the paper's software."""
ZERO_KEYS = {"stage", "offload_optimizer", "offload_param", "sub_group_size"}
"""Keys of ``zero_optimization`` that a prediction depends on."""
OFFLOAD_KEYS = {"device", "ratio"}
"""The same of ``offload_optimizer``."""
HARMLESS_KEYS = {
    *("pin_memory", "buffer_count", "fast_init"),
    *("reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "contiguous_gradients"),
    *("allgather_partitions", "reduce_scatter", "round_robin_gradients"),
    *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance"),
    "stage3_gather_16bit_weights_on_model_save",
}
"""Keys of both that do not change who updates what. The performance model takes DeepSpeed's own
values for the sizes among them."""


class AsOf(enum.StrEnum):
    """Whose software a point stands for."""

    PAPER = "paper"
    """The authors' fork of DeepSpeed 0.13."""
    TODAY = "today"
    """What the harness runs: stock DeepSpeed, and this plugin."""

    @property
    def words(self) -> str:
        """For reports."""
        return _WORDS[self]


_WORDS = {
    AsOf.PAPER: "the paper's DeepSpeed 0.13 and its plugin",
    AsOf.TODAY: "today's DeepSpeed and this plugin",
}


def as_of(word: str | None, machine: str) -> AsOf:
    """Return the software that was asked for, else that to which the rates were fitted."""
    if word is not None:
        return AsOf(word)
    return AsOf.PAPER if machine in PAPER_MACHINES else AsOf.TODAY


def workload_of(point: Point, when: AsOf) -> Workload:
    """Return the workload that a run of ``point`` would be.

    Args:
        point: Gives the model, the ranks and the batch; the rest is in the JSON made of it.
        when: Whose software runs it.

    Raises:
        WorkloadError: The performance model does not know such a run; names the setting.
    """
    pipelines = "no pipeline; `python -m optimus_cc predict` knows GPT-2's"
    _need(point.pp == 1, "pp", point.pp, pipelines)
    try:
        config = translate_paper_keys(deepspeed_config(point))
        plugin = read_settings(config)
    except ConfigError as error:
        raise WorkloadError(str(error)) from None
    setting = setting_of(config, gpt_of(point), point.dp)
    stage, state_at, weights_at = setting.stage, setting.optimizer_at, setting.weights_at
    offloaded = "an optimizer that is offloaded to the CPU"
    resident = "weights on the device or in host memory"
    after = "updates that begin once the gradients' norm is known"
    ahead_bytes = plugin.prefetch_memory_bytes
    is_compiled = (config.get("compile") or {}).get("deepcompile")
    _need(stage == 3, "zero_optimization.stage", stage, "ZeRO stage 3 alone")
    _need(state_at == "cpu", "offload_optimizer.device", state_at, offloaded)
    _need(weights_at != "nvme", "offload_param.device", weights_at, resident)
    _need(not is_compiled, "compile.deepcompile", True, "runs without DeepCompile")
    _need(not plugin.step_before_norm, "step_before_norm", True, after)
    _need(not ahead_bytes, "prefetch_memory_bytes", ahead_bytes, after)
    _check_keys(config)
    own: dict[str, Any] = {"software": STOCK, "offload_ratio": setting.ratio}
    if plugin.enabled:
        own = {
            "policy": plugin.policy,
            "stride": plugin.stride,
            "offload_ratio": plugin.ratio,
            "just_in_time_forward": plugin.just_in_time_forward,
            "keeps_device_grads": plugin.keep_grads_on_device,
            "tile_numel": plugin.tile_numel,
        }
    workload = Workload(
        model=_shape_of(point),
        dp=point.dp,
        tp=point.tp,
        micro_batch_size=point.micro_batch_size,
        accumulation=point.accumulation,
        subgroup_numel=setting.subgroup_numel,
        activation_checkpointing=point.activation_checkpointing,
        materialized_attention=point.attention == "local",
        hog_share=_taken_share(point),
        dtype=setting.dtype,
        weights_on_host=setting.weights_at == "cpu",
        **own,
    )
    return workload if when is AsOf.TODAY else _with_paper_software(workload)


def setting_of_point(
    point: Point,
    architecture: Architecture | None = None,
    **others: Any,  # noqa: ANN401
) -> Setting:
    """Return the run that a point would be, for its memory alone: any stage, any offload.

    Args:
        point: Gives the model, the ranks and the batch; the rest is in the JSON made of it.
        architecture: What a rank trains, where it is no GPT of megatron-core.
        others: Fields of :class:`Setting` that the trainer decides.

    Raises:
        WorkloadError: The model of memory does not know such a run; names the setting.
    """
    config = deepspeed_config(point)
    _check_keys(config)
    fields: dict[str, Any] = {
        "accumulation": point.accumulation,
        "sequence": point.model.seq_length,
        "checkpointing": point.activation_checkpointing,
        "is_flash": point.attention != "local",
    }
    return setting_of(config, architecture or gpt_of(point), point.dp, **{**fields, **others})


def gpt_of(point: Point) -> Architecture:
    """Return a point's GPT as megatron-core builds it, of one tensor-parallel rank."""
    shape = model_from_table(point.model.model_dump(include=set(ModelShape.__dataclass_fields__)))
    make = architecture_of_shape if point.model.architecture == "llama" else gpt2_of_shape
    return make(shape, point.tp)


def _taken_share(point: Point) -> float:
    """Return the share of each device's time that companions take."""
    rows = point.study.companions.values() if point.study else ()
    return sum(float(filled(row.device_share, point.values) or 0.0) for row in rows)


def _shape_of(point: Point) -> ModelShape:
    """Return the model as the performance model knows models.

    Raises:
        WorkloadError: The model is built otherwise, and so has other parameters.
    """
    shape = model_from_table(point.model.model_dump(include=set(ModelShape.__dataclass_fields__)))
    counts = (shape.num_parameters(point.tp), point.model.num_parameters(point.tp))
    if counts[0] != counts[1]:
        raise WorkloadError(
            f"model = {shape.name!r}: has {counts[1]:,} parameters; the performance model knows "
            f"GPTs with SwiGLU, RMSNorm and no bias, of which one of these sizes has {counts[0]:,}"
        )
    return shape


@functools.cache
def paper_software() -> dict[str, StockOffload]:
    """Return the modes of the paper's software by the policy of today's plugin; "" for stock."""
    folder = default_study().folder
    assert folder is not None
    table = tomllib.loads((folder / PAPER_SOFTWARE).read_text(encoding="utf-8"))
    return {
        policy: StockOffload(**{key: value for key, value in mode.items() if key != "policies"})
        for mode in table.values()
        for policy in mode["policies"]
    }


def _with_paper_software(workload: Workload) -> Workload:
    policy, modes = workload.policy if workload.software is None else "", paper_software()
    for is_unknown, field, value in (
        (workload.weights_on_host, "offload_param.device", "cpu"),
        (policy and workload.just_in_time_forward, "just_in_time_forward", True),
        (policy not in modes, "policy", policy),
    ):
        if is_unknown:
            raise WorkloadError(
                f"{field} = {value!r}: the paper's software has no such setting; predict today's "
                "with --as-of today"
            )
    return dataclasses.replace(workload, software=modes[policy])


def _check_keys(config: Mapping[str, Any]) -> None:
    """Refuse another optimizer, and settings of ZeRO of which it is not known what they change."""
    zero = config.get("zero_optimization") or {}
    _only_known(zero, ZERO_KEYS, "zero_optimization")
    for name in ("offload_optimizer", "offload_param"):
        _only_known(zero.get(name) or {}, OFFLOAD_KEYS, name)
    optimizer = (config.get("optimizer") or {}).get("type")
    _need(optimizer in ("Adam", "AdamW"), "optimizer.type", optimizer, "Adam and AdamW")


def _only_known(table: Mapping[str, Any], known: set[str], where: str) -> None:
    """Refuse settings of which it is not known what they change; those that are off are fine."""
    for key, value in table.items():
        is_off = not value or (isinstance(value, Mapping) and value.get("device") == "none")
        is_known = key in known | HARMLESS_KEYS or is_off
        _need(is_known, f"{where}.{key}", value, "stock ZeRO-3 offload and this plugin")


def _need(is_known: bool, field: str, value: object, known: str) -> None:
    if not is_known:
        raise WorkloadError(f"{field} = {value!r}: the performance model knows {known}")
