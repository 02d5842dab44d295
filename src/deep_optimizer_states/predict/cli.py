"""``python -m deep_optimizer_states plan``: a run's time, memory and best policy, predicted."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from deep_optimizer_states.config import DEFAULT_TILE_NUMEL
from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.predict.limits import changes_of, limits_of
from deep_optimizer_states.predict.machine import Machine, load_machine, machine_names
from deep_optimizer_states.predict.model import load_model, model_names
from deep_optimizer_states.predict.predict import Prediction, num_nodes, predict
from deep_optimizer_states.predict.workload import (
    AUTO,
    PLUGIN,
    POLICIES,
    STOCK,
    Workload,
    WorkloadError,
    one_of,
)
from deep_optimizer_states.units import GIB

ENGINES = {STOCK.name: STOCK, PLUGIN: None}
ALIASES = {"zero3": STOCK.name, "vanilla": STOCK.name, "ours": PLUGIN}
"""Other names of engines, as earlier releases and the paper have them."""
OPTIONS = {
    "micro_batch_size": "--micro-batch",
    "offload_ratio": "--ratio",
    "subgroup_numel": "--subgroup",
}
"""Fields of a workload whose options are called otherwise."""
INTERRUPTED = 130
"""The exit status of what Ctrl-C ended, as shells have it."""
_EPILOG = """\
engines: stock (DeepSpeed's own update; also zero3, vanilla), plugin (this package, whose policy is
chosen unless given; also ours).
Nothing is run: every figure is predicted from the rates of the machine's profile."""


COLUMNS = 100
"""Width of a terminal that every line fits into."""


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
        lines = _as_lines(workload, machine, prediction)
        if given.explain:
            lines += ["", *_explained(workload, machine, prediction)]
    except KeyboardInterrupt:
        sys.stderr.write("plan: interrupted\n")
        return INTERRUPTED
    except DeepOptimizerStatesError as error:
        sys.stderr.write(f"plan: {_by_option(str(error))}\n")
        return 2
    if sys.stdout.isatty():
        lines = [part for line in lines for part in _folded(line)]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _by_option(message: str) -> str:
    """Begin a message about a field of the workload with the option that sets it."""
    option = OPTIONS.get(message.partition(" = ")[0])
    return f"{option}: {message}" if option else message


def _folded(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(line, COLUMNS, subsequent_indent=indent, break_on_hyphens=False) or [line]


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
    number: dict[str, Any] = {"type": _whole, "metavar": "N"}
    profiles = ", ".join(machine_names())
    add("--model", required=True, help=f"{', '.join(model_names())}, or a TOML file")
    add("--machine", required=True, help=f"a profile ({profiles}), or a file that calibrate wrote")
    add("--engine", default=PLUGIN, help=", ".join(ENGINES))
    add("--dp", **number, help="data-parallel ranks (default: the GPUs of one node)")
    add("--tp", **number, default=1, help="tensor-parallel ranks")
    text = "samples a rank handles in one forward (default: the model's)"
    add("--micro-batch", dest="micro_batch_size", **number, help=text)
    add("--accumulation", **number, default=1, help="micro-batches a rank sums before an update")
    add("--sequence-length", **number, help="tokens a sample (default: the model's)")
    text = "share of the optimizer state in host memory"
    add("--ratio", dest="offload_ratio", metavar="SHARE", type=float, default=1.0, help=text)
    text = "one subgroup in this many is updated on the GPU (default: 2, where it applies)"
    add("--stride", **number, help=text)
    add("--policy", help=f"for engine plugin: {', '.join(POLICIES)} (default: auto)")
    add(
        "--stage", **number, default=3, help="of ZeRO, with the optimizer in host memory: 1, 2 or 3"
    )
    text = "sub_group_size, in elements (default: 100000000; below stage 3 the plugin's tile)"
    add("--subgroup", dest="subgroup_numel", **number, help=text)
    text = "plugin: GiB of device memory in which state may stay, or auto"
    room: dict[str, Any] = {"dest": "device_memory_bytes", "metavar": "GIB", "type": _gib}
    add("--device-memory", **room, default=AUTO, help=text)
    add("--explain", action="store_true", default=False, help="what limits it, what would gain")
    add("--dtype", default="bf16", help="of weights: bf16, fp16, or fp32 without GPUs")
    for flag, field, value, text in (
        (
            "--no-just-in-time",
            "just_in_time_forward",
            False,
            "plugin: update before forward begins",
        ),
        ("--weights-on-host", "weights_at", "cpu", "16-bit weights too, as by offload_param"),
        ("--no-checkpointing", "activation_checkpointing", False, "keep activations"),
        ("--flash-attention", "materialized_attention", False, "write no attention scores"),
    ):
        add(flag, dest=field, action="store_const", const=value, help=text)
    return parser


def _whole(text: str) -> int:
    try:
        number = float(text)
    except ValueError:
        number = 0.5
    if not number.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, as 100000000 or 1e8")
    return int(number)


def _gib(text: str) -> float | str:
    if text == AUTO:
        return text
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: give GiB, at least 0, or {AUTO}")
    return number * GIB


def workload_from(given: argparse.Namespace, machine: Machine) -> Workload:
    """Return the workload that the arguments ask for; ranks are the GPUs of ``machine`` by itself.

    Raises:
        ModelError: There is no such model.
        WorkloadError: A value is impossible.
    """
    engine = ALIASES.get(given.engine, given.engine)
    one_of("engine", engine, tuple(ENGINES))
    model, defaults = load_model(given.model)
    known = {item.name for item in dataclasses.fields(Workload)} - {"model"}
    fields = {name: value for name, value in vars(given).items() if name in known}
    if given.stage in (1, 2):  # where stock has no subgroups, and its default no meaning
        fields.setdefault("subgroup_numel", DEFAULT_TILE_NUMEL)
    fields.setdefault("dp", max(1, machine.gpus // max(1, given.tp)))
    for name in ("policy", "stride"):
        if name in fields and engine != PLUGIN:
            raise WorkloadError(
                f"{name} = {fields[name]!r}: engine '{engine}' has its own; leave it out, or "
                f"choose {PLUGIN}"
            )
    if "stride" in fields and fields.setdefault("policy", "stride") != "stride":
        raise WorkloadError(
            f"stride = {given.stride}: policy '{given.policy}' has no stride; leave one of them out"
        )
    return Workload(model, ENGINES[engine], **{**defaults, **fields})


def _as_lines(workload: Workload, machine: Machine, prediction: Prediction) -> list[str]:
    times = [
        ("forward", prediction.forward_s),
        ("backward", prediction.backward_s),
        ("update", prediction.update_s),
        ("outside the phases", prediction.outside_s),
        ("hidden behind forward", -prediction.hidden_s),
    ]
    model, memory, nodes = workload.model, prediction.memory, num_nodes(workload, machine)
    on_gpu = (
        f", of it page-locked {memory.page_locked_bytes / GIB:.1f}; GPU "
        f"{memory.device_bytes / GIB:.1f} GiB"
    )
    kinds = sorted(Counter(map(machine.kind, machine.known)).items())
    origins = ", ".join(f"{count} {kind}" for kind, count in kinds)
    network = f"{nodes} nodes of {machine.gpus} GPUs; the network between them is not modelled"
    residuals = residual_lines(machine.residuals)
    share = f"  {prediction.device_share:.0%} of the state stays on the device"
    return [
        f"{model.name} ({model.numel / 1e9:.2f}e9 parameters) with engine {workload.engine} on "
        f"{machine.name}: dp {workload.dp}, tp {workload.tp}, micro-batch "
        f"{workload.micro_batch_size}, accumulation {workload.accumulation}, "
        f"ZeRO stage {workload.stage}, {len(workload.subgroups)} subgroups a rank",
        f"machine: {machine.source} (rates and costs: {origins})",
        *([network] if nodes > 1 else []),
        "",
        f"  iteration  {prediction.iteration_s:8.3f} s   predicted, not run",
        *(f"    {name:22s} {seconds:7.3f} s" for name, seconds in times if seconds),
        f"  no schedule is faster than {prediction.bound_s:.3f} s at this ratio",
        f"  update bound by {prediction.binding}",
        f"  {prediction.policy}",
        *([share] if prediction.device_share else []),
        "",
        f"  memory a rank: host {memory.host_bytes / GIB:.1f} GiB{on_gpu if machine.gpus else ''}",
        f"  {'fits' if prediction.fits else 'DOES NOT FIT'}",
        *(f"    {lack}" for lack in prediction.shortages),
        *([""] if residuals else []),
        *residuals,
    ]


def _explained(workload: Workload, machine: Machine, prediction: Prediction) -> list[str]:
    lines = ["what limits each phase"]
    for phase, (resource, seconds) in limits_of(workload, machine).items():
        lines.append(f"  {phase:9s} {resource}: {seconds:.3f} s of it")
    lines += [f"  update    {prediction.binding}", "what would gain, one change at a time"]
    changes = changes_of(workload, machine, prediction)
    for change in changes:
        seconds = change.prediction.iteration_s
        lines.append(f"  {change.gain:4.0%} less a sample: {change.words} ({seconds:.3f} s)")
    return lines if changes else [*lines, "  nothing that the model knows and that fits"]


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
    return lines
