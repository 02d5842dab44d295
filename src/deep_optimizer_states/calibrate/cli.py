"""``python -m deep_optimizer_states calibrate [-o machine.toml]``: measures this machine."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from deep_optimizer_states.core.host import cpu_facts, find_place, free_host_bytes, usable_cores
from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.predict.machine import load_machine, profile_text
from deep_optimizer_states.toml_io import write_whole

if TYPE_CHECKING:  # torch is imported once the command line is known to be right
    from deep_optimizer_states.calibrate.rates import Findings

EXIT_USAGE, EXIT_INTERRUPTED = 2, 130
BUSY_SHARE = 0.05
"""Share of the usable CPUs below which lies what a quiet machine does by itself."""
_LEAST_NUMEL = 2**20
_HEAD = """\
# Rates of this machine, read by `python -m deep_optimizer_states plan --machine FILE`.
# Each is a median; those of the host are of one process by its threads: [[threads, rate], ...].
"""


_COSTS_FROM = "h200x1"
_HEAD_OF_GPUS = f"""\
# Costs are assumed: what a layer's kernels and hooks took under the profile {_COSTS_FROM}.
"""


class CalibrateError(DeepOptimizerStatesError, ValueError):
    """The command cannot do what it was asked."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the profile; returns the exit status."""
    given = _parser().parse_args(argv)
    try:
        return _run(given.output, given.force)
    except (DeepOptimizerStatesError, OSError) as error:
        sys.stderr.write(f"calibrate: error: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        sys.stderr.write("calibrate: interrupted, nothing written\n")
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deep_optimizer_states calibrate",
        description="Measure this machine's rates into a profile for `plan --machine`, in one to "
        "three minutes once kernels are built; let nothing else run meanwhile. Without a GPU it "
        "measures the host, and the profile says what is missing.",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE.toml", help="profile [default standard output]"
    )
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    return parser


def _run(out: Path | None, force: bool) -> int:
    if out is not None:
        _check_output(out, force)
    begin = time.monotonic()
    _say("loading torch ...")
    from deep_optimizer_states.calibrate.rates import Findings

    found = Findings(_say)
    if warning := busy_warning():
        _say(warning)
    fields = measure(found)
    name = out.stem if out is not None else "this-machine"
    head, table = _HEAD, {"name": name, **fields, "rates": found.rates}
    if fields["gpus"]:
        head += _HEAD_OF_GPUS
        costs = dataclasses.asdict(load_machine(_COSTS_FROM).costs)
        table["costs"] = {cost: seconds for cost, seconds in costs.items() if seconds}
        table["kinds"] = {**table.get("kinds", {}), **dict.fromkeys(table["costs"], "assumed")}
    text = head + profile_text(table, found.notes)
    if out is None:
        sys.stdout.write(text)
    else:
        write_whole(out, text, overwrite=force)
    missing = len(found.notes.keys() - found.rates.keys())
    lacks = f", {missing} rates not measured" if missing else ""
    where = "standard output" if out is None else str(out)
    _say(f"{len(found.rates)} rates in {time.monotonic() - begin:.0f} s{lacks}: {where}")
    return 0


def _check_output(out: Path, force: bool) -> None:
    if out.suffix != ".toml":
        raise CalibrateError(f"{out}: give a name that ends in .toml")
    if out.exists() and not force:
        raise CalibrateError(f"{out}: is there already; give another name, or --force")
    try:
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise CalibrateError(f"{out}: cannot be written: {error.strerror}") from error


def busy_warning() -> str:
    """Look for half a second at what else runs; return a warning, empty where CPUs are free."""
    usable = os.sched_getaffinity(0)
    percents = psutil.cpu_percent(interval=0.5, percpu=True)
    used = sum(percent for cpu, percent in enumerate(percents) if cpu in usable) / 100
    if used <= BUSY_SHARE * len(usable):
        return ""
    return (
        f"warning: other processes use {used:.1f} of {len(usable)} CPUs: figures come out too low; "
        "measure again when nothing else runs"
    )


def measure(found: Findings) -> dict[str, Any]:
    """Measure all that this machine has into ``found``.

    Returns:
        The profile's other fields.

    Raises:
        CalibrateError: There is too little memory to measure anything.
    """
    import torch

    from deep_optimizer_states.calibrate import rates

    host_bytes, cores = free_host_bytes(), usable_cores()
    numel = rates.fitting_numel(host_bytes)
    if numel < _LEAST_NUMEL:
        raise CalibrateError(f"{host_bytes / 2**20:.0f} MiB of host memory are free: too little")
    gpus: dict[str, Any] = {"gpus": 0}
    parts = [datetime.now(UTC).date().isoformat()]
    if reason := rates.why_no_cuda():
        found.lack("GPU", rates.GPU_RATES, reason)
        rates.measure_cpu_as_device(found)
    else:
        rates.measure_cuda(found)
        memory = torch.cuda.get_device_properties(0).total_memory
        gpus = {"gpus": torch.cuda.device_count(), "device_memory_bytes": memory}
        parts.append(f"{gpus['gpus']} x {torch.cuda.get_device_name(0)}")
    _say("the host: building kernels, which may take minutes the first time ...")
    rates.measure_host(found, numel, default_threads(cores))
    parts.append(cpu_facts("model name"))
    parts += [f"{name} {metadata.version(name)}" for name in ("torch", "deepspeed")]
    return {
        "source": f"measured by calibrate, {', '.join(filter(None, parts))}",
        "cores": min(cores, sum(map(len, find_place(0, None).cores))),
        "host_memory_bytes": host_bytes,
        **gpus,
    }


def default_threads(cores: int) -> list[int]:
    """Return powers of two up to the cores, and the cores."""
    return sorted({*(2**power for power in range(cores.bit_length())), cores})


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
