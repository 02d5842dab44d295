"""Machines: their rates, where each figure comes from, and the file that holds them.

A profile is a TOML file::

    name = "h100x4"                     # printed beside every figure predicted from it
    source = "where the figures come from, in a sentence"
    gpus = 4                            # of one node; 0 for none
    cores = 96                          # physical cores of one node, or CPUs of a virtual one
    host_memory_bytes = 540e9           # of one node
    device_memory_bytes = 85e9          # of one GPU; leave out without GPUs

    [rates]                             # a rate that is left out was not measured
    h2d_bytes_per_s = 50e9              # page-locked copies of one GPU, one way at a time
    d2h_bytes_per_s = 50e9
    h2d_both_bytes_per_s = 40e9         # the same while the other way is busy too
    d2h_both_bytes_per_s = 40e9
    pageable_h2d_bytes_per_s = 9e9      # 16-bit weights that torch casts and copies, blocking
    pageable_d2h_bytes_per_s = 5e9      # to memory that is not page-locked
    device_flops_per_s = 400e12         # 16-bit matrix products of a large model
    device_stream_bytes_per_s = 2.5e12  # device memory, read and written
    device_adam_parameters_per_s = 90e9
    gather_bytes_per_s = 200e9          # per GPU, in all-gathers and reduce-scatters
    # Rates of the host are of ONE process by its threads: [[threads, rate], ...], rising.
    host_stream_bytes_per_s = [[1, 12e9], [8, 90e9], [96, 300e9]]
    host_adam_parameters_per_s = [[1, 0.3e9], [96, 8e9]]        # DeepSpeedCPUAdam.step alone
    host_fused_parameters_per_s = [[1, 0.6e9], [96, 16e9]]      # this engine's one pass

    [kinds]                             # of each rate and cost; those not named are "measured"
    gather_bytes_per_s = "assumed"      # measured, fitted or assumed

    [costs]                             # optional: times that no rate explains, in s; default 0
    [residuals]                         # optional: errors that a fit of the rates left over

Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.toml_io import did_you_mean, explain, read_toml

Kind = Literal["measured", "fitted", "assumed"]
Rate = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=1)]


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("give text")
    return text


Text = Annotated[str, AfterValidator(_not_blank)]


def _rises(curve: Curve) -> Curve:
    if any(later[0] <= earlier[0] for earlier, later in itertools.pairwise(curve)):
        raise ValueError("threads must rise from pair to pair")
    return curve


Curve = Annotated[tuple[tuple[Count, Rate], ...], Field(min_length=1), AfterValidator(_rises)]
"""Rate of one process by its number of threads, rising."""
MACHINES_DIR = Path(__file__).resolve().parent / "machines"
HOW_TO_MEASURE = "`python -m deep_optimizer_states calibrate -o machine.toml` measures it"


class MachineError(DeepOptimizerStatesError, ValueError):
    """A profile is not there, is wrong, or lacks a rate that is asked for."""


@dataclass(frozen=True)
class Rates:
    """Bytes, parameters or floating-point operations a second; None = not measured."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    h2d_bytes_per_s: Rate | None = None
    d2h_bytes_per_s: Rate | None = None
    h2d_both_bytes_per_s: Rate | None = None
    d2h_both_bytes_per_s: Rate | None = None
    pageable_h2d_bytes_per_s: Rate | None = None
    pageable_d2h_bytes_per_s: Rate | None = None
    device_flops_per_s: Rate | None = None
    device_stream_bytes_per_s: Rate | None = None
    device_adam_parameters_per_s: Rate | None = None
    gather_bytes_per_s: Rate | None = None
    host_stream_bytes_per_s: Curve | None = None
    host_adam_parameters_per_s: Curve | None = None
    host_fused_parameters_per_s: Curve | None = None


@dataclass(frozen=True)
class Costs:
    """Times that no rate explains, in seconds."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    launch_s: Seconds = 0.0  # of a layer in every pass at stage 3: kernels are launched, hooks run
    hooks_s: Seconds = 0.0  # part of launch_s that stage 3's hooks take; below there are none
    leaf_hooks_s: Seconds = 0.0  # what is left of hooks_s where each layer is a leaf module
    layer_s: Seconds = 0.0  # of a layer's forward at stage 3: its parameters are fetched
    grads_s: Seconds = 0.0  # of a layer's backward at stages 1 and 2: gradients go into buckets
    micro_batch_s: Seconds = 0.0  # outside the phases, for each micro-batch: data, logging
    iteration_s: Seconds = 0.0  # outside the phases, for each iteration


RATE_NAMES = tuple(item.name for item in dataclasses.fields(Rates))
COST_NAMES = tuple(item.name for item in dataclasses.fields(Costs))


@dataclass(frozen=True)
class Machine:
    """One kind of node; the fields are those of a profile."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: Text
    source: Text
    gpus: Annotated[int, Field(strict=True, ge=0)]
    cores: Count
    host_memory_bytes: Rate
    device_memory_bytes: Rate | None = None
    rates: Rates = Rates()
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    costs: Costs = Costs()
    residuals: Mapping[str, Any] = field(default_factory=dict)

    def kind(self, name: str) -> Kind:
        """Return how a rate or a cost came about."""
        return self.kinds.get(name, "measured")

    @property
    def known(self) -> list[str]:
        """Return the names of the rates and costs that the profile has."""
        rates = [name for name in RATE_NAMES if getattr(self.rates, name) is not None]
        return rates + [name for name in COST_NAMES if getattr(self.costs, name)]

    def rate(self, name: str) -> float:
        """Return a rate that is one number.

        Raises:
            MachineError: It was not measured; says what measures it.
        """
        value = getattr(self.rates, name)
        if value is None:
            raise self._missing(name)
        return float(value)

    def curve(self, name: str, threads: float) -> float:
        """Return a rate of the host for one process, linear between the threads measured.

        Raises:
            MachineError: It was not measured; says what measures it.
        """
        points: Curve | None = getattr(self.rates, name)
        if points is None:
            raise self._missing(name)
        if threads <= points[0][0]:
            return points[0][1] * threads / points[0][0]
        for (below, low), (above, high) in itertools.pairwise(points):
            if threads <= above:
                return low + (high - low) * (threads - below) / (above - below)
        return points[-1][1]

    def _missing(self, name: str) -> MachineError:
        return MachineError(
            f"machine '{self.name}' has no rates.{name}: {HOW_TO_MEASURE} on the machine itself"
        )


_ADAPTER = TypeAdapter(Machine)


def machine_names() -> list[str]:
    """Return the names of the shipped profiles."""
    return sorted(path.stem for path in MACHINES_DIR.glob("*.toml"))


def load_machine(name_or_file: str | Path) -> Machine:
    """Read a shipped profile by name, or any by its path.

    Raises:
        MachineError: There is none (the nearest is named), or a field is wrong.
    """
    path = Path(name_or_file)
    if str(name_or_file) in machine_names():
        path = MACHINES_DIR / f"{name_or_file}.toml"
    elif path.suffix != ".toml" and not path.is_file():
        hint = did_you_mean(name_or_file, machine_names())
        raise MachineError(
            f"unknown machine '{name_or_file}': {hint}known: {', '.join(machine_names())}; or give "
            "a file that `python -m deep_optimizer_states calibrate -o machine.toml` wrote"
        )
    return machine_from_table(read_toml(path, MachineError), source=str(path))


def machine_from_table(table: Mapping[str, Any], source: str = "machine") -> Machine:
    """Build a machine from what a profile holds.

    Args:
        table: The profile's fields.
        source: What errors begin with.

    Raises:
        MachineError: A field is unknown, missing or impossible.
    """
    try:
        machine = _ADAPTER.validate_python(dict(table))
    except ValidationError as error:
        known = [item.name for kind in (Machine, Rates, Costs) for item in dataclasses.fields(kind)]
        raise MachineError(f"{source}: {explain(error, known)}") from None
    if unknown := [name for name in machine.kinds if name not in RATE_NAMES + COST_NAMES]:
        raise MachineError(f"{source}: kinds.{unknown[0]}: there is no such rate or cost")
    if machine.costs.hooks_s > machine.costs.launch_s:
        raise MachineError(
            f"{source}: costs.hooks_s = {machine.costs.hooks_s:g}: it is a part of costs.launch_s "
            f"({machine.costs.launch_s:g}) and cannot be more"
        )
    if machine.gpus and machine.device_memory_bytes is None:
        raise MachineError(f"{source}: device_memory_bytes is missing: of one GPU, in bytes")
    return machine


def profile_text(table: Mapping[str, Any], notes: Mapping[str, str] | None = None) -> str:
    """Return a profile as TOML, checked as a reader of it will.

    Args:
        table: Its fields; what is None is left out.
        notes: Remarks by the name of a rate; those of a rate that is not there stand alone.

    Raises:
        MachineError: The reader would refuse it.
    """
    given = {name: value for name, value in table.items() if value is not None}
    tables = {name: given.pop(name) for name in tuple(given) if isinstance(given[name], Mapping)}
    machine_from_table({**given, **tables}, source="the profile")
    lines = [f"{name} = {_value(value)}" for name, value in given.items()]
    for name, rows in tables.items():
        if not rows:
            continue
        lines += ["", f"[{name}]"]
        known = notes if notes and name == "rates" else {}
        rows = {key: value for key, value in rows.items() if value is not None}
        for key, value in rows.items():
            note = f"  # {known[key]}" if key in known else ""
            lines.append(f"{key} = {_value(value)}{note}")
        lines += [f"# {key}: {note}" for key, note in known.items() if key not in rows]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
