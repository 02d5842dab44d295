"""``python -m ds_config advise``: the fastest configuration that fits, and why.

Exit code 0: one fits; 1: none does; 2: a wrong argument.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.cli import add_json, add_machine, count, number_from_0, say
from configs.errors import ConfigError
from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.predict.huggingface import read_config
from deep_optimizer_states.predict.machine import Machine, load_machine, machine_names
from deep_optimizer_states.predict.memory import GIB, Peaks, peaks_of
from deep_optimizer_states.predict.model import CountedModel, Model, load_model, model_names
from deep_optimizer_states.predict.predict import predict
from deep_optimizer_states.predict.workload import STOCK, Workload, workload_of_json
from ds_config.document import write_new

USABLE = 0.97
"""Share of a memory that a run may take."""
SMALL_BUCKET_NUMEL = 50_000_000
SMALL_LIVE_NUMEL = 100_000_000
"""The rung with smaller buckets has these in place of DeepSpeed's 5e8 and 1e9."""
SUBGROUP_NUMEL = 100_000_000
"""``sub_group_size`` of the plugin's rung."""
ADAM = {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
CPU = {"device": "cpu", "pin_memory": True}


@dataclass(frozen=True)
class Room:
    """Memory of one node, whose ranks share its host memory."""

    gpus: int
    """Ranks in all."""
    ranks_a_node: int
    device_bytes: float | None  # of one GPU; None without one
    host_bytes: float  # of one node
    nvme: str = ""
    """A folder on a local disk; empty without one."""
    machine: Machine | None = None
    """The profile with its rates; None where memory alone is given."""


@dataclass(frozen=True)
class Task:
    """A model, and how it is to be trained."""

    model: Model
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
    """True where the model computes its layers again in backward."""
    peaks: Peaks
    """Memory of one rank."""
    short_bytes: dict[str, float]
    """Lack of a GPU (``device``) or a node (``host``) for every rank to load, train, save."""
    iteration_s: float | None
    no_time: str
    """Why there is no time; empty where there is one."""

    @property
    def fits(self) -> bool:
        """True where there is room for every rank."""
        return not self.short_bytes


def _is_narrow(config: dict[str, Any]) -> bool:
    return "fp32_optimizer_states" in config["optimizer"]["params"]


CHECKPOINTING = (
    "switch activation checkpointing on in the model itself "
    "(`model.gradient_checkpointing_enable()`): DeepSpeed's JSON does not"
)
NARROW = (
    "16-bit states round master weights and moments in every update: losses differ from those of "
    "fp32 states"
)
GLIBC = (
    "glibc gives freed arrays back late: with its own settings predictions were 12% under what "
    "processes took while training (median; worst 17%); with MALLOC_MMAP_THRESHOLD_=65536 and "
    "MALLOC_TRIM_THRESHOLD_=65536 they take what is predicted"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("--model", required=True, metavar="NAME|config.json",
        help=f"{', '.join(model_names())}, a Hugging Face config.json, or a TOML file")  # fmt: skip
    add("--gpus", type=count, required=True, metavar="N", help="ranks in all; 1 on a CPU")
    add_machine(parser, ", ".join(machine_names()))
    add("--gpu-memory", type=number_from_0, metavar="GIB", help="of one GPU, in GiB; 0 for none")
    add("--host-memory", type=number_from_0, metavar="GIB", help="of one node, in GiB")
    add("--gpus-per-node", type=count, metavar="N", help="ranks that share that host memory")
    add("--nvme", default="", metavar="FOLDER", help="on a local disk, to offload to")
    samples, tokens = "samples a rank [default: 4]", "tokens a sample [default: the model's]"
    add("--micro-batch", type=count, default=4, metavar="N", help=samples)
    add("--sequence-length", type=count, metavar="N", help=tokens)
    dtypes = ("bf16", "fp16", "fp32")
    add("--dtype", choices=dtypes, default="bf16", help="of weights [default: bf16]")
    add_json(parser)
    add("--out", type=Path, metavar="FILE", help="write the chosen configuration to a new file")


def advise(given: argparse.Namespace) -> int:
    """Print the ladder and the rung that is taken, and return the exit code."""
    task, room = _asked(given)
    rungs = ladder(task, room)
    best = chosen(rungs)
    if best is not None and given.out:
        write_new(given.out, f"{json.dumps(rungs[best].config, indent=2)}\n", "--out")
    notes = [_nearest(rungs, room)] if best is None else notes_of(rungs[best], room)
    if given.json:
        say(json.dumps(_as_json(rungs, best, notes, task), indent=2))
    else:
        say(_as_text(rungs, best, notes, task, room))
    return int(best is None)


def _asked(given: argparse.Namespace) -> tuple[Task, Room]:
    path = Path(given.model)
    path = path / "config.json" if path.is_dir() else path
    model = read_config(path) if path.suffix == ".json" else load_model(given.model)[0]
    machine = load_machine(given.machine) if given.machine else None
    device = None if machine is None else machine.device_memory_bytes
    host = None if machine is None else machine.host_memory_bytes
    if given.gpu_memory is not None:
        device = given.gpu_memory * GIB or None
    host = given.host_memory * GIB if given.host_memory is not None else host
    if host is None or (machine is None and given.gpu_memory is None):
        raise ConfigError("--machine is missing: name a profile, or give --gpu-memory and "
                          "--host-memory in GiB")  # fmt: skip
    node = given.gpus_per_node or (machine.gpus if machine and machine.gpus else given.gpus)
    sequence = given.sequence_length or model.seq_length
    task = Task(model, sequence, given.micro_batch, given.dtype)
    return task, Room(given.gpus, min(node, given.gpus), device, host, given.nvme, machine)


def notes_of(rung: Rung, room: Room) -> list[str]:
    """Return what has to be known of a chosen rung."""
    notes = [(CHECKPOINTING, rung.checkpointing), (GLIBC, room.device_bytes is None)]
    return [note for note, applies in (*notes, (NARROW, _is_narrow(rung.config))) if applies]


def _nearest(rungs: list[Rung], room: Room) -> str:
    """Return which memory is short by how much on the rung that is nearest to fitting."""
    usable = {"host": USABLE * room.host_bytes, "device": USABLE * (room.device_bytes or 0)}

    def excess(rung: Rung) -> float:
        return max(short / usable[place] if usable[place] else math.inf
                   for place, short in rung.short_bytes.items())  # fmt: skip

    nearest = min(rungs, key=excess)
    words = {"host": "host memory", "device": "GPU memory"}
    short = (
        f"{words[place]} is short by {lack / GIB:.1f} GiB "
        f"({(usable[place] + lack) / GIB:.1f} needed, {usable[place] / GIB:.1f} may be taken)"
        for place, lack in nearest.short_bytes.items()
    )
    return (
        f"'{nearest.name}' comes nearest: {' and '.join(short)}; try --nvme FOLDER, a smaller "
        "--micro-batch or --sequence-length, or more --gpus"
    )


def _as_json(rungs: list[Rung], best: int | None, notes: list[str], task: Task) -> dict[str, Any]:
    return {
        "predicted": True,
        "parameters": task.model.numel,
        "rungs": [
            {
                "name": rung.name,
                "device_bytes": int(rung.peaks.device_bytes),
                "host_bytes": int(rung.peaks.host_bytes),
                "fits": rung.fits,
                "short_bytes": {name: int(short) for name, short in rung.short_bytes.items()},
                "iteration_s": rung.iteration_s,
                "no_time": rung.no_time,
                "checkpointing": rung.checkpointing,
            }
            for rung in rungs
        ],
        "chosen": None if best is None else rungs[best].name,
        "config": None if best is None else rungs[best].config,
        "notes": notes,
    }


def _as_text(rungs: list[Rung], best: int | None, notes: list[str], task: Task, room: Room) -> str:
    model = task.model
    ranks = f"{room.gpus} rank{'s'[: room.gpus > 1]}"
    gpu = f"{room.device_bytes / GIB:.0f} GiB a GPU" if room.device_bytes else "no GPU"
    lines = [
        f"{model.name}: {model.numel / 1e9:.2f}e9 parameters on {ranks}, {gpu}, "
        f"{room.host_bytes / GIB:.0f} GiB of host memory for {room.ranks_a_node} of them",
        "Predicted, not run. GiB of one rank: device, host; while it loads, trains, saves.",
        "",
        f"  {'':40s}{'load':>13s}{'train':>13s}{'save':>13s}   iteration",
    ]
    for idx, rung in enumerate(rungs):
        cells = "".join(
            f"{peak.device_bytes / GIB:7.1f}{peak.host_bytes / GIB:6.1f}"
            for peak in (rung.peaks.load, rung.peaks.train, rung.peaks.save)
        )
        seconds = "unknown" if rung.iteration_s is None else f"{rung.iteration_s:.2f} s"
        mark = "<- taken" if idx == best else "" if rung.fits else "does not fit"
        lines.append(f"  {rung.name:40s}{cells}   {seconds:10s}{mark}".rstrip())
    for reason in dict.fromkeys(rung.no_time for rung in rungs if rung.no_time):
        without = [rung.name for rung in rungs if rung.no_time == reason]
        named = "any rung" if len(without) == len(rungs) else "; ".join(without)
        lines.append(f"no time of {named}: {reason}")
    if best is None:
        return "\n".join([*lines, "", "nothing fits", *notes])
    rung = rungs[best]
    lines += ["", f"at its most, while {rung.peaks.train.when}:"]
    largest = sorted(rung.peaks.train.arrays, key=lambda array: -array.num_bytes)
    for array in largest[:8]:
        place = "host" if array.on_host else "device"
        lines.append(f"  {array.num_bytes / GIB:8.2f} GiB  {place:6s}  {array.name}")
    lines += ["", *(f"note: {note}" for note in notes), "", json.dumps(rung.config, indent=2)]
    return "\n".join(lines)


def ladder(task: Task, room: Room) -> list[Rung]:
    """Return all rungs, from fastest to leanest."""
    return [_rung(*setting, task, room) for setting in _settings(task, room)]


def chosen(rungs: list[Rung]) -> int | None:
    """Return the index of the fastest rung that fits; None when none does."""
    return next((idx for idx, rung in enumerate(rungs) if rung.fits), None)


def _settings(task: Task, room: Room) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield name, DeepSpeed's JSON and checkpointing of each rung."""

    def config(stage: int, micro_batch: int = 1, dtype: str = task.dtype, **zero: Any) -> Any:
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

    def ours(dtype: str, **zero: Any) -> Any:
        zero |= {"offload_optimizer": CPU, "sub_group_size": SUBGROUP_NUMEL}
        block = {"enabled": True, "policy": "auto"}
        return {**config(3, dtype=dtype, **zero), "deep_optimizer_states": block}

    def narrow(dtype: str, **zero: Any) -> Any:
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
        task.model,
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
        (isinstance(task.model, CountedModel), f"{knows} megatron-core's models alone"),
        (zero["stage"] != 3, f"{knows} ZeRO stage 3 alone"),
        ("nvme" in places, "the performance model has no rate of a disk"),
        (places == [None, "cpu"], f"{knows} parameter offload beside optimizer offload alone"),
        (_is_narrow(config), f"{knows} fp32 states alone"),
        ("reduce_bucket_size" in zero, f"{knows} DeepSpeed's own bucket sizes alone"),
    )
    return next((reason for is_so, reason in reasons if is_so), "")


def _seconds(config: dict[str, Any], checkpointing: bool, task: Task, room: Room) -> float:
    zero = config["zero_optimization"]
    assert room.machine
    workload = Workload(
        task.model,
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
