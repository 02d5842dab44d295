"""``python -m ds_config advise``: the fastest configuration that fits, and why.

Exit code 0: one fits; 1: none does; 2: a wrong argument.
"""

from __future__ import annotations

import argparse
import itertools
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
from deep_optimizer_states.predict.memory import Peaks, peaks_of
from deep_optimizer_states.predict.model import Model, load_model, model_names
from deep_optimizer_states.predict.predict import phases_of, predict, settled
from deep_optimizer_states.predict.workload import Workload, workload_of_json
from deep_optimizer_states.units import GIB
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
class NodeMemory:
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
class Training:
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
    """Predicted, of the whole batch."""
    no_time: str
    """Why there is no time; empty where there is one."""
    is_exact: bool
    """False where it trains in fewer bits than were asked for, which changes the losses."""
    unknown: str
    """Why activations are not known, which are not counted then; empty where they are."""

    @property
    def fits(self) -> bool:
        """True where there is room for every rank."""
        return not self.short_bytes

    @property
    def batch(self) -> str:
        """Return how its layers see the batch, in words."""
        words = f"batch {self.config['train_micro_batch_size_per_gpu']}"
        return f"{words}, checkpointing" if self.checkpointing else words

    @property
    def urgency(self) -> tuple[bool, bool, bool, float]:
        """Return what the list is sorted by: fits, trains what was asked for, has a time, time.

        Of times that are the same in the two digits that a prediction is good for, the way that
        offloads less comes first.
        """
        seconds = math.inf if self.iteration_s is None else float(f"{self.iteration_s:.2g}")
        return not self.fits, not self.is_exact, self.iteration_s is None, seconds


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
UNKNOWN = (
    "{name}: activations are not known and not counted, what is said is weights, states, gradients "
    "and buckets alone, so leave room: {reason}"
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
    """Print the rungs, fastest first, and the one that is taken, and return the exit code."""
    task, room = _asked(given)
    rungs = ladder(task, room)
    best = rungs[0] if rungs[0].fits else None
    if best is not None and given.out:
        write_new(given.out, f"{json.dumps(best.config, indent=2)}\n", "--out")
    notes = [_nearest(rungs, room)] if best is None else notes_of(best, room)
    if rungs[0].unknown:
        notes.append(UNKNOWN.format(name=task.model.name, reason=rungs[0].unknown))
    if given.json:
        say(json.dumps(_as_json(rungs, best, notes, task), indent=2))
    else:
        say(_as_text(rungs, best, notes, task, room))
    return int(best is None)


def _asked(given: argparse.Namespace) -> tuple[Training, NodeMemory]:
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
    task = Training(model, sequence, given.micro_batch, given.dtype)
    return task, NodeMemory(given.gpus, min(node, given.gpus), device, host, given.nvme, machine)


def notes_of(rung: Rung, room: NodeMemory) -> list[str]:
    """Return what has to be known of a chosen rung."""
    notes = [(CHECKPOINTING, rung.checkpointing), (GLIBC, room.device_bytes is None)]
    return [note for note, applies in (*notes, (NARROW, _is_narrow(rung.config))) if applies]


def _nearest(rungs: list[Rung], room: NodeMemory) -> str:
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


def _as_json(
    rungs: list[Rung], best: Rung | None, notes: list[str], task: Training
) -> dict[str, Any]:
    return {
        "predicted": True,
        "parameters": task.model.numel,
        "rungs": [
            {
                "name": rung.name,
                "micro_batch": rung.config["train_micro_batch_size_per_gpu"],
                "checkpointing": rung.checkpointing,
                "iteration_s": rung.iteration_s,
                "no_time": rung.no_time,
                "device_bytes": int(rung.peaks.device_bytes),
                "host_bytes": int(rung.peaks.host_bytes),
                "phases": {
                    phase: {
                        "device_bytes": int(peak.device_bytes),
                        "host_bytes": int(peak.host_bytes),
                    }
                    for phase, peak in rung.peaks.phases
                },
                "fits": rung.fits,
                "short_bytes": {name: int(short) for name, short in rung.short_bytes.items()},
                "is_exact": rung.is_exact,
            }
            for rung in rungs
        ],
        "chosen": None if best is None else best.name,
        "config": None if best is None else best.config,
        "notes": notes,
    }


def _as_text(
    rungs: list[Rung], best: Rung | None, notes: list[str], task: Training, room: NodeMemory
) -> str:
    model = task.model
    ranks = f"{room.gpus} rank{'s'[: room.gpus > 1]}"
    gpu = f"{room.device_bytes / GIB:.0f} GiB a GPU" if room.device_bytes else "no GPU"
    lines = [
        f"{model.name}: {model.numel / 1e9:.2f}e9 parameters on {ranks}, {gpu}, "
        f"{room.host_bytes / GIB:.0f} GiB of host memory for {room.ranks_a_node} of them",
        "Predicted, not run: seconds of an iteration, and GiB of one rank at its most. What fits "
        "comes first, the fastest first.",
        "",
        f"  {'':40s}{'':24s}{'iteration':>10s}{'device':>8s}{'host':>8s}",
    ]
    for rung in rungs:
        seconds = "unknown" if rung.iteration_s is None else f"{rung.iteration_s:.2f} s"
        sizes = (rung.peaks.device_bytes, rung.peaks.host_bytes)
        cells = f"{seconds:>10s}" + "".join(f"{size / GIB:8.1f}" for size in sizes)
        mark = "<- taken" if rung is best else "" if rung.fits else _lack(rung)
        lines.append(f"  {rung.name:40s}{rung.batch:24s}{cells}   {mark}".rstrip())
    for reason in dict.fromkeys(rung.no_time for rung in rungs if rung.no_time):
        without = [rung.name for rung in rungs if rung.no_time == reason]
        named = "any rung" if len(without) == len(rungs) else "; ".join(without)
        lines.append(f"no time of {named}: {reason}")
    if best is None:
        return "\n".join([*lines, "", "nothing fits", *notes])
    for phase, peak in best.peaks.phases:
        taken = f"device {peak.device_bytes / GIB:.1f} GiB, host {peak.host_bytes / GIB:.1f} GiB"
        lines += ["", f"{best.name}, while it {phase}s: {taken}, at its most while {peak.when}:"]
        largest = sorted(peak.arrays, key=lambda array: -array.num_bytes)
        for array in largest[: 8 if phase == "train" else 2]:
            place = "host" if array.on_host else "device"
            lines.append(f"  {array.num_bytes / GIB:8.2f} GiB  {place:6s}  {array.name}")
    lines += ["", *(f"note: {note}" for note in notes), "", json.dumps(best.config, indent=2)]
    return "\n".join(lines)


def _lack(rung: Rung) -> str:
    lacks = (f"{place} by {lack / GIB:.1f} GiB" for place, lack in rung.short_bytes.items())
    return f"does not fit: {', '.join(lacks)}"


def ladder(task: Training, room: NodeMemory) -> list[Rung]:
    """Return all rungs: first those that fit, of these the fastest first.

    Those in fewer bits than were asked for come after the others, and those without a time after
    those with one, in the order in which :func:`_settings` has them.
    """
    rungs = [_best_batch(*setting, task, room) for setting in _settings(task, room)]
    return sorted(rungs, key=lambda rung: rung.urgency)


def _best_batch(
    name: str, setting: dict[str, Any], is_exact: bool, task: Training, room: NodeMemory
) -> Rung:
    """Return a rung with the micro-batch and the checkpointing that are best for it.

    A smaller micro-batch is made up for by accumulation; the leanest way is the last.
    """
    ways = []
    sizes = dict.fromkeys((task.micro_batch, 1))
    for micro_batch, checkpointing in itertools.product(sizes, (False, True)):
        accumulation = task.micro_batch // micro_batch
        config = {
            "train_batch_size": micro_batch * accumulation * room.gpus,
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": accumulation,
            **setting,
        }
        workload = workload_of_json(
            config,
            task.model,
            dp=room.gpus,
            sequence_length=task.sequence,
            activation_checkpointing=checkpointing,
            materialized_attention=False,
        )
        ways.append((config, workload))
    fitting = [way for way in ways if not way[1].kept.unknown and not _lacks(way[1], room)[1]]
    way = min(fitting or ways[-1:], key=lambda way: _passes_s(way[1], room))
    return _rung(name, *way, is_exact, room)


def _passes_s(workload: Workload, room: NodeMemory) -> float:
    """Return forward and backward, in which alone such ways differ; infinite where not known."""
    if room.machine is None:
        return math.inf
    try:
        found = phases_of(workload, room.machine)
    except DeepOptimizerStatesError:
        return math.inf
    return found.forward_s + found.backward_s


def _lacks(workload: Workload, room: NodeMemory) -> tuple[Peaks, dict[str, float]]:
    """Return what a rank takes, and what the room is short of for all of them."""
    peaks = peaks_of(workload, room.device_bytes is not None)
    lacks = {"host": peaks.node_bytes(room.ranks_a_node) - USABLE * room.host_bytes}
    if room.device_bytes is not None:
        lacks["device"] = peaks.device_bytes - USABLE * room.device_bytes
    return peaks, {place: num_bytes for place, num_bytes in lacks.items() if num_bytes > 0}


def _settings(task: Training, room: NodeMemory) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield name, DeepSpeed's JSON without the batch, and whether it has the bits asked for.

    From what is usually fastest to the leanest, for where no time is known.
    """

    def config(stage: int, dtype: str = task.dtype, **zero: Any) -> Any:
        return {
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": dict(ADAM)},
            **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
            "zero_optimization": {"stage": stage, **zero},
        }

    def ours(stage: int, dtype: str = task.dtype, **zero: Any) -> Any:
        zero |= {"offload_optimizer": CPU, "sub_group_size": SUBGROUP_NUMEL}
        block = {"enabled": True, "policy": "auto"}
        return {**config(stage, dtype, **zero), "deep_optimizer_states": block}

    def narrow(dtype: str, **zero: Any) -> Any:
        # Master weights, the gradients beside them and both moments are kept in 16 bits.
        made = ours(3, dtype, **zero)
        made[dtype][f"{dtype}_master_weights_and_grads"] = True
        made["optimizer"]["params"]["fp32_optimizer_states"] = False
        return made

    for stage in range(4):
        yield f"stage {stage}", config(stage), True
    yield "stage 3 + parameter offload", config(3, offload_param=CPU), True
    for stage in (2, 1, 3):
        yield f"stage {stage} + optimizer offload, ours", ours(stage), True
    for stage in (2, 1, 3):
        stock = config(stage, offload_optimizer=CPU)
        yield f"stage {stage} + optimizer offload", stock, True
    lean: dict[str, Any] = {"offload_optimizer": CPU, "offload_param": CPU}
    yield "stage 3 + both offloads, ours", ours(3, offload_param=CPU), True
    yield "stage 3 + both offloads", config(3, **lean), True
    lean |= {
        "reduce_bucket_size": SMALL_BUCKET_NUMEL,
        "stage3_prefetch_bucket_size": SMALL_BUCKET_NUMEL,
        "stage3_max_live_parameters": SMALL_LIVE_NUMEL,
        "stage3_max_reuse_distance": SMALL_LIVE_NUMEL,
        "sub_group_size": SUBGROUP_NUMEL,
    }
    yield "smaller buckets", config(3, **lean), True
    dtype, is_exact = task.dtype, True
    if dtype == "fp32":
        dtype, is_exact = "bf16", False
        yield "half precision", config(3, dtype, **lean), is_exact
    yield "16-bit states, ours", narrow(dtype), False
    yield "16-bit states + parameter offload, ours", narrow(dtype, offload_param=CPU), False
    if room.nvme:
        disk = {"device": "nvme", "nvme_path": room.nvme, "pin_memory": True}
        lean["offload_optimizer"] = disk
        yield "optimizer on NVMe", config(3, dtype, **lean), is_exact
        lean["offload_param"] = disk
        yield "parameters on NVMe", config(3, dtype, **lean), is_exact


def _rung(
    name: str, config: dict[str, Any], workload: Workload, is_exact: bool, room: NodeMemory
) -> Rung:
    reason, seconds = "", None
    if room.machine is None:
        reason = "memory alone is given: name a profile with --machine"
    elif "reduce_bucket_size" in config["zero_optimization"]:
        reason = "no profile has a rate of the start of a collective, of which there are many more"
    else:
        try:
            workload = settled(workload, room.machine)
            seconds = predict(workload, room.machine).iteration_s
        except DeepOptimizerStatesError as error:  # the profile lacks a rate, or cannot run it
            reason = str(error)
    if workload.software is None:
        block = {**config["deep_optimizer_states"], "policy": workload.policy}
        block |= {"stride": workload.stride} if workload.policy == "stride" else {}
        config = {**config, "deep_optimizer_states": block}
    checkpointing, unknown = workload.activation_checkpointing, workload.kept.unknown
    memory = _lacks(workload, room)
    return Rung(name, config, checkpointing, *memory, seconds, reason, is_exact, unknown)
