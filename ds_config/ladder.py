"""The ladder of settings from fastest to leanest, with what each takes and how long it would be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.predict.machine import Machine
from deep_optimizer_states.predict.memory.architecture import Architecture
from deep_optimizer_states.predict.memory.peaks import Peaks, peaks_of
from deep_optimizer_states.predict.memory.setting import setting_of
from deep_optimizer_states.predict.model import ModelShape
from deep_optimizer_states.predict.predict import predict
from deep_optimizer_states.predict.workload import STOCK, Workload

USABLE = 0.97
"""Share of a memory that a run may take."""
SMALL_BUCKET_NUMEL = 50_000_000
SMALL_LIVE_NUMEL = 100_000_000
"""Of the rung with smaller buckets, in place of DeepSpeed's 5e8 and 1e9."""
SUBGROUP_NUMEL = 100_000_000
"""``sub_group_size`` of the plugin's rung."""
ADAM = {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class Room:
    """What there is: of one node, whose ranks share its host memory.

    Attributes:
        gpus: Ranks in all.
        ranks_a_node: Of them on one node.
        device_bytes: Of one GPU; None without one.
        host_bytes: Of one node.
        nvme: A folder on a local disk; empty without one.
        machine: The profile with its rates; None where memory alone is given.
    """

    gpus: int
    ranks_a_node: int
    device_bytes: float | None
    host_bytes: float
    nvme: str = ""
    machine: Machine | None = None


@dataclass(frozen=True)
class Task:
    """What is to be trained.

    Attributes:
        architecture: The model.
        shape: The same for the performance model; None where it does not know such a model.
        sequence: Tokens a sample.
        micro_batch: Samples a rank would like to handle at once.
        dtype: Of weights.
    """

    architecture: Architecture
    shape: ModelShape | None
    sequence: int
    micro_batch: int
    dtype: str


@dataclass(frozen=True)
class Rung:
    """One setting.

    Attributes:
        name: What it adds to the one before.
        config: DeepSpeed's JSON, complete.
        checkpointing: Whether the model computes its layers again in backward.
        peaks: Memory of one rank.
        short_bytes: What the memory of a GPU (``device``) and of a node (``host``) lacks for every
            rank to load, train and save; of the resources that are short alone.
        iteration_s: Predicted time; None where the performance model does not reach.
        no_time: Why there is none; empty where there is one.
    """

    name: str
    config: dict[str, Any]
    checkpointing: bool
    peaks: Peaks
    short_bytes: dict[str, float]
    iteration_s: float | None
    no_time: str = ""

    @property
    def fits(self) -> bool:
        """Whether there is room for every rank."""
        return not self.short_bytes


def ladder(task: Task, room: Room) -> list[Rung]:
    """All rungs, from fastest to leanest."""
    return [
        _rung(name, config, checkpointing, task, room)
        for name, config, checkpointing in _settings(task, room)
    ]


def _settings(task: Task, room: Room) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Name, DeepSpeed's JSON and checkpointing of each rung."""
    cpu = {"device": "cpu", "pin_memory": True}

    def config(stage: int, micro_batch: int = 1, dtype: str = task.dtype, **zero: Any) -> Any:  # noqa: ANN401
        return _config(task, room, micro_batch, dtype, {"stage": stage, **zero})

    def ours(dtype: str, **zero: Any) -> Any:  # noqa: ANN401
        zero |= {"offload_optimizer": cpu, "sub_group_size": SUBGROUP_NUMEL}
        block = {"enabled": True, "policy": "auto"}
        return {**config(3, dtype=dtype, **zero), "deep_optimizer_states": block}

    if task.micro_batch > 1:
        yield f"stage 0, batch {task.micro_batch}", config(0, task.micro_batch), False
    yield "batch 1", config(0), False
    yield "checkpointing", config(0), True
    yield "stage 1", config(1), True
    yield "stage 2", config(2), True
    yield "stage 2 + optimizer offload", config(2, offload_optimizer=cpu), True
    yield "stage 3", config(3), True
    yield "stage 3 + parameter offload", config(3, offload_param=cpu), True
    yield "stage 3 + optimizer offload, ours", ours(task.dtype), True
    lean: dict[str, Any] = {"offload_optimizer": cpu, "offload_param": cpu}
    yield "stage 3 + both offloads", config(3, **lean), True
    lean |= {
        "reduce_bucket_size": SMALL_BUCKET_NUMEL,
        "stage3_prefetch_bucket_size": SMALL_BUCKET_NUMEL,
        "stage3_max_live_parameters": SMALL_LIVE_NUMEL,
        "stage3_max_reuse_distance": SMALL_LIVE_NUMEL,
        "sub_group_size": SUBGROUP_NUMEL,
    }
    yield "smaller buckets", config(3, **lean), True
    dtype = task.dtype
    if dtype == "fp32":
        dtype = "bf16"
        yield "half precision", config(3, dtype=dtype, **lean), True
    yield "16-bit states, ours", _narrowed(ours(dtype), dtype), True
    both = _narrowed(ours(dtype, offload_param=cpu), dtype)
    yield "16-bit states + parameter offload, ours", both, True
    if room.nvme:
        disk = {"device": "nvme", "nvme_path": room.nvme, "pin_memory": True}
        lean["offload_optimizer"] = disk
        yield "optimizer on NVMe", config(3, dtype=dtype, **lean), True
        lean["offload_param"] = disk
        yield "parameters on NVMe", config(3, dtype=dtype, **lean), True


def _config(
    task: Task, room: Room, micro_batch: int, dtype: str, zero: Mapping[str, Any]
) -> dict[str, Any]:
    """A complete configuration; a smaller micro-batch is made up for by accumulation."""
    accumulation = task.micro_batch // micro_batch
    return {
        "train_batch_size": micro_batch * accumulation * room.gpus,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": dict(ADAM)},
        **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
        "zero_optimization": dict(zero),
    }


def _narrowed(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Keep master weights, the gradients beside them and both moments in 16 bits."""
    optimizer = config["optimizer"]
    params = {**optimizer["params"], "fp32_optimizer_states": False}
    block = {"enabled": True, f"{dtype}_master_weights_and_grads": True}
    return {**config, dtype: block, "optimizer": {**optimizer, "params": params}}


def is_narrow(config: Mapping[str, Any]) -> bool:
    """Whether the states are in 16 bits."""
    return "fp32_optimizer_states" in config["optimizer"]["params"]


def _rung(name: str, config: dict[str, Any], checkpointing: bool, task: Task, room: Room) -> Rung:
    setting = setting_of(
        config,
        task.architecture,
        room.gpus,
        sequence=task.sequence,
        checkpointing=checkpointing,
    )
    peaks = peaks_of(setting, room.device_bytes is not None)
    lacks = {"host": peaks.host_bytes * room.ranks_a_node - USABLE * room.host_bytes}
    if room.device_bytes is not None:
        lacks["device"] = peaks.device_bytes - USABLE * room.device_bytes
    short_bytes = {place: num_bytes for place, num_bytes in lacks.items() if num_bytes > 0}
    if reason := _no_time(config, task, room):
        return Rung(name, config, checkpointing, peaks, short_bytes, None, reason)
    try:
        seconds = _seconds(config, checkpointing, task, room)
    except DeepOptimizerStatesError as error:  # the profile lacks a rate, or cannot run it
        return Rung(name, config, checkpointing, peaks, short_bytes, None, str(error))
    return Rung(name, config, checkpointing, peaks, short_bytes, seconds)


def _no_time(config: Mapping[str, Any], task: Task, room: Room) -> str:
    """Why the performance model does not reach; empty where it may."""
    zero = config["zero_optimization"]
    places = [zero.get(name, {}).get("device") for name in ("offload_optimizer", "offload_param")]
    knows = "the performance model knows"
    reasons = (
        (room.machine is None, "memory alone is given: name a profile with --machine"),
        (task.shape is None, f"{knows} the shipped models and Llama's kind alone"),
        (zero["stage"] != 3, f"{knows} ZeRO stage 3 alone"),
        ("nvme" in places, "the performance model has no rate of a disk"),
        (places == [None, "cpu"], f"{knows} parameter offload beside optimizer offload alone"),
        (is_narrow(config), f"{knows} fp32 states alone"),
        ("reduce_bucket_size" in zero, f"{knows} DeepSpeed's own bucket sizes alone"),
    )
    return next((reason for is_so, reason in reasons if is_so), "")


def _seconds(config: Mapping[str, Any], checkpointing: bool, task: Task, room: Room) -> float:
    """Seconds of an iteration.

    Raises:
        DeepOptimizerStatesError: The profile lacks a rate, or the machine cannot run it.
    """
    zero, ours = config["zero_optimization"], "deep_optimizer_states" in config
    assert task.shape
    assert room.machine
    workload = Workload(
        task.shape,
        None if ours else STOCK,
        dp=room.gpus,
        micro_batch_size=config["train_micro_batch_size_per_gpu"],
        accumulation=config["gradient_accumulation_steps"],
        sequence_length=task.sequence,
        offload_ratio=1.0 if "offload_optimizer" in zero else 0.0,
        weights_on_host="offload_param" in zero,
        subgroup_numel=zero.get("sub_group_size", 1_000_000_000),
        activation_checkpointing=checkpointing,
        materialized_attention=False,
        dtype=task.dtype,
    )
    return predict(workload, room.machine).iteration_s


def chosen(rungs: list[Rung]) -> int | None:
    """Index of the rung to take: the fastest that fits; None when none does."""
    return next((idx for idx, rung in enumerate(rungs) if rung.fits), None)
