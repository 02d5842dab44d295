"""``python -m deep_optimizer_states calibrate [-o machine.toml]``: measures this machine."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deep_optimizer_states.calibrate.watch import look_around
from deep_optimizer_states.checks import write_whole
from deep_optimizer_states.core.host import cpu_facts, find_place, free_host_bytes, usable_cores
from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.predict.machine import CURVE_NAMES, RATE_NAMES, machine_from_table

if TYPE_CHECKING:  # torch is imported once the command line is known to be right
    from deep_optimizer_states.calibrate.rates import Findings

EXIT_USAGE, EXIT_INTERRUPTED = 2, 130
_LEAST_NUMEL = 2**20
_HEAD = """\
# Rates of this machine, read by `python -m deep_optimizer_states plan --machine FILE`.
# Each is a median; those of the host are of one process by its threads: [[threads, rate], ...].
"""


class CalibrateError(DeepOptimizerStatesError, ValueError):
    """The command cannot do what it was asked."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the profile; returns the exit status."""
    given = _parser().parse_args(argv)
    try:
        return _run(given)
    except (DeepOptimizerStatesError, OSError) as error:
        sys.stderr.write(f"calibrate: error: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        sys.stderr.write("calibrate: interrupted, nothing written\n")
        return EXIT_INTERRUPTED


def _run(given: argparse.Namespace) -> int:
    out: Path | None = given.output
    if out is not None:
        _check_output(out, given.force)
    cores = usable_cores()
    threads = sorted(set(given.threads or default_threads(cores)))
    if threads[-1] > cores:
        raise CalibrateError(f"--threads {threads[-1]}: this process may use {cores} cores")
    begin = time.monotonic()
    host_bytes = free_host_bytes()
    on_cpu = given.device == "cpu"
    _say("loading torch ...")
    from deep_optimizer_states.calibrate.rates import Findings

    found = Findings(_say)
    others = look_around(_say)
    fields = measure(found, threads, host_bytes, on_cpu)
    if warning := others.warning("used"):
        _say(warning)
        fields["source"] += f"; other processes used {others.used_cpus():.1f} CPUs meanwhile"
    name = given.name or (out.stem if out is not None else "this-machine")
    text = profile_text({"name": name, **fields}, found)
    if out is None:
        sys.stdout.write(text)
    else:
        write_whole(out, text, overwrite=given.force)
    missing = f", {len(found.missing)} rates not measured" if found.missing else ""
    where = "standard output" if out is None else str(out)
    _say(f"{len(found.rates)} rates in {time.monotonic() - begin:.0f} s{missing}: {where}")
    return 0


def measure(
    found: Findings, threads: Sequence[int], host_bytes: int, on_cpu: bool = False
) -> dict[str, Any]:
    """Measure all that this machine has.

    Args:
        found: Gets the rates.
        threads: Numbers of threads to measure the host with, rising.
        host_bytes: Free host memory.
        on_cpu: Leave GPUs alone.

    Returns:
        The profile's other fields.

    Raises:
        CalibrateError: There is too little memory to measure anything.
    """
    import torch

    from deep_optimizer_states.calibrate import rates

    numel = rates.fitting_numel(host_bytes)
    if numel < _LEAST_NUMEL:
        raise CalibrateError(f"{host_bytes / 2**20:.0f} MiB of host memory are free: too little")
    reason = "left out by --device cpu" if on_cpu else rates.why_no_cuda()
    gpus, names = {"gpus": 0}, ""
    if reason:
        found.lack("GPU", rates.GPU_RATES, reason)
        rates.measure_cpu_as_device(found)
    else:
        rates.measure_cuda(found)
        memory = torch.cuda.get_device_properties(0).total_memory
        gpus = {"gpus": torch.cuda.device_count(), "device_memory_bytes": memory}
        names = f"{gpus['gpus']} x {torch.cuda.get_device_name(0)}"
    _say("the host: building kernels, which may take minutes the first time ...")
    rates.measure_host(found, rates.host_passes(rates.HostArrays(numel), found), threads)
    return {
        "source": f"measured by calibrate, {_described(names)}",
        "cores": min(usable_cores(), sum(map(len, find_place(0, None).cores))),
        "host_memory_bytes": host_bytes,
        **gpus,
    }


def profile_text(fields: Mapping[str, Any], found: Findings) -> str:
    """Return the profile as TOML, checked as a reader of it will.

    Args:
        fields: Name, source and sizes of the machine.
        found: Its rates.

    Raises:
        MachineError: The reader would refuse it.
    """
    lines = [_HEAD + "\n".join(f"{name} = {_value(value)}" for name, value in fields.items())]
    lines += ["", "[rates]"]
    for name in RATE_NAMES:
        if name in found.rates:
            note = f"  # {found.notes[name]}" if name in found.notes else ""
            value = found.rates[name]
            shown = _curve(value) if name in CURVE_NAMES else _value(float(value))
            lines.append(f"{name} = {shown}{note}")
        elif name in found.missing:
            lines.append(f"# {name}: not measured: {' '.join(found.missing[name].split())}")
    text = "\n".join(lines) + "\n"
    machine_from_table(tomllib.loads(text), source="the profile")
    return text


def _curve(pairs: Sequence[tuple[int, float]]) -> str:
    return "[" + ", ".join(f"[{threads}, {rate:.4g}]" for threads, rate in pairs) + "]"


def _value(value: str | int | float) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def default_threads(cores: int) -> list[int]:
    """Powers of two up to the cores, and the cores."""
    return sorted({*(2**power for power in range(cores.bit_length())), cores})


def _described(gpus: str) -> str:
    """Return processors, versions and date, for the profile's ``source``."""
    versions = (f"{name} {_version(name)}" for name in ("torch", "deepspeed"))
    today = datetime.now(UTC).date().isoformat()
    return ", ".join(part for part in (today, gpus, cpu_facts("model name"), *versions) if part)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _check_output(out: Path, force: bool) -> None:
    if out.is_dir():
        raise CalibrateError(f"{out}: is a folder; give a file, such as {out / 'machine.toml'}")
    if out.suffix != ".toml":
        raise CalibrateError(f"{out}: give a name that ends in .toml")
    if out.exists() and not force:
        raise CalibrateError(f"{out}: is there already; give another name, or --force")
    if not out.parent.is_dir():
        raise CalibrateError(f"{out.parent}: no such folder")
    try:
        tempfile.TemporaryFile(dir=out.parent).close()
    except OSError as error:
        raise CalibrateError(f"{out}: cannot be written: {error.strerror}") from error


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, 1 or more")
    return int(text)


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
    parser.add_argument("--name", help="name of the machine [default the file's]")
    parser.add_argument(
        "--threads",
        type=_count,
        nargs="+",
        metavar="N",
        help="numbers of threads [default 1, 2, 4 ... up to the usable cores]",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu"), default="auto", help="cpu leaves GPUs alone"
    )
    return parser
