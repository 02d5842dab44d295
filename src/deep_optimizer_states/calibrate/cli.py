"""``python -m deep_optimizer_states calibrate [-o machine.toml]``: measures this machine."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from deep_optimizer_states.calibrate.findings import Findings, profile_text
from deep_optimizer_states.calibrate.watch import Steps, look_around
from deep_optimizer_states.cores import cpu_facts, find_place, usable_cores
from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.files import write_whole
from deep_optimizer_states.memory import free_host_bytes

EXIT_USAGE, EXIT_INTERRUPTED = 2, 130
_LEAST_NUMEL = 2**20


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
    found = Findings(_say, Steps(_say, num_steps(threads, on_cpu)))
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
        _write(out, text, given.force)
    missing = f", {len(found.missing)} rates not measured" if found.missing else ""
    where = "standard output" if out is None else str(out)
    _say(f"{len(found.rates)} rates in {time.monotonic() - begin:.0f} s{missing}: {where}")
    return 0


def num_steps(threads: Sequence[int], on_cpu: bool) -> int:
    """Steps that :func:`measure` will make."""
    from deep_optimizer_states.calibrate import processors

    device = 2
    if not on_cpu and not processors.why_no_cuda():
        device = processors.num_cuda_steps()
    return device + 1 + len(threads)


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
    # Torch is imported once the command line is known to be right.
    from deep_optimizer_states.calibrate import host, processors

    numel = host.fitting_numel(host_bytes)
    if numel < _LEAST_NUMEL:
        raise CalibrateError(f"{host_bytes / 2**20:.0f} MiB of host memory are free: too little")
    reason = "left out by --device cpu" if on_cpu else processors.why_no_cuda()
    gpus = _gpu_fields(found, reason)
    with found.steps.step("the host: building kernels, which may take minutes the first time"):
        arrays = host.HostArrays(numel)
        passes = host.host_passes(arrays, found.lack)
    found.rates |= host.host_rates(passes, threads, found.say, found.steps)
    stream = host.HOST_RATES[0]
    if not reason and stream in passes:
        probe, probe_bytes = passes[stream]
        best, _ = max(found.rates[stream], key=lambda pair: pair[1])
        processors.measure_busy_memory(found, lambda: probe(best), probe_bytes)
    source = f"measured by calibrate, {_described(str(gpus.pop('names', '')))}"
    return {
        "source": source,
        "cores": min(usable_cores(), sum(map(len, find_place(0, None).cores))),
        "host_memory_bytes": host_bytes,
        **gpus,
    }


def _gpu_fields(found: Findings, reason: str) -> dict[str, Any]:
    """Measure the GPUs, or say why not; number and memory of them."""
    from deep_optimizer_states.calibrate import processors

    if not reason:
        import torch

        processors.measure_cuda(found)
        gpus = torch.cuda.device_count()
        memory = torch.cuda.get_device_properties(0).total_memory
        names = f"{gpus} x {torch.cuda.get_device_name(0)}"
        return {"gpus": gpus, "device_memory_bytes": memory, "names": names}
    found.lack("GPU", processors.GPU_RATES, reason)
    processors.measure_cpu_as_device(found)
    return {"gpus": 0}


def default_threads(cores: int) -> list[int]:
    """Powers of two up to the cores, and the cores."""
    return sorted({*(2**power for power in range(cores.bit_length())), cores})


def _described(gpus: str) -> str:
    """Processors, versions and date, for the profile's ``source``."""
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


def _write(out: Path, text: str, force: bool) -> None:
    """Write it whole, or not at all; a file that came up meanwhile stays."""
    try:
        write_whole(out, text, overwrite=force)
    except FileExistsError:
        raise CalibrateError(f"{out}: is there already; give another name") from None
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


if __name__ == "__main__":
    sys.exit(main())
