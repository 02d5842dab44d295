"""The ladder of settings from fastest to leanest, with what each takes and how long it would be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.predict.machine import Machine
from deep_optimizer_states.predict.memory import Peaks, peaks_of
from deep_optimizer_states.predict.model import Model
from deep_optimizer_states.predict.predict import predict
from deep_optimizer_states.predict.workload import STOCK, Workload, workload_of_json

USABLE = 0.97
"""Share of a memory that a run may take."""
SMALL_BUCKET_NUMEL = 50_000_000
SMALL_LIVE_NUMEL = 100_000_000
"""Of the rung with smaller buckets, in place of DeepSpeed's 5e8 and 1e9."""
SUBGROUP_NUMEL = 100_000_000
"""``sub_group_size`` of the plugin's rung."""
ADAM = {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
CPU = {"device": "cpu", "pin_memory": True}


@dataclass(frozen=True)
class Room:
    """What there is on one node, whose ranks share its host memory."""

    gpus: int
    """Ranks in all."""
    ranks_a_node: int
    device_bytes: float | None
    """Of one GPU; None without one."""
    host_bytes: float
    """Of one node."""
    nvme: str = ""
    """A folder on a local disk; empty without one."""
    machine: Machine | None = None
    """The profile with its rates; None where memory alone is given."""


@dataclass(frozen=True)
class Task:
    """What is to be trained."""

    architecture: Model
    shape: Model | None
    """The model for the performance model; None where it does not know such a model."""
    sequence: int
    """Tokens a sample."""
    micro_batch: int
    """Samples a rank would like to handle at once."""
    dtype: str


@dataclass(frozen=True)
class Rung:
    """One setting, with what it takes."""

    name: str
    config: dict[str, Any]
    """DeepSpeed's JSON, complete."""
    checkpointing: bool
    """Whether the model computes its layers again in backward."""
    peaks: Peaks
    """Memory of one rank."""
    short_bytes: dict[str, float]
    """What a GPU (``device``) or a node (``host``) lacks for every rank to load, train, save."""
    iteration_s: float | None
    no_time: str
    """Why there is no time; empty where there is one."""

    @property
    def fits(self) -> bool:
        """Whether there is room for every rank."""
        return not self.short_bytes

    @property
    def is_narrow(self) -> bool:
        """Whether the states are in 16 bits."""
        return _is_narrow(self.config)


def _is_narrow(config: dict[str, Any]) -> bool:
    return "fp32_optimizer_states" in config["optimizer"]["params"]


def ladder(task: Task, room: Room) -> list[Rung]:
    """Return all rungs, from fastest to leanest."""
    return [_rung(*setting, task, room) for setting in _settings(task, room)]


def chosen(rungs: list[Rung]) -> int | None:
    """Return the index of the fastest rung that fits; None when none does."""
    return next((idx for idx, rung in enumerate(rungs) if rung.fits), None)


def _settings(task: Task, room: Room) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield name, DeepSpeed's JSON and checkpointing of each rung."""

    def config(stage: int, micro_batch: int = 1, dtype: str = task.dtype, **zero: Any) -> Any:  # noqa: ANN401
        # A smaller micro-batch is made up for by accumulation.
        accumulation = task.micro_batch // micro_batch
        return {
            "train_batch_size": micro_batch * accumulation * room.gpus,
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": dict(ADAM)},
            **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
            "zero_optimization": {"stage": stage, **zero},
        }

    def ours(dtype: str, **zero: Any) -> Any:  # noqa: ANN401
        zero |= {"offload_optimizer": CPU, "sub_group_size": SUBGROUP_NUMEL}
        block = {"enabled": True, "policy": "auto"}
        return {**config(3, dtype=dtype, **zero), "deep_optimizer_states": block}

    def narrow(dtype: str, **zero: Any) -> Any:  # noqa: ANN401
        # Master weights, the gradients beside them and both moments are kept in 16 bits.
        made = ours(dtype, **zero)
        made[dtype][f"{dtype}_master_weights_and_grads"] = True
        made["optimizer"]["params"]["fp32_optimizer_states"] = False
        return made

    if task.micro_batch > 1:
        yield f"stage 0, batch {task.micro_batch}", config(0, task.micro_batch), False
    yield "batch 1", config(0), False
    yield "checkpointing", config(0), True
    yield "stage 1", config(1), True
    yield "stage 2", config(2), True
    yield "stage 2 + optimizer offload", config(2, offload_optimizer=CPU), True
    yield "stage 3", config(3), True
    yield "stage 3 + parameter offload", config(3, offload_param=CPU), True
    yield "stage 3 + optimizer offload, ours", ours(task.dtype), True
    lean: dict[str, Any] = {"offload_optimizer": CPU, "offload_param": CPU}
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
    yield "16-bit states, ours", narrow(dtype), True
    yield "16-bit states + parameter offload, ours", narrow(dtype, offload_param=CPU), True
    if room.nvme:
        disk = {"device": "nvme", "nvme_path": room.nvme, "pin_memory": True}
        lean["offload_optimizer"] = disk
        yield "optimizer on NVMe", config(3, dtype=dtype, **lean), True
        lean["offload_param"] = disk
        yield "parameters on NVMe", config(3, dtype=dtype, **lean), True


def _rung(name: str, config: dict[str, Any], checkpointing: bool, task: Task, room: Room) -> Rung:
    workload = workload_of_json(
        config,
        task.architecture,
        dp=room.gpus,
        sequence_length=task.sequence,
        activation_checkpointing=checkpointing,
        materialized_attention=False,
    )
    peaks = peaks_of(workload, room.device_bytes is not None)
    lacks = {"host": peaks.host_bytes * room.ranks_a_node - USABLE * room.host_bytes}
    if room.device_bytes is not None:
        lacks["device"] = peaks.device_bytes - USABLE * room.device_bytes
    short_bytes = {place: num_bytes for place, num_bytes in lacks.items() if num_bytes > 0}
    reason, seconds = _no_time(config, task, room), None
    if not reason:
        try:
            seconds = _seconds(config, checkpointing, task, room)
        except DeepOptimizerStatesError as error:  # the profile lacks a rate, or cannot run it
            reason = str(error)
    return Rung(name, config, checkpointing, peaks, short_bytes, seconds, reason)


def _no_time(config: dict[str, Any], task: Task, room: Room) -> str:
    zero = config["zero_optimization"]
    places = [zero.get(name, {}).get("device") for name in ("offload_optimizer", "offload_param")]
    knows = "the performance model knows"
    reasons = (
        (room.machine is None, "memory alone is given: name a profile with --machine"),
        (task.shape is None, f"{knows} the shipped models and Llama's kind alone"),
        (zero["stage"] != 3, f"{knows} ZeRO stage 3 alone"),
        ("nvme" in places, "the performance model has no rate of a disk"),
        (places == [None, "cpu"], f"{knows} parameter offload beside optimizer offload alone"),
        (_is_narrow(config), f"{knows} fp32 states alone"),
        ("reduce_bucket_size" in zero, f"{knows} DeepSpeed's own bucket sizes alone"),
    )
    return next((reason for is_so, reason in reasons if is_so), "")


def _seconds(config: dict[str, Any], checkpointing: bool, task: Task, room: Room) -> float:
    zero = config["zero_optimization"]
    assert task.shape
    assert room.machine
    workload = Workload(
        task.shape,
        None if "deep_optimizer_states" in config else STOCK,
        dp=room.gpus,
        micro_batch_size=config["train_micro_batch_size_per_gpu"],
        accumulation=config["gradient_accumulation_steps"],
        sequence_length=task.sequence,
        offload_ratio=1.0 if "offload_optimizer" in zero else 0.0,
        weights_at="cpu" if "offload_param" in zero else "none",
        subgroup_numel=zero.get("sub_group_size", 1_000_000_000),
        activation_checkpointing=checkpointing,
        materialized_attention=False,
        dtype=task.dtype,
    )
    return predict(workload, room.machine).iteration_s
