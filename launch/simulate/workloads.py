"""Points of the harness as workloads of the performance model.

Who updates the optimizer state is read from the JSON that DeepSpeed gets, so that a prediction is
of the very run that would be started.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Mapping
from typing import Any

from configs.schema import Point
from configs.study import default_study
from configs.templates import filled
from deep_optimizer_states.config import read_settings, translate_paper_keys
from deep_optimizer_states.errors import ConfigError
from deep_optimizer_states.predict.model import Model, model_from_table
from deep_optimizer_states.predict.workload import (
    StockOffload,
    Workload,
    WorkloadError,
    workload_of_json,
)
from launch.ds_json import deepspeed_config

PAPER_MACHINES = ("a100x4", "h100x4")
"""Profiles fitted to the paper's figures, and so to its software."""
PAPER_SOFTWARE = "software.toml"
"""File of the default study that describes the paper's software."""
KNOWN_KEYS = {
    *("stage", "offload_optimizer", "offload_param", "sub_group_size", "device", "ratio"),
    *("pin_memory", "buffer_count", "fast_init"),
    *("reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "contiguous_gradients"),
    *("allgather_partitions", "reduce_scatter", "round_robin_gradients"),
    *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance"),
    "stage3_gather_16bit_weights_on_model_save",
}
"""Keys of ``zero_optimization`` and its blocks that are modelled, or change neither who updates
what nor the memory of it."""


def workload_of(point: Point, of_paper: bool = False) -> Workload:
    """Return the workload that a run of ``point`` would be, for its time.

    The point gives the model, the ranks and the batch; the rest is in the JSON made of it. Stock
    DeepSpeed and this plugin run it, or the paper's fork of DeepSpeed 0.13.

    Raises:
        WorkloadError: The performance model does not know such a run; names the setting.
    """
    pipelines = "no pipeline; `python -m optimus_cc predict` knows GPT-2's"
    _need(point.pp == 1, "pp", point.pp, pipelines)
    _need(not point.link_mbit, "link_mbit", point.link_mbit, "links as they are")
    config = _known_json(point)
    plugin = read_settings(config)
    is_compiled = (config.get("compile") or {}).get("deepcompile")
    _need(not is_compiled, "compile.deepcompile", True, "runs without DeepCompile")
    early, known = plugin.step_before_norm, "updates that begin once the gradients' norm is known"
    _need(not early, "step_before_norm", early, known)
    rows = point.study.companions.values()
    taken = sum(float(filled(row.device_share, point.values) or 0.0) for row in rows)
    workload = workload_of_point(point, hog_share=taken)
    return _with_paper_software(workload) if of_paper else workload


def workload_of_point(point: Point, hog_share: float = 0.0) -> Workload:
    """Return the run that a point would be, for its memory: any stage, any offload.

    The point gives the model, the ranks and the batch; the rest is in the JSON made of it. A share
    of the device's time is others'.

    Raises:
        WorkloadError: The model of memory does not know such a run; names the setting.
    """
    fields: dict[str, Any] = {
        "dp": point.dp,
        "tp": point.tp,
        "accumulation": point.accumulation,
        "micro_batch_size": point.micro_batch_size,
        "sequence_length": point.model.seq_length,
        "activation_checkpointing": point.activation_checkpointing,
        "materialized_attention": point.attention == "local",
    }
    return workload_of_json(_known_json(point), gpt_of(point), hog_share=hog_share, **fields)


def gpt_of(point: Point) -> Model:
    """Return a point's GPT as megatron-core builds it."""
    names = {item.name for item in dataclasses.fields(Model) if item.init}
    return model_from_table(point.model.model_dump(include=names))


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
        (workload.weights_on_host, "offload_param.device", workload.weights_at),
        (policy and workload.just_in_time_forward, "just_in_time_forward", True),
        (policy not in modes, "policy", policy),
    ):
        if is_unknown:
            raise WorkloadError(
                f"{field} = {value!r}: the paper's software has no such setting; predict today's "
                "on a machine other than h100x4 and a100x4"
            )
    return dataclasses.replace(workload, software=modes[policy])


def _known_json(point: Point) -> dict[str, Any]:
    """Return DeepSpeed's JSON of a point.

    Raises:
        WorkloadError: It has another optimizer, or settings of which nobody knows what they change.
    """
    try:
        config = translate_paper_keys(deepspeed_config(point))
        read_settings(config)
    except ConfigError as error:
        raise WorkloadError(str(error)) from None
    zero = config.get("zero_optimization") or {}
    for name, table in {"zero_optimization": zero, **_blocks(zero)}.items():
        for key, value in table.items():
            is_off = not value or (isinstance(value, Mapping) and value.get("device") == "none")
            is_known = key in KNOWN_KEYS or is_off
            _need(is_known, f"{name}.{key}", value, "stock ZeRO-3 offload and this plugin")
    optimizer = (config.get("optimizer") or {}).get("type")
    _need(optimizer in ("Adam", "AdamW"), "optimizer.type", optimizer, "Adam and AdamW")
    return config


def _blocks(zero: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {name: zero.get(name) or {} for name in ("offload_optimizer", "offload_param")}


def _need(is_known: bool, field: str, value: object, known: str) -> None:
    if not is_known:
        raise WorkloadError(f"{field} = {value!r}: the performance model knows {known}")
