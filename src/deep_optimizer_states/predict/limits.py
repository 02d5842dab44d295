"""What limits each phase of a predicted iteration, and which change would gain most.

A resource limits a phase if the phase would be shortest without what that resource takes: each rate
in turn is made endless, each cost zero, and the phases are predicted again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deep_optimizer_states.config import DEFAULT_TILE_NUMEL
from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.predict.machine import Machine
from deep_optimizer_states.predict.predict import Prediction, phases_of, predict
from deep_optimizer_states.predict.workload import AUTO, Workload

RESOURCES: Mapping[str, tuple[str, ...]] = {
    "matrix products": ("device_flops_per_s",),
    "memory of the device": ("device_stream_bytes_per_s",),
    "copies between the ranks": ("gather_bytes_per_s",),
    "copies to and from host memory": (
        *("h2d_bytes_per_s", "d2h_bytes_per_s"),
        *("pageable_h2d_bytes_per_s", "pageable_d2h_bytes_per_s"),
    ),
}
"""Rates of a profile by what they are rates of, where forward and backward depend on them."""
HOST_WORK = "host work of each layer"
LEAST_GAIN = 0.01
"""A change that saves less than this share of a sample's time is not named."""


@dataclass(frozen=True)
class Change:
    """A change of settings, and what an iteration would be with it."""

    words: str
    prediction: Prediction
    gain: float  # share of a sample's time that it saves


def limits_of(workload: Workload, machine: Machine) -> dict[str, tuple[str, float]]:
    """Return what limits forward and backward.

    Returns:
        By phase: the resource, and the seconds that the phase would be shorter without it.

    Raises:
        MachineError, WorkloadError: As :func:`predict` does.
    """
    now, found = phases_of(workload, machine), {}
    without = {
        name: phases_of(workload, _endless(machine, rates)) for name, rates in RESOURCES.items()
    }
    layers = ("launch_s", "hooks_s", "leaf_hooks_s", "layer_s", "grads_s")
    costs = dataclasses.replace(machine.costs, **dict.fromkeys(layers, 0.0))
    without[HOST_WORK] = phases_of(workload, dataclasses.replace(machine, costs=costs))
    for phase in ("forward_s", "backward_s"):
        gains = {n: getattr(now, phase) - getattr(p, phase) for n, p in without.items()}
        longest = max(gains, key=lambda name: gains[name])
        found[phase.removesuffix("_s")] = (longest, gains[longest])
    return found


def _endless(machine: Machine, rates: tuple[str, ...]) -> Machine:
    known = [name for name in rates if getattr(machine.rates, name) is not None]
    without: dict[str, Any] = dict.fromkeys(known, math.inf)
    return dataclasses.replace(machine, rates=dataclasses.replace(machine.rates, **without))


def changes_of(workload: Workload, machine: Machine, now: Prediction) -> list[Change]:
    """Return changes that fit and gain, the best first.

    Args:
        workload: What runs.
        machine: Where it runs.
        now: What is predicted of it.
    """
    found, each_s = [], now.iteration_s / workload.micro_batch_size
    for words, other, where in _candidates(workload, machine):
        try:
            got = predict(other, where)
        except DeepOptimizerStatesError:  # there is no such run, or it has no time
            continue
        gain = 1 - got.iteration_s / other.micro_batch_size / each_s
        if got.fits and gain >= LEAST_GAIN:
            found.append(Change(words, got, gain))
    return sorted(found, key=lambda change: -change.gain)


def _candidates(of: Workload, machine: Machine) -> Iterator[tuple[str, Workload, Machine]]:
    def changed(**fields: object) -> Workload:
        return dataclasses.replace(of, **fields)  # type: ignore[arg-type]

    is_offloaded, is_ours = of.optimizer_at == "cpu", of.software is None
    if of.software is not None and is_offloaded:
        yield "the plugin", changed(software=None, policy="auto"), machine
    if of.stage == 3 and is_offloaded and not of.weights_on_host:
        cut = {"subgroup_numel": DEFAULT_TILE_NUMEL} if is_ours else {}
        yield "ZeRO stage 2", changed(stage=2, **cut), machine
    if is_ours and is_offloaded and of.device_memory_bytes != AUTO:
        words = "state kept on the device as far as there is room"
        yield words, changed(device_memory_bytes=AUTO), machine
    more = 2 * of.micro_batch_size
    yield f"micro-batch {more}", changed(micro_batch_size=more), machine
    if of.activation_checkpointing:
        yield "activations kept", changed(activation_checkpointing=False), machine
    costs = machine.costs
    if of.stage == 3 and costs.hooks_s:
        share = costs.leaf_hooks_s / costs.hooks_s
        fewer = dataclasses.replace(
            costs,
            launch_s=costs.launch_s - costs.hooks_s + costs.leaf_hooks_s,
            hooks_s=costs.leaf_hooks_s,
            layer_s=share * costs.layer_s,
        )
        words = "layers as leaf modules (fails where a layer is called by keywords alone)"
        yield words, of, dataclasses.replace(machine, costs=fewer)
