"""``python -m ds_config advise``: the fastest configuration that fits, and why.

Exit code 0: one fits; 1: none does, or a real run failed; 2: a wrong argument.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from deep_optimizer_states.predict.machine import load_machine, machine_names
from deep_optimizer_states.predict.memory.architecture import (
    FP32_BYTES,
    Architecture,
    architecture_of_shape,
    read_architecture,
)
from deep_optimizer_states.predict.memory.peaks import GIB
from deep_optimizer_states.predict.memory.setting import DEFAULT_SUBGROUP_NUMEL
from deep_optimizer_states.predict.model import ModelShape, load_model, model_names
from ds_config.attempts import Attempts, ended_like_ctrl_c
from ds_config.command import CommandError, whole_number, write_new
from ds_config.ladder import SUBGROUP_NUMEL, USABLE, Room, Rung, Task, chosen, ladder

SCHEMA_VERSION = 1
INTERRUPTED = 130
"""The exit code of what Ctrl-C ended, as shells have it."""
ORDERS = ("fastest", "leanest", "bisect")
CHECKPOINTING = (
    "switch activation checkpointing on in the model itself "
    "(`model.gradient_checkpointing_enable()`): DeepSpeed's JSON does not"
)
DTYPES = ("bf16", "fp16", "fp32")
MULTIPLE = 16
"""Sizes that are divisible by it keep tensor cores and partitions aligned."""
NEAR_STAGE2 = 6
"""Times hidden squared: a persistence threshold above every matrix of a layer but the largest."""


def register(commands: Any) -> None:  # noqa: ANN401 - argparse's private type
    """Add the command to the parser of ``python -m ds_config``."""
    one = commands.add_parser("advise", help="the fastest configuration that fits")
    one.set_defaults(run=run)
    add = one.add_argument
    add("--model", required=True, metavar="NAME|config.json",
        help=f"{', '.join(model_names())}, a Hugging Face config.json, or a TOML file")  # fmt: skip
    add("--gpus", type=whole_number, required=True, metavar="N", help="ranks in all; 1 on a CPU")
    add("--machine", metavar="PROFILE", help=f"{', '.join(machine_names())}, or calibrate's file")
    add("--gpu-memory", type=_size, metavar="GIB", help="of one GPU, in GiB; 0 for none")
    add("--host-memory", type=_size, metavar="GIB", help="of one node, in GiB")
    add("--gpus-per-node", type=whole_number, metavar="N", help="ranks that share that host memory")
    add("--nvme", default="", metavar="FOLDER", help="on a local disk, to offload to")
    add(
        "--micro-batch",
        type=whole_number,
        default=4,
        metavar="N",
        help="samples a rank [default: 4]",
    )
    add(
        "--sequence-length",
        type=whole_number,
        metavar="N",
        help="tokens a sample [default: the model's]",
    )
    add("--dtype", choices=DTYPES, default="bf16", help="of weights [default: bf16]")
    add("--from", dest="order", choices=ORDERS[:2], default="fastest",
        help="from which end --try runs the ladder [default: fastest]")  # fmt: skip
    add(
        "--bisect",
        dest="order",
        action="store_const",
        const="bisect",
        help="--try halves the ladder",
    )
    add("--json", action="store_true", help="write JSON")
    add("--out", type=Path, metavar="FILE", help="write the chosen configuration to a new file")
    add("--try", dest="attempt", nargs="?", const="", metavar="COMMAND",
        help="run the rungs for real: a command with {config} (and {checkpointing}), or without a "
        "command this project's trainer")  # fmt: skip
    add("--try-seconds", type=whole_number, default=600, metavar="S",
        help="a run that lasts so long is taken to fit [default: 600]")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Advise, and return the exit code."""
    try:
        task, room = _asked(arguments)
        rungs = ladder(task, room)
        best = chosen(rungs)
        tried: list[dict[str, str]] = []
        if arguments.attempt is not None:
            attempts = Attempts(arguments.attempt, arguments.model, arguments.try_seconds)
            with ended_like_ctrl_c():
                best, tried = attempts.climb(rungs, best, arguments.order)
        if best is not None and arguments.out:
            text = json.dumps(rungs[best].config, indent=2)
            write_new(arguments.out, f"{text}\n", "--out")
    except KeyboardInterrupt:
        sys.stderr.write("ds_config advise: interrupted\n")
        return INTERRUPTED
    if best is not None:
        notes = notes_of(rungs[best], task, room)
    else:
        notes = [] if tried else ways_out(rungs, task, room)
    if arguments.json:
        out = json.dumps(_as_json(rungs, best, tried, notes, task), indent=2)
    else:
        out = _as_text(rungs, best, tried, notes, task, room)
    sys.stdout.write(f"{out}\n")
    return 0 if best is not None else 1


def _asked(given: argparse.Namespace) -> tuple[Task, Room]:
    architecture, shape = _model(given.model)
    machine = load_machine(given.machine) if given.machine else None
    device = None if machine is None else machine.device_memory_bytes
    host = None if machine is None else machine.host_memory_bytes
    if given.gpu_memory is not None:
        device = given.gpu_memory * GIB or None
    host = given.host_memory * GIB if given.host_memory is not None else host
    if host is None or (machine is None and given.gpu_memory is None):
        raise CommandError("--machine is missing: name a profile, or give --gpu-memory and "
                          "--host-memory in GiB")  # fmt: skip
    node = given.gpus_per_node or (machine.gpus if machine and machine.gpus else given.gpus)
    sequence = given.sequence_length or architecture.sequence
    task = Task(architecture, shape, sequence, given.micro_batch, given.dtype)
    return task, Room(given.gpus, min(node, given.gpus), device, host, given.nvme, machine)


def _model(name: str) -> tuple[Architecture, ModelShape | None]:
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.suffix != ".json":
        shape = load_model(name)[0]
        return architecture_of_shape(shape), shape
    architecture = read_architecture(path)
    table = json.loads(path.read_text(encoding="utf-8"))
    sizes = {"num_attention_heads", "intermediate_size"}
    if table.get("model_type") not in ("llama", "mistral") or not sizes <= table.keys():
        return architecture, None
    heads = table["num_attention_heads"]
    shape = ModelShape(
        architecture.name, architecture.hidden, table["intermediate_size"],
        architecture.num_layers, heads, table.get("num_key_value_heads") or heads,
        architecture.sequence, architecture.vocab_size,
    )  # fmt: skip
    # The performance model has no biases, no tied embeddings and heads of the usual size.
    near = abs(shape.num_parameters() - architecture.numel) < 0.01 * architecture.numel
    return architecture, shape if near else None


def notes_of(rung: Rung, task: Task, room: Room) -> list[str]:
    """Return what is worth knowing of a chosen rung, a sentence with its figure each."""
    found = []
    if room.device_bytes is None:
        found.append(
            "glibc gives freed arrays back late: with its own settings predictions were 12% under "
            "what processes took while training (median; worst 17%); with "
            "MALLOC_MMAP_THRESHOLD_=65536 and MALLOC_TRIM_THRESHOLD_=65536 they take what is "
            "predicted"
        )
    model = task.architecture
    sizes = {"vocabulary": model.vocab_size, "hidden": model.hidden, "sequence": task.sequence}
    odd = [
        f"{name} {value:,} (next: {-(-value // MULTIPLE) * MULTIPLE:,})"
        for name, value in sizes.items()
        if value % MULTIPLE
    ]
    if odd:
        found.append(f"not divisible by {MULTIPLE}: {', '.join(odd)}")
    if rung.config["zero_optimization"]["stage"] == 3:
        found += [*_subgroup(rung, task, room), *_near_stage2(rung, task, room)]
    if rung.is_narrow:
        found.append(
            "16-bit states round master weights and moments in every update: losses differ from "
            "those of fp32 states"
        )
    return found


def _subgroup(rung: Rung, task: Task, room: Room) -> Iterator[str]:
    if "offload_optimizer" in rung.config["zero_optimization"] or room.device_bytes is None:
        return
    # Where the optimizer is on the device, the step makes fp32 gradients of a whole subgroup.
    part = task.architecture.numel // room.gpus
    each = (FP32_BYTES + 2) / GIB
    large = min(part, DEFAULT_SUBGROUP_NUMEL) * each
    small = min(part, SUBGROUP_NUMEL) * each
    if large - small >= 0.5:
        yield (
            f"sub_group_size {SUBGROUP_NUMEL:,} in place of the default 1,000,000,000 takes "
            f"{small:.1f} GiB in the step where that takes {large:.1f}"
        )


def _near_stage2(rung: Rung, task: Task, room: Room) -> Iterator[str]:
    if room.gpus == 1 or "offload_param" in rung.config["zero_optimization"]:
        return
    model = task.architecture
    threshold = NEAR_STAGE2 * model.hidden**2
    kept = sum(numel for numel in model.tensors if numel < threshold)
    size = 4 if task.dtype == "fp32" else 2
    yield (
        f"stage 3 nears stage 2 in speed with stage3_param_persistence_threshold {threshold:,} "
        f"(6 x hidden squared) and no parameter offload: {kept / model.numel:.0%} of the weights, "
        f"{size * kept / GIB:.1f} GiB, then stay gathered on every GPU"
    )


def ways_out(rungs: list[Rung], task: Task, room: Room) -> list[str]:
    """Return which memory is short by how much where no rung fits, and what would help.

    The first is told of the rung that is nearest to fitting, the second where it does help.
    """
    usable = {"host": USABLE * room.host_bytes, "device": USABLE * (room.device_bytes or 0)}
    words = {"host": "host memory", "device": "GPU memory"}

    def excess(rung: Rung) -> float:
        return max(short / usable[place] if usable[place] else math.inf
                   for place, short in rung.short_bytes.items())  # fmt: skip

    nearest = min(rungs, key=excess)
    short = (
        f"{words[place]} is short by {lack / GIB:.1f} GiB "
        f"({(usable[place] + lack) / GIB:.1f} needed, {usable[place] / GIB:.1f} may be taken)"
        for place, lack in nearest.short_bytes.items()
    )
    lines = [f"'{nearest.name}' comes nearest: {' and '.join(short)}"]
    room = replace(room, machine=None)  # times are not asked for
    ways: list[tuple[str, Task, Room]] = []
    if not room.nvme:
        ways.append(("--nvme FOLDER on a local disk", task, replace(room, nvme="FOLDER")))
    if task.micro_batch > 1:
        way = "--micro-batch 1, which keeps no sums of gradients"
        ways.append((way, replace(task, micro_batch=1), room))
    half = max(1, task.sequence // 2)
    ways.append((f"--sequence-length {half}", replace(task, sequence=half), room))
    for times in (2, 4, 8):
        way = f"{times} times as many such machines (--gpus {times * room.gpus})"
        ways.append((way, task, replace(room, gpus=times * room.gpus)))
    for way, other, place in ways:
        found = ladder(other, place)
        if (best := chosen(found)) is not None:
            lines.append(f"would help: {way}: '{found[best].name}' fits")
            if place.gpus > room.gpus:
                break
    needs = [
        f"{nearest.peaks.host_bytes * room.ranks_a_node / USABLE / GIB:.0f} GiB of host memory"
    ]
    if room.device_bytes is not None:
        needs.append(f"GPUs of {nearest.peaks.device_bytes / USABLE / GIB:.0f} GiB")
    return [*lines, f"would help: a machine with {' and '.join(needs)}, for '{nearest.name}'"]


def _as_json(
    rungs: list[Rung],
    best: int | None,
    tried: list[dict[str, str]],
    notes: list[str],
    task: Task,
) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "predicted": True,
        "parameters": task.architecture.numel,
        "rungs": [
            {
                "name": rung.name,
                "device_bytes": int(rung.peaks.device_bytes),
                "host_bytes": int(rung.peaks.host_bytes),
                **{
                    f"{phase}_{place}_bytes": int(getattr(peak, f"{place}_bytes"))
                    for phase, peak in _phases(rung)
                    for place in ("device", "host")
                },
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
        "tried": tried,
        "notes": notes,
    }


def _phases(rung: Rung) -> list[tuple[str, Any]]:
    return [(name, getattr(rung.peaks, name)) for name in ("load", "train", "save")]


def _as_text(
    rungs: list[Rung],
    best: int | None,
    tried: list[dict[str, str]],
    notes: list[str],
    task: Task,
    room: Room,
) -> str:
    model = task.architecture
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
            for _, peak in _phases(rung)
        )
        seconds = "unknown" if rung.iteration_s is None else f"{rung.iteration_s:.2f} s"
        mark = "<- taken" if idx == best else "" if rung.fits else "does not fit"
        lines.append(f"  {rung.name:40s}{cells}   {seconds:10s}{mark}".rstrip())
    for reason in dict.fromkeys(rung.no_time for rung in rungs if rung.no_time):
        without = [rung.name for rung in rungs if rung.no_time == reason]
        named = "any rung" if len(without) == len(rungs) else "; ".join(without)
        lines.append(f"no time of {named}: {reason}")
    lines += [f"tried {item['name']}: {item['ended']}" for item in tried]
    if best is None:
        said = "nothing ran to its end" if tried else "nothing fits"
        return "\n".join([*lines, "", said, *notes])
    rung = rungs[best]
    lines += ["", f"at its most, while {rung.peaks.train.when}:"]
    largest = sorted(rung.peaks.train.arrays, key=lambda array: -array.num_bytes)
    for array in largest[:8]:
        place = "host" if array.on_host else "device"
        lines.append(f"  {array.num_bytes / GIB:8.2f} GiB  {place:6s}  {array.name}")
    if rung.checkpointing:
        notes = [CHECKPOINTING, *notes]
    lines += ["", *(f"note: {note}" for note in notes), "", json.dumps(rung.config, indent=2)]
    return "\n".join(lines)


def _size(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = -1.0
    if not 0 <= size < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: give GiB as a number of at least 0")
    return size
