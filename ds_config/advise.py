"""``python -m ds_config advise``: the fastest configuration that fits, and why.

Exit code 0: one fits; 1: none does; 2: a wrong argument.
"""

from __future__ import annotations

import argparse
import itertools
import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from configs.cli import COLUMNS, add_json, add_machine, count, number_from_0, say
from configs.errors import ConfigError
from deep_optimizer_states.core.host import HEADROOM
from deep_optimizer_states.predict.huggingface import read_config
from deep_optimizer_states.predict.limits import limits_of
from deep_optimizer_states.predict.machine import Machine, load_machine, machine_names
from deep_optimizer_states.predict.model import CountedModel, Model, load_model, model_names
from deep_optimizer_states.predict.predict import Prediction
from deep_optimizer_states.units import GIB
from ds_config.document import write_new
from ds_config.search import NodeMemory, Rung, Training, best, ladder

MORE_HOST_GIB = 100
LEAST_CHANGE = 0.01
"""A change of less than this is none."""
CHECKPOINTING = (
    "switch activation checkpointing on in the model itself "
    "(`model.gradient_checkpointing_enable()`): DeepSpeed's JSON does not"
)
NARROW = (
    "16-bit states round master weights and moments in every update: losses differ from those of "
    "fp32 states"
)
SHARE = (
    "host memory lacks room for all of the state, so the plugin keeps what lacks on the GPU for "
    "good; `ratio` in its block fixes another share"
)
LIKE_MEGATRONS = (
    "times are those of megatron-core's kernels for as many layers, parameters and tokens; the "
    "model's own code may take longer"
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
GUESSED = (
    "times on {name} were fitted to runs of {fitted} ranks a node: of fewer, as here, they are a "
    "guess, since no log says how fast a rank is with more cores"
)
ASSUMED = "of the CPU of {name} these rates are assumed, not measured: {rates}"
ORDER = (
    "What fits comes first; then what keeps the types asked for, before fewer bits, which may be "
    "faster; then what is faster, those without a time last, and of equals what offloads less."
)
UNTIMED = (
    "No time is known. What fits comes first; then what keeps the types asked for, before fewer "
    "bits; then what offloads less."
)
_LARGEST_ARRAYS = {"train": 8}
"""So many of a phase's arrays are printed, of another phase two."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add_model(parser, required=True)
    add("--gpus", type=count, required=True, metavar="N", help="ranks in all; 1 on a CPU")
    add_machine(parser, ", ".join(machine_names()))
    add("--gpu-memory", type=number_from_0, metavar="GIB", help="of one GPU, in GiB; 0 for none")
    add("--host-memory", type=number_from_0, metavar="GIB", help="of one node, in GiB")
    add("--gpus-per-node", type=count, metavar="N", help="ranks that share that host memory")
    add("--nvme", default="", metavar="FOLDER", help="on a local disk, to offload to")
    most = "samples a rank may handle at once [default: 4]"
    add("--micro-batch", type=count, default=4, metavar="N", help=most)
    total = "samples of an update, over all ranks [default: a micro-batch each]"
    add("--batch", type=count, metavar="N", help=total)
    tokens = "tokens a sample [default: the model's]"
    add("--sequence-length", type=count, metavar="N", help=tokens)
    dtypes = ("bf16", "fp16", "fp32")
    add("--dtype", choices=dtypes, default="bf16", help="of weights [default: bf16]")
    add_json(parser)
    add("--out", type=Path, metavar="FILE", help="write the chosen configuration to a new file")
    drawn = "draw time against memory into new files, FILE.svg, .png and .pdf"
    add("--figure", type=Path, metavar="FILE", help=drawn)


def add_model(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """Add ``--model``, and ``--config`` for a file of Hugging Face's."""
    one = parser.add_mutually_exclusive_group(required=required)
    text = f"{', '.join(model_names())}, a Hugging Face config.json, or a TOML file"
    one.add_argument("--model", metavar="NAME|FILE", help=text)
    text = "a Hugging Face config.json, or its folder"
    one.add_argument("--config", metavar="FILE", dest="model", help=text)


def model_of(given: str) -> Model:
    """Return the model of ``--model`` or ``--config``.

    Raises:
        ModelError: there is none, or its file is wrong.
    """
    path = Path(given)
    path = path / "config.json" if path.is_dir() else path
    return read_config(path) if path.suffix == ".json" else load_model(given)[0]


def advise(given: argparse.Namespace) -> int:
    """Print the rungs, the best first, and the one that is taken, and return the exit code."""
    task, room = _asked(given)
    rungs = ladder(task, room)
    taken = rungs[0] if rungs[0].fits else None
    if taken is not None and given.out:
        write_new(given.out, f"{json.dumps(taken.config, indent=2)}\n", "--out")
    notes = [_nearest(rungs, room)] if taken is None else notes_of(taken, room)
    if isinstance(task.model, CountedModel) and any(rung.iteration_s for rung in rungs):
        notes.append(LIKE_MEGATRONS)
    if any(rung.iteration_s for rung in rungs):
        notes += notes_of_times(room)
    if rungs[0].unknown:
        notes.append(UNKNOWN.format(name=task.model.name, reason=rungs[0].unknown))
    more = list(changes(taken, task, room))
    if given.json:
        say(json.dumps(_as_json(rungs, notes, more, task, room), indent=2))
    else:
        say("\n".join(_as_text(rungs, notes, more, task, room)))
    if given.figure:
        from ds_config.figure import draw  # matplotlib is needed by this alone

        say(str(draw(given.figure, rungs, room, f"{task.model.name} on {_ranks(room)}")))
    return int(taken is None)


def _asked(given: argparse.Namespace) -> tuple[Training, NodeMemory]:
    model = model_of(given.model)
    machine = load_machine(given.machine) if given.machine else None
    device = None if machine is None else machine.device_memory_bytes
    host = None if machine is None else machine.host_memory_bytes
    if given.gpu_memory is not None:
        device = given.gpu_memory * GIB or None
    host = given.host_memory * GIB if given.host_memory is not None else host
    if host is None or (machine is None and given.gpu_memory is None):
        raise ConfigError("--machine is missing: name a profile, or give --gpu-memory and "
                          "--host-memory in GiB")  # fmt: skip
    if given.batch and given.batch % given.gpus:
        raise ConfigError(f"--batch {given.batch}: give a multiple of --gpus {given.gpus}")
    places = given.gpus_per_node or (machine.gpus if machine else 0)
    sequence = given.sequence_length or model.seq_length
    samples = given.batch // given.gpus if given.batch else 0
    task = Training(model, sequence, given.micro_batch, given.dtype, samples)
    ranks = min(places or given.gpus, given.gpus)
    return task, NodeMemory(given.gpus, ranks, device, host, given.nvme, machine, places)


def notes_of(rung: Rung, room: NodeMemory) -> list[str]:
    """Return what has to be known of a chosen rung."""
    notes = (
        (CHECKPOINTING, rung.checkpointing),
        (GLIBC, room.device_bytes is None),
        (NARROW, not rung.setting.has_fp32_states),
        (SHARE, rung.share < 1),
    )
    return [note for note, applies in notes if applies]


def notes_of_times(room: NodeMemory) -> list[str]:
    """Return what has to be known of the times of a machine's profile."""
    machine = room.machine
    if machine is None:
        return []
    rates = [name for name in machine.known if machine.kind(name) == "assumed" and "host" in name]
    is_fitted = any(machine.kind(name) == "fitted" for name in machine.known)
    notes = (
        (GUESSED.format(name=machine.name, fitted=machine.gpus),
         is_fitted and room.ranks_a_node < machine.gpus),
        (ASSUMED.format(name=machine.name, rates=", ".join(rates)), bool(rates)),
    )  # fmt: skip
    return [note for note, applies in notes if applies]


def _nearest(rungs: list[Rung], room: NodeMemory) -> str:
    """Return which memory is short by how much on the rung that is nearest to fitting."""
    usable = {"host": HEADROOM * room.host_bytes, "device": HEADROOM * (room.device_bytes or 0)}
    nearest = min(rungs, key=lambda rung: room.excess(rung.leanest_short_bytes))
    words = {"host": "host memory", "device": "GPU memory"}
    short = (
        f"{words[place]} is short by {lack / GIB:.1f} GiB "
        f"({(usable[place] + lack) / GIB:.1f} needed, {usable[place] / GIB:.1f} may be taken)"
        for place, lack in nearest.leanest_short_bytes.items()
    )
    return (
        f"'{nearest.name}' comes nearest: {' and '.join(short)}; try --nvme FOLDER, a smaller "
        "--micro-batch or --sequence-length, or more --gpus"
    )


def changes(taken: Rung | None, task: Training, room: NodeMemory) -> Iterator[dict[str, Any]]:
    """Yield what one GPU more, and more host memory, would change: the best rung there."""
    for what, more in (
        ("one GPU more", room.with_gpu()),
        (f"{MORE_HOST_GIB} GiB more of host memory", room.with_host_memory(MORE_HOST_GIB * GIB)),
    ):
        if more.gpus > room.gpus and room.device_bytes is None:
            continue
        found = best(task, more)
        tokens = found and tokens_per_s(found, task, more.gpus)
        now = taken and tokens_per_s(taken, task, room.gpus)
        yield {
            "what": what,
            "chosen": found and found.name,
            "iteration_s": found and found.iteration_s,
            "tokens_per_s": tokens,
            "speedup": tokens / now if tokens and now else None,
        }


def tokens_per_s(rung: Rung, task: Training, gpus: int) -> float | None:
    """Return the tokens that all ranks train on in a second; None without a time."""
    samples = rung.config["train_batch_size"]
    return samples * task.sequence / rung.iteration_s if rung.iteration_s else None


def _as_json(
    rungs: list[Rung],
    notes: list[str],
    more: list[dict[str, Any]],
    task: Training,
    room: NodeMemory,
) -> dict[str, Any]:
    taken = rungs[0] if rungs[0].fits else None
    return {
        "predicted": True,
        "parameters": task.model.numel,
        "rungs": [
            {
                "name": rung.name,
                **vars(rung.setting),
                "micro_batch": rung.config["train_micro_batch_size_per_gpu"],
                "accumulation": rung.config["gradient_accumulation_steps"],
                "checkpointing": rung.checkpointing,
                "ratio": rung.share,
                "small_buckets": rung.has_small_buckets,
                "iteration_s": rung.iteration_s,
                "parts_s": rung.prediction and parts_s(rung.prediction),
                "tokens_per_s": tokens_per_s(rung, task, 1),
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
                "short_bytes": _whole(rung.short_bytes),
                "leanest_short_bytes": _whole(rung.leanest_short_bytes),
                "is_exact": rung.is_exact,
            }
            for rung in rungs
        ],
        "chosen": taken and taken.name,
        "config": taken and taken.config,
        "limited_by": (taken and limited_by(taken, room.machine)) or None,
        "changes": more,
        "notes": notes,
    }


def _whole(sizes: dict[str, float]) -> dict[str, int]:
    return {place: int(num_bytes) for place, num_bytes in sizes.items()}


def _ranks(room: NodeMemory) -> str:
    return f"{room.gpus} {'GPU' if room.device_bytes else 'rank'}{'s'[: room.gpus > 1]}"


_ROW = "{:2s}{:6s}{:20s}{:8s}{:15s}{:7s}{:10s}{:6s}{:>10s}{:>8s}{:>8s}"


def _as_text(
    rungs: list[Rung],
    notes: list[str],
    more: list[dict[str, Any]],
    task: Training,
    room: NodeMemory,
) -> Iterator[str]:
    model, taken = task.model, rungs[0] if rungs[0].fits else None
    gpu = f"{room.device_bytes / GIB:.0f} GiB each" if room.device_bytes else "no GPU"
    yield from _folded(
        f"{model.name}: {model.numel / 1e9:.2f}e9 parameters on {_ranks(room)}, {gpu}, "
        f"{room.host_bytes / GIB:.0f} GiB of host memory for {room.ranks_a_node} of them, "
        f"{task.sequence} tokens a sample, {task.dtype}"
    )
    yield from _folded(
        f"Predicted, not run. GiB of one rank at its most; `!` is more than there is "
        f"({HEADROOM:.0%} may be taken). Batch: micro-batch x accumulation. Ratio: share of the "
        f"state in host memory. {ORDER if any(rung.iteration_s for rung in rungs) else UNTIMED}"
    )
    yield ""
    yield _ROW.format(
        "", "stage", "offloaded", "engine", "weights/states", "batch", "recompute", "ratio",
        "iteration", "GPU", "host",
    ).rstrip()  # fmt: skip
    for rung in rungs:
        yield _row(rung, is_taken=rung is taken)
    yield ""
    for reason in dict.fromkeys(rung.no_time for rung in rungs if rung.no_time):
        without = [rung.name for rung in rungs if rung.no_time == reason]
        named = "any rung" if len(without) == len(rungs) else "; ".join(without)
        yield from _folded(f"no time of {named}: {reason}")
    if taken is None:
        yield "nothing fits"
    else:
        yield from (
            line for text in _time_lines(taken, task, room.machine) for line in _folded(text)
        )
        yield from _peak_lines(taken)
        yield ""
    yield from (line for one in more for line in _folded(_change_text(one, taken)))
    yield from (line for note in notes for line in _folded(f"note: {note}"))
    if taken is not None:
        yield f"\n{json.dumps(taken.config, indent=2)}"


def _row(rung: Rung, is_taken: bool) -> str:
    setting, config = rung.setting, rung.config
    batch = "{train_micro_batch_size_per_gpu}x{gradient_accumulation_steps}".format(**config)
    sizes = (("device", rung.peaks.device_bytes), ("host", rung.peaks.host_bytes))
    return _ROW.format(
        ">" if is_taken else "",
        str(setting.stage),
        setting.offloaded,
        setting.engine,
        f"{setting.dtype}/{setting.states}",
        batch,
        "yes" if rung.checkpointing else "no",
        f"{rung.share:.2g}",
        "unknown" if rung.iteration_s is None else f"{rung.iteration_s:.2f} s",
        *(f"{size / GIB:.1f}{'!' * (place in rung.short_bytes)}" for place, size in sizes),
    ).rstrip()


def _time_lines(rung: Rung, task: Training, machine: Machine | None) -> Iterator[str]:
    """Say of what the chosen rung's iteration consists, and what limits each phase."""
    found, samples = rung.prediction, rung.config["train_batch_size"]
    if found is None or machine is None:
        return
    parts = parts_s(found)
    shown = adding_up(list(parts.values()), 2)
    terms = "".join(
        f" {'-' if value < 0 else '+'} {abs(value):.2f} {name.replace('_', ' ')}"
        for name, value in zip(parts, shown, strict=True)
        if value
    ).removeprefix(" + ")
    yield f"the chosen iteration: {terms} = {sum(shown):.2f} s, predicted"
    limits = limited_by(rung, machine).items()
    yield f"limited: {', '.join(f'{phase} by {resource}' for phase, resource in limits)}"
    rate = samples * task.sequence / found.iteration_s
    yield (
        f"{rate:,.0f} tokens/s at {samples} samples an update "
        "(--batch): with more, an update is shared by more samples, and what offloads or speeds it "
        "up matters less"
    )


def parts_s(found: Prediction) -> dict[str, float]:
    """Return the parts of an iteration in seconds, which add up to it."""
    return {
        "forward": found.forward_s,
        "backward": found.backward_s,
        "update": found.update_s,
        "hidden_behind_the_next_forward": 0.0 - found.hidden_s,
        "outside": found.outside_s,
    }


def limited_by(rung: Rung, machine: Machine | None) -> dict[str, str]:
    """Return what limits each phase of a rung; empty where it has no time."""
    if rung.prediction is None or machine is None:
        return {}
    limits = limits_of(rung.workload, machine)
    passes = {phase: resource for phase, (resource, _) in limits.items()}
    return {**passes, "update": rung.prediction.binding}


def adding_up(values: Sequence[float], digits: int) -> list[float]:
    """Round numbers so that they add up to their rounded sum, each by less than a last digit."""
    sums = [round(total, digits) for total in itertools.accumulate(values, initial=0.0)]
    return [round(after - before, digits) for before, after in itertools.pairwise(sums)]


def _peak_lines(rung: Rung) -> Iterator[str]:
    for phase, peak in rung.peaks.phases:
        taken = f"GPU {peak.device_bytes / GIB:.1f} GiB, host {peak.host_bytes / GIB:.1f} GiB"
        yield from _folded(f"while it {phase}s: {taken}, at its most while {peak.when}:")
        largest = sorted(peak.arrays, key=lambda array: -array.num_bytes)
        named = largest[: _LARGEST_ARRAYS.get(phase, 2)]
        for array in named:
            place = "host" if array.on_host else "device"
            yield f"  {array.num_bytes / GIB:8.2f} GiB  {place:6s}  {array.name}"
        for place, total in (("device", peak.device_bytes), ("host", peak.host_bytes)):
            # Without a GPU the host holds everything.
            here = [a for a in named if not peak.device_bytes or a.on_host is (place == "host")]
            rest = total / GIB - sum(round(a.num_bytes / GIB, 2) for a in here)
            if total and rest >= 0.005:
                yield f"  {rest:8.2f} GiB  {place:6s}  the rest: other arrays, the process itself"


def _change_text(one: dict[str, Any], taken: Rung | None) -> str:
    if one["chosen"] is None:
        return f"{one['what']}: nothing fits even so"
    same = taken is not None and one["chosen"] == taken.name
    if same and (one["speedup"] is None or abs(one["speedup"] - 1) < LEAST_CHANGE):
        return f"{one['what']}: changes nothing"
    text = f"{one['what']}: {'the same' if same else one['chosen']}"
    if one["tokens_per_s"]:
        text += f", {one['iteration_s']:.2f} s, {one['tokens_per_s']:,.0f} tokens/s"
    return text + (f" ({one['speedup']:.2f} x)" if one["speedup"] else "")


def _folded(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, subsequent_indent="  ", break_on_hyphens=False)
