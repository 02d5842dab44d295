"""``python -m deep_optimizer_states plan``: a run's time, memory and best policy, predicted."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.predict.fit_profile import summary_lines
from deep_optimizer_states.predict.machine import (
    RATE_NAMES,
    Machine,
    load_machine,
    machine_names,
)
from deep_optimizer_states.predict.model import load_model
from deep_optimizer_states.predict.predict import Prediction, predict
from deep_optimizer_states.predict.workload import ENGINES, POLICIES, Workload, WorkloadError

GIB = 2**30
SCHEMA_VERSION = 1
SUBGROUP_NUMEL = 100_000_000
"""As in the published runs of every model."""
_EPILOG = """\
engines: zero3-0.13 (the paper's baseline), async-0.13 (its asynchronous gradients), paper (its
hybrid update), zero3 (today's DeepSpeed), ours (this package; its policy is chosen unless given).
Nothing is run: every figure is predicted from the rates of the machine's profile."""


def main(argv: Sequence[str] | None = None) -> int:
    """Predict and print; returns the exit status: 0, or 2 for a wrong argument."""
    given = _parser().parse_args(argv)
    try:
        machine = load_machine(given.machine)
        workload = workload_from(given)
        prediction = predict(workload, machine, with_advice=True)
    except DeepOptimizerStatesError as error:
        sys.stderr.write(f"plan: {error}\n")
        return 2
    if given.json:
        out = json.dumps(as_json(workload, machine, prediction), indent=2)
    else:
        out = as_text(workload, machine, prediction)
    sys.stdout.write(out + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deep_optimizer_states plan",
        description="Predict time and memory of a run, and the best policy.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="a name of configs/models (7B), or a TOML file")
    add(
        "--machine",
        required=True,
        help=f"a profile ({', '.join(machine_names())}), or a file that calibrate wrote",
    )
    add("--engine", default="ours", help=f"{', '.join(ENGINES)} (default: ours)")
    add("--dp", type=int, help="data-parallel ranks (default: the model's)")
    add("--tp", type=int, default=1, help="tensor-parallel ranks")
    add("--micro-batch", type=int, help="samples a rank handles in one forward")
    add("--accumulation", type=int, default=1, help="micro-batches a rank sums before an update")
    add("--global-batch", type=int, default=0, help="samples an iteration, checked if given")
    add("--sequence-length", type=int, default=0, help="tokens a sample (default: the model's)")
    add("--ratio", type=float, default=1.0, help="share of the optimizer state in host memory")
    add("--stride", type=int, help="one subgroup in this many is updated on the GPU")
    add("--policy", help=f"for engine ours: {', '.join(POLICIES)}")
    add("--subgroup", type=int, default=SUBGROUP_NUMEL, help="sub_group_size, in elements")
    add("--tile", type=int, default=2**25, help="engine ours: largest tile, in elements")
    add("--no-just-in-time", action="store_true", help="engine ours: end the update before forward")
    add("--no-checkpointing", action="store_true", help="keep activations instead of recomputing")
    add("--flash-attention", action="store_true", help="attention scores are not written out")
    add("--hog-share", type=float, default=0.0, help="share of each GPU taken by another process")
    add("--dtype", default="bf16", help="of weights and gradients: bf16, fp16 or fp32")
    add("--json", action="store_true", help="print JSON")
    return parser


def workload_from(given: argparse.Namespace) -> Workload:
    """The workload that the arguments ask for.

    Raises:
        ModelError: There is no such model.
        WorkloadError: A value is impossible.
    """
    shape, defaults = load_model(given.model)
    policy = given.policy
    if policy is not None and given.engine != "ours":
        raise WorkloadError(
            f"policy = {policy!r}: engine '{given.engine}' has its own; leave it out"
        )
    if given.stride is not None and given.engine not in ("ours", "paper"):
        raise WorkloadError(
            f"stride = {given.stride}: engine '{given.engine}' updates nothing on the GPU by "
            "stride; choose paper or ours"
        )
    if given.stride is not None and given.stride >= 1 and policy is None:
        policy = "stride"
    return Workload(
        shape,
        engine=given.engine,
        dp=defaults.get("dp", 1) if given.dp is None else given.dp,
        tp=given.tp,
        micro_batch_size=(
            defaults.get("micro_batch_size", 1) if given.micro_batch is None else given.micro_batch
        ),
        accumulation=given.accumulation,
        global_batch_size=given.global_batch,
        sequence_length=given.sequence_length,
        offload_ratio=given.ratio,
        stride=2 if given.stride is None else given.stride,
        policy=policy or "auto",
        just_in_time_forward=not given.no_just_in_time,
        subgroup_numel=given.subgroup,
        tile_numel=given.tile,
        activation_checkpointing=not given.no_checkpointing,
        materialized_attention=not given.flash_attention,
        hog_share=given.hog_share,
        dtype=given.dtype,
    )


def as_json(workload: Workload, machine: Machine, prediction: Prediction) -> dict[str, Any]:
    """The prediction as plain data."""
    times = ("iteration_s", "forward_s", "backward_s", "update_s", "outside_s", "hidden_s")
    settings = {
        item.name: getattr(workload, item.name)
        for item in dataclasses.fields(workload)
        if item.name not in ("model", "subgroup_numels")
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "simulated": True,
        "model": {**dataclasses.asdict(workload.model), "parameters": parameters(workload)},
        "workload": settings,
        "subgroups": len(workload.subgroups),
        "predicted": {name: getattr(prediction, name) for name in times},
        "memory": dataclasses.asdict(prediction.memory),
        "fits": prediction.fits,
        "shortages": prediction.shortages,
        "binding": prediction.binding,
        "bound_s": prediction.bound_s,
        "policy": prediction.policy,
        "advice": prediction.advice,
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


def as_text(workload: Workload, machine: Machine, prediction: Prediction) -> str:
    """The prediction for a person."""
    times = [
        ("forward", prediction.forward_s),
        ("backward", prediction.backward_s),
        ("update", prediction.update_s),
        ("outside the phases", prediction.outside_s),
        ("hidden behind forward", -prediction.hidden_s),
    ]
    memory = prediction.memory
    lines = [
        f"{workload.model.name} ({parameters(workload) / 1e9:.2f}e9 parameters) with engine "
        f"{workload.engine} on {machine.name}: dp {workload.dp}, tp {workload.tp}, micro-batch "
        f"{workload.micro_batch_size}, accumulation {workload.accumulation}, "
        f"{len(workload.subgroups)} subgroups a rank",
        f"machine: {machine.source} ({_kinds(machine)})",
        "",
        f"  iteration  {prediction.iteration_s:8.3f} s   predicted, not run",
    ]
    lines += [f"    {name:22s} {seconds:7.3f} s" for name, seconds in times if seconds]
    lines += [
        f"  no schedule is faster than {prediction.bound_s:.3f} s",
        f"  update bound by {prediction.binding}",
        f"  {prediction.policy}",
        "",
        f"  memory a rank: host {memory.host_bytes / GIB:.1f} GiB, of it page-locked "
        f"{memory.page_locked_bytes / GIB:.1f}; GPU {memory.device_bytes / GIB:.1f} GiB",
        f"  {'fits' if prediction.fits else 'DOES NOT FIT'}",
    ]
    lines += [f"    {lack}" for lack in prediction.shortages]
    lines += ["", "advice"]
    lines += [f"  {sentence}" for sentence in prediction.advice]
    residuals = summary_lines(machine.residuals)
    return "\n".join([*lines, *([""] if residuals else []), *residuals])


def parameters(workload: Workload) -> int:
    """Of the whole model."""
    return workload.model.num_parameters(workload.tp)


def _kinds(machine: Machine) -> str:
    counts: dict[str, int] = {}
    for name in RATE_NAMES:
        if getattr(machine.rates, name) is not None:
            counts[machine.kind(name)] = counts.get(machine.kind(name), 0) + 1
    return "rates: " + ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
