"""``python -m deep_optimizer_states plan``: a run's time, memory and best policy, predicted."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.predict.machine import (
    RATE_NAMES,
    Machine,
    load_machine,
    machine_names,
)
from deep_optimizer_states.predict.memory.offload import HEADROOM, ahead_room_bytes, memory_of
from deep_optimizer_states.predict.memory.peaks import CONTEXT_BYTES, GIB
from deep_optimizer_states.predict.model import load_model, model_names
from deep_optimizer_states.predict.predict import (
    AllResident,
    Prediction,
    all_resident,
    predict,
)
from deep_optimizer_states.predict.rank import num_nodes, rank_of
from deep_optimizer_states.predict.workload import (
    OURS,
    POLICIES,
    STATE_BYTES,
    STOCK,
    Workload,
    WorkloadError,
    one_of,
)

SCHEMA_VERSION = 1
ENGINES = {STOCK.name: STOCK, OURS: None}
SUBGROUP_NUMEL = 100_000_000
"""As in the published runs of every model."""
MAX_TILES = 10_000
"""Of a rank; each is simulated, for every policy and every setting that is weighed."""
RATIOS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
SUBGROUPS = (10_000_000, 50_000_000, 100_000_000, 200_000_000, 500_000_000)
GAIN = 0.02
"""A change that gains less is not advised."""
INTERRUPTED = 130
"""The exit status of what Ctrl-C ended, as shells have it."""
_EPILOG = """\
engines: zero3 (stock DeepSpeed), ours (this package; its policy is chosen unless given).
Nothing is run: every figure is predicted from the rates of the machine's profile."""


def main(argv: Sequence[str] | None = None) -> int:
    """Predict and print.

    Returns:
        The exit status: 0, 2 for a wrong argument, 130 after Ctrl-C.
    """
    given = _parser().parse_args(argv)
    try:
        machine = load_machine(given.machine)
        workload = workload_from(given, machine)
        prediction = predict(workload, machine)
        resident = all_resident(workload, machine)
        advice = advise(prediction.settled, machine, prediction.iteration_s)
    except KeyboardInterrupt:
        sys.stderr.write("plan: interrupted\n")
        return INTERRUPTED
    except DeepOptimizerStatesError as error:
        sys.stderr.write(f"plan: {_by_flags(str(error))}\n")
        return 2
    what = (workload, machine, prediction, resident, advice)
    sys.stdout.write(json.dumps(_as_json(*what), indent=2) if "json" in given else _as_text(*what))
    sys.stdout.write("\n")
    return 0


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the epilogue and shows every default."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deep_optimizer_states plan",
        description="Predict time and memory of a run, and the best policy.",
        epilog=_EPILOG,
        formatter_class=_Help,
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    profiles = ", ".join(machine_names())
    number: dict[str, Any] = {"type": _whole, "metavar": "N"}
    add("--model", required=True, help=f"{', '.join(model_names())}, or a TOML file")
    add("--machine", required=True, help=f"a profile ({profiles}), or a file that calibrate wrote")
    add("--engine", default=OURS, help=", ".join(ENGINES))
    add("--dp", **number, help="data-parallel ranks (default: the GPUs of one node)")
    add("--tp", **number, default=1, help="tensor-parallel ranks")
    text = "samples a rank handles in one forward (default: the model's)"
    add("--micro-batch", dest="micro_batch_size", **number, help=text)
    add("--accumulation", **number, default=1, help="micro-batches a rank sums before an update")
    text = "samples an iteration, checked if given (default: what the three above make)"
    add("--global-batch", dest="global_batch_size", **number, help=text)
    add("--sequence-length", **number, help="tokens a sample (default: the model's)")
    text = "share of the optimizer state in host memory"
    add("--ratio", dest="offload_ratio", metavar="SHARE", type=float, default=1.0, help=text)
    text = "one subgroup in this many is updated on the GPU (default: 2, where it applies)"
    add("--stride", **number, help=text)
    add("--policy", help=f"for engine ours: {', '.join(POLICIES)} (default: auto)")
    text = "sub_group_size, in elements"
    add("--subgroup", dest="subgroup_numel", **number, default=SUBGROUP_NUMEL, help=text)
    text = "engine ours: largest tile, in elements"
    add("--tile", dest="tile_numel", **number, default=2**25, help=text)
    text = "share of each GPU taken by another process"
    add("--hog-share", metavar="SHARE", type=float, default=0.0, help=text)
    text = "of weights and gradients: bf16, fp16, or fp32 without GPUs"
    add("--dtype", default="bf16", help=text)
    _add_switches(parser)
    return parser


def _add_switches(parser: argparse.ArgumentParser) -> None:
    off, on, ours = "store_false", "store_true", "engine ours:"
    add = parser.add_argument
    text = f"{ours} end the update before forward"
    add("--no-just-in-time", dest="just_in_time_forward", action=off, help=text)
    text = f"{ours} gradients of what the GPU updates go to the host and come back"
    add("--no-device-grads", dest="keeps_device_grads", action=off, help=text)
    text = f"{ours} update a tile in backward, once its gradients are final (no clipping)"
    add("--step-before-norm", action=on, help=text)
    text = f"{ours} GPU memory for state sent there in backward, in bytes, or auto"
    add("--prefetch-memory", dest="prefetch_memory_bytes", metavar="BYTES", type=_bytes, help=text)
    text = "16-bit weights live in host memory too, as with offload_param"
    add("--weights-on-host", action=on, help=text)
    text = "keep activations instead of recomputing"
    add("--no-checkpointing", dest="activation_checkpointing", action=off, help=text)
    text = "attention scores are not written out"
    add("--flash-attention", dest="materialized_attention", action=off, help=text)
    add("--json", action=on, help="print JSON")


def _whole(text: str) -> int:
    try:
        number = float(text)
    except ValueError:
        number = 0.5
    if not number.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, as 100000000 or 1e8")
    return int(number)


def _bytes(text: str) -> int | str:
    return text if text == "auto" else _whole(text)


def _by_flags(message: str) -> str:
    """Name in a message the flags instead of the workload's fields that they set."""
    for action in _parser()._actions:
        if "_" in action.dest:
            message = re.sub(rf"\b{action.dest}\b", action.option_strings[0], message)
    return re.sub(r"^([a-z]+) = ", r"--\1 = ", message)


def workload_from(given: argparse.Namespace, machine: Machine) -> Workload:
    """Return the workload that the arguments ask for.

    Args:
        given: The arguments.
        machine: Whose GPUs the ranks take unless ``--dp`` is given.

    Raises:
        ModelError: There is no such model.
        WorkloadError: A value is impossible.
    """
    one_of("engine", given.engine, tuple(ENGINES))
    shape, defaults = load_model(given.model)
    known = {item.name for item in dataclasses.fields(Workload)} - {"model"}
    fields = {name: value for name, value in vars(given).items() if name in known}
    fields["policy"] = _policy(given)
    fields.setdefault("dp", max(1, machine.gpus // max(1, given.tp)))
    workload = Workload(shape, ENGINES[given.engine], **{**defaults, **fields})
    _check_tiles(workload)
    return workload


def _policy(given: argparse.Namespace) -> str:
    """Return the policy that is asked for; ``--stride`` alone asks for ``stride``."""
    policy, stride = (getattr(given, name, None) for name in ("policy", "stride"))
    if given.engine != OURS:
        for name, value in (("policy", policy), ("stride", stride)):
            if value is not None:
                raise WorkloadError(
                    f"{name} = {value!r}: engine '{given.engine}' has its own; "
                    f"leave it out, or choose {OURS}"
                )
    if stride is None or stride < 1:
        return policy or "auto"
    if policy in POLICIES and policy != "stride":
        raise WorkloadError(
            f"stride = {stride}: policy '{policy}' has no stride; leave one of them out"
        )
    return policy or "stride"


def _check_tiles(workload: Workload) -> None:
    if workload.software is not None:
        return
    tiles = sum(-(-numel // workload.tile_numel) for numel in workload.subgroups)
    if tiles > MAX_TILES:
        raise WorkloadError(
            f"tile_numel = {workload.tile_numel}: cuts a rank's {sum(workload.subgroups):,} "
            f"parameters into {tiles:,} tiles, of which at most {MAX_TILES:,} are simulated; give "
            "a larger tile or more ranks (--dp)"
        )


def _as_json(
    workload: Workload,
    machine: Machine,
    prediction: Prediction,
    resident: AllResident | None,
    advice: Sequence[str],
) -> dict[str, Any]:
    times = ("iteration_s", "forward_s", "backward_s", "update_s", "outside_s", "hidden_s")
    left_out = ("model", "software", "subgroup_numels")
    names = [item.name for item in dataclasses.fields(workload) if item.name not in left_out]
    settings = {name: getattr(workload, name) for name in ["engine", *names]}
    settings |= {"global_batch_size": workload.samples, "sequence_length": workload.sequence}
    return {
        "schema_version": SCHEMA_VERSION,
        "simulated": True,
        "model": dataclasses.asdict(workload.model)
        | {"parameters": workload.model.num_parameters(workload.tp)},
        "workload": settings,
        "subgroups": len(workload.subgroups),
        "predicted": {name: getattr(prediction, name) for name in times},
        "memory": dataclasses.asdict(prediction.memory),
        "fits": prediction.fits,
        "shortages": prediction.shortages,
        "all_resident": dataclasses.asdict(resident) if resident else None,
        "binding": prediction.binding,
        "bound_s": prediction.bound_s,
        "policy": prediction.policy,
        "advice": advice,
        "machine": {
            "name": machine.name,
            "source": machine.source,
            "kinds": {
                name: machine.kind(name)
                for name in RATE_NAMES
                if getattr(machine.rates, name) is not None
            },
            "residuals": dict(machine.residuals),
        },
    }


def _as_text(
    workload: Workload,
    machine: Machine,
    prediction: Prediction,
    resident: AllResident | None,
    advice: Sequence[str],
) -> str:
    times = [
        ("forward", prediction.forward_s),
        ("backward", prediction.backward_s),
        ("update", prediction.update_s),
        ("outside the phases", prediction.outside_s),
        ("hidden behind forward", -prediction.hidden_s),
    ]
    memory = prediction.memory
    parameters = workload.model.num_parameters(workload.tp)
    lines = [] if resident is None else [_resident_line(resident, prediction), ""]
    lines += [
        f"{workload.model.name} ({parameters / 1e9:.2f}e9 parameters) with engine "
        f"{workload.engine} on {machine.name}: dp {workload.dp}, tp {workload.tp}, micro-batch "
        f"{workload.micro_batch_size}, accumulation {workload.accumulation}, "
        f"{len(workload.subgroups)} subgroups a rank",
        f"machine: {machine.source} ({_kinds(machine)})",
        *_nodes(workload, machine),
        "",
        f"  iteration  {prediction.iteration_s:8.3f} s   predicted, not run",
    ]
    lines += [f"    {name:22s} {seconds:7.3f} s" for name, seconds in times if seconds]
    lines += [
        f"  no schedule is faster than {prediction.bound_s:.3f} s at this ratio",
        f"  update bound by {prediction.binding}",
        f"  {prediction.policy}",
        "",
        f"  memory a rank: host {memory.host_bytes / GIB:.1f} GiB"
        + (
            f", of it page-locked {memory.page_locked_bytes / GIB:.1f}; GPU "
            f"{memory.device_bytes / GIB:.1f} GiB"
            if machine.gpus
            else ""
        ),
        f"  {'fits' if prediction.fits else 'DOES NOT FIT'}",
    ]
    lines += [f"    {lack}" for lack in prediction.shortages]
    lines += ["", "advice"]
    lines += [f"  {sentence}" for sentence in advice]
    residuals = residual_lines(machine.residuals)
    return "\n".join([*lines, *([""] if residuals else []), *residuals])


def _resident_line(resident: AllResident, prediction: Prediction) -> str:
    faster = ""
    if prediction.fits:
        times = prediction.iteration_s / resident.iteration_s
        faster = f" ({times:.1f} times faster than the {prediction.iteration_s:.3f} s below)"
    return (
        f"all optimizer state fits on the GPU: ratio 0 takes {resident.iteration_s:.3f} s an "
        f"iteration{faster}, {resident.device_bytes / GIB:.1f} of {resident.room_bytes / GIB:.1f} "
        "GiB; predicted, not run"
    )


def residual_lines(found: Mapping[str, Any]) -> list[str]:
    """Return a profile's residuals as lines of text; none for a profile that was not fitted."""
    if not found:
        return []
    lines = [
        f"fit: {found['rows']} rows, median error {found['median']:.1%}, worst {found['worst']:.1%}"
    ]
    for key, value in found.items():
        if isinstance(value, list):
            lines.append(f"  {key.removesuffix('_s')}: median {value[0]:.1%}, worst {value[1]:.1%}")
    for model, (median, worst) in found.get("left_out", {}).items():
        lines.append(f"  {model} from the other models: median {median:.1%}, worst {worst:.1%}")
    return lines


def _nodes(workload: Workload, machine: Machine) -> list[str]:
    nodes = num_nodes(workload, machine)
    if nodes == 1:
        return []
    return [f"{nodes} nodes of {machine.gpus} GPUs; the network between them is not modelled"]


def _kinds(machine: Machine) -> str:
    known = (name for name in RATE_NAMES if getattr(machine.rates, name) is not None)
    counts = Counter(map(machine.kind, known))
    return "rates: " + ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def advise(workload: Workload, machine: Machine, total_s: float) -> list[str]:
    """Return what to change and the figure behind it, a sentence each.

    Args:
        workload: With its policy settled.
        machine: Where it runs.
        total_s: Its iteration.
    """
    found = [
        _engine(workload, machine, total_s),
        _ratio(workload, machine, total_s),
        _subgroups(workload, machine, total_s),
        _prefetch(workload, machine),
        _pinned(workload, machine),
        _threads(workload, machine),
    ]
    return [sentence for sentence in found if sentence]


def _engine(workload: Workload, machine: Machine, total_s: float) -> str:
    if workload.software is None:
        own = dataclasses.replace(workload, step_before_norm=False, prefetch_memory_bytes=0)
        stock = predict(dataclasses.replace(own, software=STOCK), machine).iteration_s
        return (
            f"engine: stock DeepSpeed would take {stock:.3f} s an iteration, {stock / total_s:.2f} "
            "times as long"
        )
    ours = predict(dataclasses.replace(workload, software=None, policy="auto"), machine).iteration_s
    return f"engine: 'ours' would take {ours:.3f} s an iteration, {total_s / ours:.2f} times faster"


def _ratio(workload: Workload, machine: Machine, total_s: float) -> str:
    """Advise the smallest share in host memory that the device has room for, if it pays."""
    if not machine.gpus:
        return ""
    assert machine.device_memory_bytes is not None
    room = machine.device_memory_bytes * HEADROOM - CONTEXT_BYTES
    used = memory_of(workload, machine, workload.policy).device_bytes
    smaller = [ratio for ratio in RATIOS if ratio < workload.offload_ratio]
    best, best_s, best_bytes = workload.offload_ratio, total_s, used
    for ratio in smaller:
        other = dataclasses.replace(workload, offload_ratio=ratio)
        need = memory_of(other, machine, workload.policy).device_bytes
        if need > room:
            break
        seconds = predict(other, machine).iteration_s
        if seconds < best_s:
            best, best_s, best_bytes = ratio, seconds, need
    if best_s < total_s * (1 - GAIN):
        return (
            f"ratio: {best:g} keeps {100 * (1 - best):.0f}% of the optimizer state on the GPU "
            f"({best_bytes / GIB:.1f} of {room / GIB:.1f} GiB) and takes {best_s:.3f} s an "
            f"iteration, {total_s / best_s:.2f} times faster"
        )
    return (
        f"ratio: stay at {workload.offload_ratio:g}; no lower one that fits into the GPU's free "
        f"{max(0.0, room - used) / GIB:.1f} GiB gains {100 * GAIN:.0f}%"
    )


def _subgroups(workload: Workload, machine: Machine, total_s: float) -> str:
    timed = [
        (predict(dataclasses.replace(workload, subgroup_numel=numel), machine).iteration_s, numel)
        for numel in SUBGROUPS
    ]
    seconds, numel = min(timed)
    if workload.subgroup_numels or seconds >= total_s * (1 - GAIN):
        spread = max(timed)[0] / seconds - 1
        return (
            f"subgroup size: {workload.subgroup_numel:,} is good; from {SUBGROUPS[0]:,} to "
            f"{SUBGROUPS[-1]:,} iterations differ by {100 * spread:.1f}%"
        )
    return (
        f"subgroup size: {numel:,} takes {seconds:.3f} s an iteration, {total_s / seconds:.2f} "
        f"times faster than {workload.subgroup_numel:,}"
    )


def _prefetch(workload: Workload, machine: Machine) -> str:
    """Warn of a limit given in bytes that is more than there is: memory that training needs."""
    limit = workload.prefetch_memory_bytes
    room = sum(ahead_room_bytes(workload, machine, workload.policy))
    if not isinstance(limit, int) or limit <= room:
        return ""
    return (
        f"prefetch memory: {limit / GIB:.1f} GiB are more than the {room / GIB:.1f} GiB that are "
        'free at the end of backward, and training may run out of memory: take "auto", or less'
    )


def _pinned(workload: Workload, machine: Machine) -> str:
    if not machine.gpus:
        return ""
    rates, memory = machine.rates, memory_of(workload, machine, workload.policy)
    locked = memory.page_locked_bytes
    words = f"pinned memory: lock {locked / GIB:.1f} GiB a rank"
    pageable, pinned = rates.pageable_d2h_bytes_per_s, rates.d2h_bytes_per_s
    if pageable is not None and pinned is not None:
        words += (
            f"; page-locked copies run at {pinned / 1e9:.0f} GB/s, others at {pageable / 1e9:.1f}"
        )
    if rates.page_lock_bytes_per_s is not None:
        words += f"; locking takes {locked / rates.page_lock_bytes_per_s:.0f} s once"
    return words


def _threads(workload: Workload, machine: Machine) -> str:
    rank = rank_of(workload, machine)
    threads = max(1, int(rank.threads))
    name = "host_adam_parameters_per_s" if workload.software else "host_fused_parameters_per_s"
    full = machine.curve(name, threads) / 1e9
    one = machine.curve(name, 1) / 1e9
    moved = STATE_BYTES * 2 * sum(workload.subgroups) / rank.host_bytes_per_s
    if threads == 1:
        return (
            f"threads: a rank has one core, so OMP_NUM_THREADS=1; the host updates {one:.2f}e9 "
            f"parameters/s, and host memory alone bounds a rank's update to {moved:.3f} s"
        )
    return (
        f"threads: OMP_NUM_THREADS={threads} a rank, bound to the cores of its own socket "
        f"(--bind_cores_to_rank); with one thread the host updates {one:.2f}e9 parameters/s, with "
        f"{threads} {full:.2f}e9, and host memory alone bounds a rank's update to {moved:.3f} s"
    )
