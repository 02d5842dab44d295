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
from deep_optimizer_states.predict.stock import STOCK
from deep_optimizer_states.predict.workload import Workload

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
        fits: Whether there is room for every rank while it loads, trains and saves.
        iteration_s: Predicted time; None where the performance model does not reach.
    """

    name: str
    config: dict[str, Any]
    checkpointing: bool
    peaks: Peaks
    fits: bool
    iteration_s: float | None


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

    if task.micro_batch > 1:
        yield f"stage 0, batch {task.micro_batch}", config(0, task.micro_batch), False
    yield "batch 1", config(0), False
    yield "checkpointing", config(0), True
    yield "stage 2", config(2), True
    yield "stage 2 + optimizer offload", config(2, offload_optimizer=cpu), True
    yield "stage 3", config(3), True
    ours = config(3, offload_optimizer=cpu, sub_group_size=SUBGROUP_NUMEL)
    ours["deep_optimizer_states"] = {"enabled": True, "policy": "auto"}
    yield "stage 3 + parameter offload", config(3, offload_param=cpu), True
    yield "stage 3 + optimizer offload, ours", ours, True
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


def _rung(name: str, config: dict[str, Any], checkpointing: bool, task: Task, room: Room) -> Rung:
    setting = setting_of(
        config,
        task.architecture,
        room.gpus,
        sequence=task.sequence,
        checkpointing=checkpointing,
    )
    peaks = peaks_of(setting, room.device_bytes is not None)
    fits = peaks.host_bytes * room.ranks_a_node <= USABLE * room.host_bytes
    if room.device_bytes is not None:
        fits = fits and peaks.device_bytes <= USABLE * room.device_bytes
    return Rung(
        name, config, checkpointing, peaks, fits, _seconds(config, checkpointing, task, room)
    )


def _seconds(
    config: Mapping[str, Any], checkpointing: bool, task: Task, room: Room
) -> float | None:
    """Seconds of an iteration where the performance model reaches: stage 3, state in one place."""
    zero, machine = config["zero_optimization"], room.machine
    if machine is None or task.shape is None or zero["stage"] != 3 or "offload_param" in zero:
        return None
    offload = zero.get("offload_optimizer")
    if offload and offload["device"] != "cpu":
        return None
    ours = "deep_optimizer_states" in config
    try:
        workload = Workload(
            task.shape,
            None if ours else STOCK,
            dp=room.gpus,
            micro_batch_size=config["train_micro_batch_size_per_gpu"],
            accumulation=config["gradient_accumulation_steps"],
            sequence_length=task.sequence,
            offload_ratio=1.0 if offload else 0.0,
            subgroup_numel=zero.get("sub_group_size", 1_000_000_000),
            activation_checkpointing=checkpointing,
            materialized_attention=False,
            dtype=task.dtype,
        )
        return predict(workload, machine).iteration_s
    except DeepOptimizerStatesError:
        return None  # the profile lacks a rate, or the machine cannot run it


def chosen(rungs: list[Rung], order: str) -> int | None:
    """Index of the rung to take: the fastest that fits; None when none does.

    Args:
        rungs: From fastest to leanest.
        order: ``fastest`` looks from the top, ``leanest`` goes up as long as it fits, ``bisect``
            halves; all agree where a leaner rung never needs more.
    """
    if order == "fastest":
        return next((idx for idx, rung in enumerate(rungs) if rung.fits), None)
    if order == "leanest":
        found = None
        for idx in reversed(range(len(rungs))):
            if not rungs[idx].fits:
                break
            found = idx
        return found
    low, high = 0, len(rungs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if rungs[middle].fits else (middle + 1, high)
    return low if low < len(rungs) else None
