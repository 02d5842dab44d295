"""How long a row of ``make bench-gpu`` takes for a model of some size, by measured rates. No torch.

Every row is taken to last as long as stock's: none should be slower, and stock's has to fit too.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_model import LEAST_PARAMETERS, make_point
from benchmarks.gpu_rows import STOCK_HOST_BYTES
from benchmarks.report import BenchmarkError
from configs.schema import Point
from deep_optimizer_states.predict.machine import Machine, MachineError, load_machine
from deep_optimizer_states.predict.model import model_from_table
from deep_optimizer_states.predict.predict import predict
from deep_optimizer_states.predict.stock import STOCK
from deep_optimizer_states.predict.workload import Workload

_HASHED_BYTES = 14
"""A parameter's weight, master weight and moments, whose sha256 is taken when a row ends."""
_SAMPLE_BYTES = 2**25


@dataclass(frozen=True)
class RowTime:
    """Where the seconds of one row go.

    Attributes:
        start_s: Python starts and imports what it needs.
        lock_s: Host memory of the state is page-locked.
        iterations_s: All iterations.
        hash_s: The trained state is hashed.
    """

    start_s: float
    lock_s: float
    iterations_s: float
    hash_s: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.start_s + self.lock_s + self.iterations_s + self.hash_s


@dataclass(frozen=True)
class Pace:
    """Rates of this machine that decide how long a row takes.

    Attributes:
        machine: What ``calibrate`` measured.
        start_s: How long a process took to start and to import what a row needs.
        hash_bytes_per_s: sha256 on all cores.
        seq_length: Tokens an iteration.
        iterations: Of a row, those that do not count included.
        device: ``cpu`` or ``cuda``.
    """

    machine: Machine
    start_s: float
    hash_bytes_per_s: float
    seq_length: int
    iterations: int
    device: str

    def row_time(self, parameters: int) -> RowTime:
        """Seconds of a row that trains a model of about ``parameters``.

        Raises:
            MachineError: A rate that is needed was not measured.
        """
        point = make_point(parameters, self.seq_length, self.iterations, self.device)
        numel = point.model.num_parameters()
        on_gpu = self.machine.gpus > 0
        lock = self.machine.rate("page_lock_bytes_per_s") if on_gpu else float("inf")
        return RowTime(
            self.start_s,
            STOCK_HOST_BYTES * numel / lock,
            self.iterations * predict(_workload(point), self.machine).iteration_s,
            _HASHED_BYTES * numel / self.hash_bytes_per_s,
        )

    def explain(self, parameters: int) -> str:
        """A sentence on how long a row is expected to take, with the rates it follows from."""
        found, rates = self.row_time(parameters), self.machine.rates
        adam = self.machine.curve("host_adam_parameters_per_s", self.machine.cores)
        parts = [f"{found.start_s:.0f} s to start"]
        if rates.page_lock_bytes_per_s and self.machine.gpus:
            lock = rates.page_lock_bytes_per_s
            parts.append(f"{found.lock_s:.0f} s to page-lock at {lock / 1e9:.3g} GB/s")
        link = f", link {rates.h2d_bytes_per_s / 1e9:.3g} GB/s" if rates.h2d_bytes_per_s else ""
        parts += [
            f"{found.iterations_s:.0f} s for {self.iterations} iterations of stock "
            f"(CPUAdam {adam / 1e9:.3g}e9 parameters/s{link})",
            f"{found.hash_s:.0f} s to hash at {self.hash_bytes_per_s / 1e9:.3g} GB/s",
        ]
        return f"a row is predicted to take {found.seconds:.0f} s: {', '.join(parts)}"


def read_pace(profile: Path, start_s: float, point_of: Point) -> Pace:
    """Pace from a profile that ``calibrate`` wrote, and a hash rate measured now.

    Args:
        profile: The file.
        start_s: How long a process took to start.
        point_of: Tokens, iterations and device of the rows; its size does not matter.

    Raises:
        BenchmarkError: A rate that is needed was not measured.
    """
    try:
        machine = load_machine(profile)
        hash_rate = _hash_bytes_per_s() * machine.cores
        length, device = point_of.model.seq_length, point_of.device
        pace = Pace(machine, start_s, hash_rate, length, point_of.iterations, device)
        pace.explain(LEAST_PARAMETERS)  # names a rate that lacks now, not after minutes
    except MachineError as error:
        raise BenchmarkError(str(error)) from None
    return pace


def _workload(point: Point) -> Workload:
    return Workload(
        model_from_table(point.model.model_dump(exclude={"architecture"})),
        STOCK,
        subgroup_numel=point.value("subgroup_numel"),
        activation_checkpointing=point.activation_checkpointing,
        materialized_attention=False,
    )


def _hash_bytes_per_s() -> float:
    """Of sha256 on one core."""
    sample = bytes(_SAMPLE_BYTES)
    begin = time.perf_counter()
    hashlib.sha256(sample).digest()
    return _SAMPLE_BYTES / (time.perf_counter() - begin)
