"""``python -m deep_optimizer_states plan``: a run's time, memory and best policy, predicted."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.predict.machine import RATE_NAMES, Machine, load_machine, machine_names
from deep_optimizer_states.predict.memory.peaks import GIB
from deep_optimizer_states.predict.model import load_model, model_names
from deep_optimizer_states.predict.predict import Prediction, predict
from deep_optimizer_states.predict.rank import num_nodes
from deep_optimizer_states.predict.workload import (
    OURS,
    POLICIES,
    STOCK,
    Workload,
    WorkloadError,
    one_of,
)

ENGINES = {STOCK.name: STOCK, OURS: None}
SUBGROUP_NUMEL = 100_000_000
"""As in the published runs of every model."""
MAX_TILES = 10_000
"""Of a rank; each is simulated, for every policy that is weighed."""
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
        text = _as_text(workload, machine, predict(workload, machine))
    except KeyboardInterrupt:
        sys.stderr.write("plan: interrupted\n")
        return INTERRUPTED
    except DeepOptimizerStatesError as error:
        sys.stderr.write(f"plan: {_by_flags(str(error))}\n")
        return 2
    sys.stdout.write(f"{text}\n")
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
    number: dict[str, Any] = {"type": _whole, "metavar": "N"}
    profiles = ", ".join(machine_names())
    add("--model", required=True, help=f"{', '.join(model_names())}, or a TOML file")
    add("--machine", required=True, help=f"a profile ({profiles}), or a file that calibrate wrote")
    add("--engine", default=OURS, help=", ".join(ENGINES))
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
    add("--policy", help=f"for engine ours: {', '.join(POLICIES)} (default: auto)")
    text = "sub_group_size, in elements"
    add("--subgroup", dest="subgroup_numel", **number, default=SUBGROUP_NUMEL, help=text)
    text = "engine ours: largest tile, in elements"
    add("--tile", dest="tile_numel", **number, default=2**25, help=text)
    add("--dtype", default="bf16", help="of weights: bf16, fp16, or fp32 without GPUs")
    for flag, field, is_on, text in (
        ("--no-just-in-time", "just_in_time_forward", False, "ours: update before forward begins"),
        ("--no-device-grads", "keeps_device_grads", False, "ours: all gradients go to the host"),
        ("--weights-on-host", "weights_on_host", True, "16-bit weights too, as by offload_param"),
        ("--no-checkpointing", "activation_checkpointing", False, "keep activations"),
        ("--flash-attention", "materialized_attention", False, "write no attention scores"),
    ):
        add(flag, dest=field, action="store_true" if is_on else "store_false", help=text)
    return parser


def _whole(text: str) -> int:
    try:
        number = float(text)
    except ValueError:
        number = 0.5
    if not number.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, as 100000000 or 1e8")
    return int(number)


def _by_flags(message: str) -> str:
    """Name in a message the flags instead of the workload's fields that they set."""
    for action in _parser()._actions:
        if "_" in action.dest:
            message = re.sub(rf"\b{action.dest}\b", action.option_strings[0], message)
    return re.sub(r"^([a-z]+) = ", r"--\1 = ", message)


def workload_from(given: argparse.Namespace, machine: Machine) -> Workload:
    """Return the workload that the arguments ask for; ranks are the GPUs of ``machine`` by itself.

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


def _as_text(workload: Workload, machine: Machine, prediction: Prediction) -> str:
    times = [
        ("forward", prediction.forward_s),
        ("backward", prediction.backward_s),
        ("update", prediction.update_s),
        ("outside the phases", prediction.outside_s),
        ("hidden behind forward", -prediction.hidden_s),
    ]
    memory = prediction.memory
    parameters = workload.model.num_parameters(workload.tp)
    lines = [
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
    residuals = residual_lines(machine.residuals)
    return "\n".join([*lines, *([""] if residuals else []), *residuals])


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


def _nodes(workload: Workload, machine: Machine) -> list[str]:
    nodes = num_nodes(workload, machine)
    if nodes == 1:
        return []
    return [f"{nodes} nodes of {machine.gpus} GPUs; the network between them is not modelled"]


def _kinds(machine: Machine) -> str:
    known = (name for name in RATE_NAMES if getattr(machine.rates, name) is not None)
    counts = Counter(map(machine.kind, known))
    return "rates: " + ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
