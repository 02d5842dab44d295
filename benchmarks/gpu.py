"""Whole iterations of every way to offload, beside stock DeepSpeed: ``python -m benchmarks.gpu``.

One command for a node with one GPU: measures the machine's rates, then trains the same model from
the same seed in every row, each in a process of its own, in rounds, until the time is used up. A
row that fails or runs out of memory says so, and the others go on. With ``--device cpu --small``
the same code runs in a small form where there is no GPU. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import gpu_report
from benchmarks.bound import Bound, Limits, read_limits
from benchmarks.budget import Budget
from benchmarks.gpu_model import (
    DEVICE_SPARE_BYTES,
    GIB,
    LEAST_PARAMETERS,
    ROUNDS,
    choose_parameters,
    make_point,
    stock_config,
)
from benchmarks.gpu_pace import Pace, read_pace
from benchmarks.gpu_report import Outcome
from benchmarks.gpu_rows import ROWS, STOCK, Row, config_of
from benchmarks.process import run_calibration, run_worker
from benchmarks.report import BenchmarkError, check_output, machine_facts, write_json
from configs.schema import Point

EXIT_DIFFERENT, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
SCHEMA_VERSION = 1
SMALL_PARAMETERS, SMALL_SEQ_LENGTH = 3_000_000, 64
LATEST_S = 10.0
"""Kept free at the end for the tables."""


class Run:
    """The rows, the time they have, and where they leave their files.

    Args:
        given: The command line.
        folder: For jobs, results and logs; goes away afterwards.
    """

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.budget = Budget(60 * given.minutes - LATEST_S)
        self.outcomes = [Outcome(row) for row in chosen_rows(given.rows)]
        self.limits: Limits | None = None
        self.why_no_limits = ""
        self._given = given
        self._folder = folder
        self._start = Start(0.0, None)

    def choose_point(self) -> tuple[Point, str]:
        """Measure this machine's rates; returns the model, and sentences on why it is this one."""
        given = self._given
        if given.device != "cpu" or not (given.parameters or given.small):
            self._start = measure_start(given.device)
        self._measure_limits()
        iterations = given.warm_up + given.iterations
        seq_length = SMALL_SEQ_LENGTH if given.small else given.seq_length
        told = ""
        if given.parameters:
            parameters, why = given.parameters, "asked for"
        elif given.small:
            parameters, why = SMALL_PARAMETERS, "the small form"
        else:
            pace = self._pace(make_point(LEAST_PARAMETERS, seq_length, iterations, given.device))
            row_limit_s = min(self.budget.left_s / len(self.outcomes) / ROUNDS, given.row_timeout)
            row_s = (lambda numel: pace.row_time(numel).seconds) if pace else None
            memory = free_host_bytes(), self._start.device_bytes
            parameters, name = choose_parameters(*memory, row_limit_s, row_s)
            why = f"limited by {name}"
            if pace:
                told = f"\n{row_limit_s:.0f} s are there for a row; {pace.explain(parameters)}"
        point = make_point(parameters, seq_length, iterations, given.device)
        model = point.model
        return point, (
            f"model: {model.num_parameters():,} parameters ({why}), {model.layers} layers of width "
            f"{model.hidden}, {model.seq_length} tokens an iteration{told}"
        )

    def _pace(self, point: Point) -> Pace | None:
        if self.limits is None:
            return None
        try:
            return read_pace(self._folder / "machine.toml", self._start.seconds, point)
        except BenchmarkError as error:
            _say(f"  how long rows take cannot be predicted: {error}")
            return None

    def _measure_limits(self) -> None:
        """Rates of link, host memory and CPU lane, by the engine's own calibration."""
        profile = self._folder / "machine.toml"
        _say("rates of this machine ...")
        self.why_no_limits = run_calibration(profile, self._given.device, self.budget.left_s)
        if not self.why_no_limits:
            try:
                self.limits = read_limits(profile)
            except ValueError as error:
                self.why_no_limits = str(error)
        if self.why_no_limits:
            _say(f"  not measured: {self.why_no_limits}")

    def rounds(self, point: Point) -> None:
        """Every row once, then all again, while there is time."""
        config = stock_config(point, self._given.clip_grad)
        for number in range(self._given.rounds):
            for outcome in self.outcomes:
                if not outcome.failed:
                    self._run_once(outcome, number, point, config)

    def _run_once(self, outcome: Outcome, number: int, point: Point, stock: Any) -> None:  # noqa: ANN401
        row = outcome.row
        if not self.budget.fits(row.name):
            outcome.left_out = "no time" if number == 0 else f"no time for round {number + 1}"
            _say(f"round {number + 1}, {row.title}: left out, {self.budget.left_s:.0f} s are left")
            return
        numel = point.model.num_parameters()
        refusal = too_large(row, numel, self._start.device_bytes)
        if refusal:
            outcome.failed = refusal
            _say(f"{row.title}: not started, {refusal}")
            return
        job = {
            "point": point.model_dump(mode="json"),
            "ds_config": config_of(row, stock),
            "warm_up": self._given.warm_up,
            "ends_update": row.ends_update,
            "zero_init": row.zero_init,
        }
        limit_s = min(self._given.row_timeout, self.budget.left_s)
        seconds, result = run_worker(job, self._folder / f"{row.name}-{number}", limit_s)
        self.budget.took(row.name, seconds)
        if "error" in result:
            outcome.failed = result["error"]
        else:
            outcome.rounds[number] = result
        _say(f"round {number + 1}, {row.title}: {_told(result)} ({seconds:.0f} s)")


def too_large(row: Row, parameters: int, device_bytes: int | None) -> str:
    """Why a row cannot fit, else nothing; to try would take memory until a process is killed.

    Args:
        row: Which.
        parameters: Of the model.
        device_bytes: Free memory of the device; None without one of its own.
    """
    places = [("host", row.host_bytes, free_host_bytes())]
    if row.device_bytes and device_bytes is not None:
        places.append(("device", row.device_bytes, device_bytes - DEVICE_SPARE_BYTES))
    for place, num_bytes, free in places:
        needed = num_bytes * parameters
        if needed > free:
            return (
                f"out of memory: {num_bytes} {place} bytes a parameter are "
                f"{needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free"
            )
    return ""


def chosen_rows(names: Sequence[str] | None) -> list[Row]:
    """Rows by their names, in the order of :data:`ROWS`; all by default, stock always.

    Raises:
        BenchmarkError: A name is unknown.
    """
    known = [row.name for row in ROWS]
    for name in names or ():
        if name not in known:
            raise BenchmarkError(f"--rows {name}: known are {', '.join(known)}")
    return [row for row in ROWS if names is None or row.name in (STOCK, *names)]


def free_host_bytes() -> int:
    """Host memory that can be had, limits of control groups included."""
    from deep_optimizer_states.memory import free_host_bytes as free

    return free()


@dataclass(frozen=True)
class Start:
    """What the first process of a device showed.

    Attributes:
        seconds: It took to start and to import what a row needs.
        device_bytes: Free memory of the first GPU; None on the CPU.
    """

    seconds: float
    device_bytes: int | None


def measure_start(device: str) -> Start:
    """Start a process as a row does.

    Raises:
        BenchmarkError: There is no GPU, or a package is missing.
    """
    # Asked in a process that ends: a CUDA context takes memory of the GPU, and in exclusive mode
    # keeps everybody else from it.
    answer = "0" if device == "cpu" else "torch.cuda.mem_get_info()[0]"
    command = f"import torch; free = {answer}; import deepspeed, megatron.core; print(free)"
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", command], capture_output=True, text=True, check=False
    )
    seconds = time.monotonic() - begin
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise BenchmarkError(
            f"no CUDA device can be used ({reason}); --device cpu --small runs a small form"
            if device != "cpu"
            else f"a row cannot start: {reason}"
        )
    return Start(seconds, None if device == "cpu" else int(done.stdout.split()[-1]))


def main(argv: list[str] | None = None) -> int:
    """Measure and print; returns 0, or 1 when one of our rows does not equal stock."""
    given = _parser().parse_args(argv)
    try:
        return _measure_all(given)
    except BenchmarkError as error:
        sys.stderr.write(f"bench-gpu: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        sys.stderr.write("bench-gpu: interrupted\n")
        return EXIT_INTERRUPTED


def _measure_all(given: argparse.Namespace) -> int:
    check_output(given.json)
    _check(given)
    facts = machine_facts()
    _say(f"{facts['processor']}, {facts['cores']} cores, device {given.device}")
    status = 0
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        run = Run(given, Path(folder))
        point, sentence = run.choose_point()
        _say(sentence)
        try:
            run.rounds(point)
        except KeyboardInterrupt:
            _say("interrupted; what there is:")
            status = EXIT_INTERRUPTED
    found = gpu_report.figures(run.outcomes, run.limits, facts["cores"])
    least = gpu_report.bounds(run.outcomes, run.limits)
    _show(found, least)
    if given.json:
        content = {
            "schema_version": SCHEMA_VERSION,
            "machine": facts,
            "point": point.model_dump(mode="json"),
            "parameters": point.model.num_parameters(),
            "why": sentence,
            "limits": vars(run.limits) if run.limits else None,
            "why_no_limits": run.why_no_limits,
            "bounds": [vars(bound) for bound in least or ()],
            "rows": found,
        }
        write_json(given.json, content)
    differs = any(row.get("withheld") for row in found)
    return status or (EXIT_DIFFERENT if differs else 0)


def _show(found: list[dict[str, Any]], least: tuple[Bound, Bound] | None) -> None:
    parts = [gpu_report.as_text(found), gpu_report.limits_text(found)]
    parts += [
        f"shortest {name} by measured rates: {bound.seconds:.3f} s, bound by {bound.bound_by}, "
        f"{bound.device_share:.0%} of the state updated on the device"
        for name, bound in zip(("iteration", "update"), least or (), strict=False)
    ]
    text = "\n\n".join(part for part in parts if part)
    sys.stdout.write(f"\n{text}\n")


def _check(given: argparse.Namespace) -> None:
    chosen_rows(given.rows)
    for name in ("rounds", "iterations", "minutes", "row_timeout", "seq_length"):
        if not 0 < getattr(given, name) < math.inf:  # not a number is neither
            flag = name.replace("_", "-")
            raise BenchmarkError(f"--{flag} {getattr(given, name)}: give a number above 0")
    for name in ("warm_up", "clip_grad"):
        if not 0 <= getattr(given, name) < math.inf:
            flag = name.replace("_", "-")
            raise BenchmarkError(f"--{flag} {getattr(given, name)}: give 0 or more")
    if given.parameters:
        make_point(given.parameters, given.seq_length, 1, given.device)


def _told(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"failed: {result['error']}"
    times = sorted(result["iteration_s"])
    return f"iteration {times[len(times) // 2]:.3f} s"


def _number(text: str) -> int:
    """A whole number, which may be written as 4e9.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    try:
        return int(float(text))
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r}: give a number such as 4e9") from None


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Whole iterations of every way to offload, beside stock DeepSpeed's.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="[cuda]")
    add("--small", action="store_true", help="a model of 3 million parameters, 64 tokens")
    add("--parameters", type=_number, help="instead of what fits, as in 4e9")
    add("--seq-length", type=int, default=2048, help="tokens an iteration [2048]")
    add("--rows", nargs="+", help=f"some of {', '.join(row.name for row in ROWS)} [all]")
    add("--minutes", type=float, default=8.0, help="for everything [8]")
    add("--rounds", type=int, default=3, help="at most, while there is time [3]")
    add("--iterations", type=int, default=5, help="that count, in each round [5]")
    add("--warm-up", type=int, default=2, help="before them [2]")
    add("--clip-grad", type=float, default=1.0, help="largest gradient norm, 0 for none [1]")
    add("--row-timeout", type=float, default=180.0, help="seconds a process may take [180]")
    add("--json", type=Path, help="write the figures to this new file as well")
    return parser


if __name__ == "__main__":
    sys.exit(main())
