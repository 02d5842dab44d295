"""What a machine can do: its rates, where each figure comes from, and the file that holds them.

A profile is a TOML file::

    name = "h100x4"                     # printed beside every figure predicted from it
    source = "where the figures come from, in a sentence"
    gpus = 4                            # of one node; 0 for none
    cores = 96                          # physical cores of one node, or CPUs of a virtual one
    rank_threads = 46                   # optional: most threads a rank's host lane uses
    host_memory_bytes = 540e9           # of one node
    device_memory_bytes = 85e9          # of one GPU; leave out without GPUs

    [rates]                             # a rate that is left out was not measured
    h2d_bytes_per_s = 50e9              # page-locked copies of one GPU, one way at a time
    d2h_bytes_per_s = 50e9
    h2d_both_bytes_per_s = 40e9         # the same while the other way is busy too
    d2h_both_bytes_per_s = 40e9
    pageable_h2d_bytes_per_s = 9e9      # from and to memory that is not page-locked
    pageable_d2h_bytes_per_s = 5e9
    device_flops_per_s = 400e12         # 16-bit matrix products of a large model
    device_stream_bytes_per_s = 2.5e12  # device memory, read and written
    device_adam_parameters_per_s = 90e9
    gather_bytes_per_s = 200e9          # per GPU, in all-gathers and reduce-scatters
    page_lock_bytes_per_s = 3e9
    busy_memory_bytes_per_s = 340e9     # host memory, while cores and links of both ways use it
    # Rates of the host are of ONE process by its threads: [[threads, rate], ...], rising.
    host_stream_bytes_per_s = [[1, 12e9], [8, 90e9], [96, 300e9]]
    host_adam_parameters_per_s = [[1, 0.3e9], [96, 8e9]]        # DeepSpeedCPUAdam.step alone
    host_fused_parameters_per_s = [[1, 0.6e9], [96, 16e9]]      # this engine's one pass
    host_cast_parameters_per_s = [[1, 0.9e9], [96, 20e9]]       # fp32 to bf16

    [kinds]                             # of each rate; those not named are "measured"
    gather_bytes_per_s = "assumed"      # measured, fitted or assumed

    [costs]                             # optional: times that no rate explains, in s; default 0
    [residuals]                         # optional: errors that a fit of the rates left over

Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from deep_optimizer_states.errors import DeepOptimizerStatesError

Kind = Literal["measured", "fitted", "assumed"]
KINDS: tuple[Kind, ...] = ("measured", "fitted", "assumed")
Curve = tuple[tuple[int, float], ...]
"""Rate of one process by its number of threads, rising."""
MACHINES_DIR = Path(__file__).resolve().parent / "machines"
HOW_TO_MEASURE = "`python -m deep_optimizer_states calibrate -o machine.toml` measures it"


class MachineError(DeepOptimizerStatesError, ValueError):
    """A profile is not there, is wrong, or lacks a rate that is asked for."""


@dataclass(frozen=True)
class Rates:
    """Bytes, parameters or floating-point operations a second; None = not measured."""

    h2d_bytes_per_s: float | None = None
    d2h_bytes_per_s: float | None = None
    h2d_both_bytes_per_s: float | None = None
    d2h_both_bytes_per_s: float | None = None
    pageable_h2d_bytes_per_s: float | None = None
    pageable_d2h_bytes_per_s: float | None = None
    device_flops_per_s: float | None = None
    device_stream_bytes_per_s: float | None = None
    device_adam_parameters_per_s: float | None = None
    gather_bytes_per_s: float | None = None
    page_lock_bytes_per_s: float | None = None
    busy_memory_bytes_per_s: float | None = None
    host_stream_bytes_per_s: Curve | None = None
    host_adam_parameters_per_s: Curve | None = None
    host_fused_parameters_per_s: Curve | None = None
    host_cast_parameters_per_s: Curve | None = None


@dataclass(frozen=True)
class Costs:
    """Times that no rate explains, in seconds."""

    launch_s: float = 0.0
    """Of one layer in every pass, however few tokens it has: kernels are launched, hooks run."""
    layer_s: float = 0.0
    """Of one layer's forward beside its computing: parameters are fetched when it is reached."""
    micro_batch_s: float = 0.0
    """Outside the phases, for each micro-batch: data, logging, memory reports."""
    iteration_s: float = 0.0
    """Outside the phases, for each iteration."""
    hybrid_s: float = 0.0
    """The same, added by the paper's hybrid engine."""
    hybrid_forward_s: float = 0.0
    """Added to a forward by that engine, whose last copies run on into it."""


RATE_NAMES = tuple(item.name for item in dataclasses.fields(Rates))
CURVE_NAMES = tuple(name for name in RATE_NAMES if name.startswith("host_"))


@dataclass(frozen=True)
class Machine:
    """One kind of node.

    Attributes:
        name: Printed beside every figure.
        source: Where the figures come from.
        gpus: GPUs of one node; 0 for none.
        cores: Physical cores of one node, or all CPUs of a virtual machine.
        rank_threads: Most threads the host lane of a rank uses; None for its share of the cores.
        host_memory_bytes: Of one node.
        device_memory_bytes: Of one GPU; None without one.
        rates: What was measured.
        kinds: How each rate came about; those not named were measured.
        costs: Times that no rate explains.
        residuals: What a fit left over, as the profile says it.
    """

    name: str
    source: str
    gpus: int
    cores: int
    host_memory_bytes: float
    device_memory_bytes: float | None = None
    rank_threads: int | None = None
    rates: Rates = Rates()
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    costs: Costs = Costs()
    residuals: Mapping[str, Any] = field(default_factory=dict)

    def kind(self, rate: str) -> Kind:
        """How a rate came about."""
        return self.kinds.get(rate, "measured")

    def rate(self, name: str) -> float:
        """A rate that is one number.

        Raises:
            MachineError: It was not measured; says what measures it.
        """
        value = getattr(self.rates, name)
        if value is None:
            raise self._missing(name)
        return float(value)

    def curve(self, name: str, threads: float) -> float:
        """A rate of the host for one process; linear between the numbers of threads measured.

        Raises:
            MachineError: It was not measured; says what measures it.
        """
        points: Curve | None = getattr(self.rates, name)
        if points is None:
            raise self._missing(name)
        return _interpolate(points, threads)

    def _missing(self, name: str) -> MachineError:
        return MachineError(
            f"machine '{self.name}' has no rates.{name}: {HOW_TO_MEASURE} on the machine itself"
        )


def _interpolate(points: Curve, threads: float) -> float:
    first_threads, first_rate = points[0]
    if threads <= first_threads:
        return first_rate * threads / first_threads
    for (below, low), (above, high) in itertools.pairwise(points):
        if threads <= above:
            return low + (high - low) * (threads - below) / (above - below)
    return points[-1][1]


def machine_names() -> list[str]:
    """Names of the shipped profiles."""
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
        near = get_close_matches(str(name_or_file), machine_names(), n=1, cutoff=0.3)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise MachineError(
            f"unknown machine '{name_or_file}': {hint}known: {', '.join(machine_names())}; or give "
            "a file that `python -m deep_optimizer_states calibrate -o machine.toml` wrote"
        )
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MachineError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MachineError(f"{path}: not valid TOML: {error}") from None
    return machine_from_table(table, source=str(path))


def machine_from_table(table: Mapping[str, Any], source: str = "machine") -> Machine:
    """Build a machine from what a profile holds.

    Args:
        table: The profile's fields.
        source: What errors begin with.

    Raises:
        MachineError: A field is unknown, missing or impossible.
    """
    try:
        fields = dict(table)
        fields.pop("lock_limit_bytes", None)  # of older profiles; it does not bind CUDA
        rates = fields.pop("rates", {})
        _only_known(rates, RATE_NAMES, "rates")
        kinds = fields.pop("kinds", {})
        _only_known(kinds, RATE_NAMES, "kinds")
        for key, kind in kinds.items():
            if kind not in KINDS:
                raise MachineError(f"kinds.{key} = {kind!r}: give one of {', '.join(KINDS)}")
        costs = fields.pop("costs", {})
        _only_known(costs, tuple(item.name for item in dataclasses.fields(Costs)), "costs")
        known = tuple(item.name for item in dataclasses.fields(Machine))
        _only_known(fields, known, "")
        for key in ("name", "source", "gpus", "cores", "host_memory_bytes"):
            if key not in fields:
                raise MachineError(f"{key} is missing")
        checked: dict[str, Any] = {key: _checked_rate(key, rate) for key, rate in rates.items()}
        return Machine(
            **_checked_fields(fields),
            rates=Rates(**checked),
            kinds=dict(kinds),
            costs=Costs(**{key: _not_negative(f"costs.{key}", v) for key, v in costs.items()}),
        )
    except MachineError as error:
        raise MachineError(f"{source}: {error}") from None


def _checked_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    checked = dict(fields)
    for key in ("name", "source"):
        if not isinstance(fields[key], str) or not fields[key].strip():
            raise MachineError(f"{key} = {fields[key]!r}: give text")
    for key, least in (("gpus", 0), ("cores", 1), ("rank_threads", 1)):
        value = fields.get(key)
        if value is not None and (type(value) is not int or value < least):
            raise MachineError(f"{key} = {value!r}: give a whole number of at least {least}")
    for key in ("host_memory_bytes", "device_memory_bytes"):
        if fields.get(key) is not None:
            checked[key] = _positive(key, fields[key])
    if fields["gpus"] and fields.get("device_memory_bytes") is None:
        raise MachineError("device_memory_bytes is missing: the memory of one GPU, in bytes")
    return checked


def _checked_rate(key: str, value: object) -> float | Curve:
    name = f"rates.{key}"
    if key not in CURVE_NAMES:
        return _positive(name, value)
    if not isinstance(value, list) or not value:
        raise MachineError(f"{name} = {value!r}: give [[threads, rate], ...]")
    curve = []
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) is not int or pair[0] < 1:
            raise MachineError(f"{name}: {pair!r} is not [threads, rate]")
        curve.append((pair[0], _positive(name, pair[1])))
    if [threads for threads, _ in curve] != sorted({threads for threads, _ in curve}):
        raise MachineError(f"{name}: threads must rise from pair to pair")
    return tuple(curve)


def _positive(name: str, value: object) -> float:
    number = _not_negative(name, value)
    if number == 0.0:
        raise MachineError(f"{name} = {value!r}: must be above zero; leave out what is not known")
    return number


def _not_negative(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MachineError(f"{name} = {value!r}: give a number")
    if not math.isfinite(value) or value < 0:
        raise MachineError(f"{name} = {value!r}: must be finite and above zero")
    return float(value)


def _only_known(table: object, known: tuple[str, ...], where: str) -> None:
    if not isinstance(table, Mapping):
        raise MachineError(f"{where} = {table!r}: give a table")
    for key in table:
        if key not in known:
            near = get_close_matches(str(key), known, n=1, cutoff=0.3)
            hint = f"did you mean '{near[0]}'? " if near else ""
            raise MachineError(f"unknown key '{where + '.' if where else ''}{key}': {hint}")
