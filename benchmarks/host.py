"""The host's side of an update, beside stock DeepSpeed's: ``python -m benchmarks.host``.

Two comparisons, for each number of threads in a process of its own:

- passes over one subgroup's arrays: our fused kernel, a probe that reads and writes the same bytes
  with next to no arithmetic, and the passes stock makes one after the other;
- ``engine.step()`` of real DeepSpeed engines on the CPU: stock ZeRO-3 offload and the plugin.

Both sides start from the same bits and must end with the same bits, or there is
no ratio. What is compared with what, and why, is in docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import psutil

from benchmarks.timing import BenchmarkError
from configs.cli import Parser, complain, count, run_command, say
from deep_optimizer_states.calibrate.cli import busy_warning
from deep_optimizer_states.core.host import cpu_facts
from deep_optimizer_states.units import GIB

EXIT_DIFFERENT = 1
FUSED_TARGET, PROBE_TARGET, ENGINE_TARGET = 2.5, 0.9, 1.0
_BYTES_A_PARAMETER = 70
"""Host memory that the passes' arrays take together."""
BYTES_ON_THE_CPU = 28 + 4
"""Host bytes a parameter that ``step()`` moves where the CPU steps it: the pass, and its weight
copied from the staging buffer."""
BYTES_ON_THE_DEVICE = 2 * 14 + 28 + 2 * 12 + 14
"""The same where the emulated device steps it: into a slot, the pass, back, and the slot filled
with NaN, so that no stale number passes for a right one."""
_EMULATED = (
    "emulated: there is no GPU here, and its part is done by the same cores in the same memory, "
    f"{BYTES_ON_THE_DEVICE} bytes a parameter beside {BYTES_ON_THE_CPU} on the CPU; a ratio below "
    "1 is expected and says nothing of a machine with a GPU, whose links make the copies"
)
Figure = dict[str, float]


def measure(num_threads: int, given: argparse.Namespace) -> dict[str, Any]:
    """Run the comparisons with a number of threads, in a process of its own.

    Raises:
        BenchmarkError: it failed; its words are on standard error.
    """
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.host", "--worker"]
    command += [f"--{name}={getattr(given, name)}" for name in ("numel", "width", "layers")]
    command += [f"--repeats={given.repeats}", "--threads", str(num_threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode or not done.stdout:
        raise BenchmarkError(
            f"with {num_threads} threads the measurement ended with status {done.returncode}; "
            "what it said stands above"
        )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def as_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows under their heads, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        cells = enumerate(zip(row, widths, strict=True))
        aligned = (c.rjust(w) if idx else c.ljust(w) for idx, (c, w) in cells)
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def as_text(result: dict[str, Any]) -> str:
    """Return the comparisons as tables for people; no ratio where the bits differ."""
    found, both = result["passes"], result["engines"]
    head = f"{result['threads']} thread(s), {found['instruction_set']}"
    title = "s per 1e9 parameters, median (quartiles)"
    rows = [[name, _spread(row)] for name, row in found["seconds_per_1e9"].items()]
    lines = [head, as_table([f"passes over {found['numel']:,} parameters", title], rows), ""]
    rows = [[name, _spread(row)] for name, row in both["seconds_per_1e9"].items()]
    lines += [as_table([f"step() of {both['numel']:,} parameters", title], rows), ""]
    lines.append(as_table(["ratio", "median (quartiles)", "goal", ""], ratios(result)))
    return "\n".join([*lines, _EMULATED])


def ratios(result: dict[str, Any]) -> list[list[str]]:
    """Return rows of name, ratio, goal and whether it is met."""
    found, both = result["passes"], result["engines"]
    equal = bool(found["equal"])
    rows = [
        _ratio("stock with a GPU / fused", found["stock_with_gpu_over_fused"], equal, FUSED_TARGET),
        _ratio("stock on the CPU / fused", found["stock_on_cpu_over_fused"], equal),
        _ratio("fused, share of the probe", found["share_of_probe"], equal, PROBE_TARGET),
        _ratio("fused, share of a stream", found["share_of_stream"], equal),
    ]
    for name, ratio in both["stock_over"].items():
        is_host = name == "all-host"
        label = f"step(), stock / {name}" + ("" if is_host else ", emulated")
        goal = ENGINE_TARGET if is_host else None
        rows.append(_ratio(label, ratio, both["equal"][name], goal))
    return rows


def _ratio(name: str, ratio: Figure, equal: bool, goal: float | None = None) -> list[str]:
    if not equal:
        return [name, "withheld: the bits differ", "", ""]
    if goal is None:
        return [name, _spread(ratio, 2), "", ""]
    return [name, _spread(ratio, 2), f">= {goal}", "met" if ratio["median"] >= goal else "missed"]


def _spread(row: Figure, digits: int = 3) -> str:
    return f"{row['median']:.{digits}f} ({row['low']:.{digits}f} to {row['high']:.{digits}f})"


def all_equal(results: Sequence[dict[str, Any]]) -> bool:
    """Return whether every side ended with stock's bits."""
    return all(r["passes"]["equal"] and all(r["engines"]["equal"].values()) for r in results)


def main(argv: list[str] | None = None) -> int:
    """Measure and print; returns 0, or 1 when two sides did not end with the same bits.

    Raises:
        BenchmarkError: a value is wrong, or a measurement failed.
    """
    given = _parser().read(argv)
    return _work(given) if given.worker else _measure_all(given)


def _measure_all(given: argparse.Namespace) -> int:
    _check(given)
    processor = cpu_facts("model name") or platform.machine()
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "deepspeed"))
    say(f"{processor}, {len(os.sched_getaffinity(0))} CPUs, {versions}")
    if warning := busy_warning():
        _say(warning)
    results = []
    for num_threads in given.threads:
        results.append(measure(num_threads, given))
        say(f"\n{as_text(results[-1])}")
    return 0 if all_equal(results) else EXIT_DIFFERENT


def _check(given: argparse.Namespace) -> None:
    usable = len(psutil.Process().cpu_affinity())
    for num_threads in given.threads:
        if num_threads > usable:
            raise BenchmarkError(f"--threads {num_threads}: give 1 to {usable}, the usable CPUs")
    numel = max(given.numel, 2 * given.width**2 * given.layers)
    needed, free = numel * _BYTES_A_PARAMETER, psutil.virtual_memory().available
    if needed > free:
        raise BenchmarkError(
            f"{needed / GIB:.1f} GiB of memory are needed and {free / GIB:.1f} GiB are free; "
            "give a smaller --numel, --width or --layers"
        )


def _work(given: argparse.Namespace) -> int:
    from benchmarks.host_worker import engines, passes

    (num_threads,) = given.threads
    numel = given.width**2 * given.layers
    work: dict[str, tuple[str, Callable[[], Any]]] = {
        "passes": (
            f"passes over {given.numel:,} parameters",
            lambda: passes(given.numel, given.repeats, num_threads),
        ),
        "engines": (
            f"step() of engines with {numel:,} parameters",
            lambda: engines(given.width, given.layers, given.repeats),
        ),
    }
    result: dict[str, Any] = {"threads": num_threads}
    for name, (what, run) in work.items():
        _say(f"{num_threads} thread(s): {what} ...")
        result[name] = run()
    say(json.dumps(result))
    os._exit(0)  # gloo now and then aborts while the interpreter is torn down


def _say(line: str) -> None:
    complain(f"bench-host: {line}")


def _parser() -> Parser:
    text = "Our fused host pass and update phase beside stock DeepSpeed's, on this CPU."
    parser = Parser("python -m benchmarks.host", text)
    add = parser.add_argument
    add("--numel", type=count, default=2**26, help="elements that the passes go over [2^26]")
    add("--width", type=count, default=4096, help="width of the engines' layers [4096]")
    add("--layers", type=count, default=6, help="layers of the engines [6: 100 million parameters]")
    add("--repeats", type=count, default=9, help="turns that count [9]")
    add("--threads", type=count, nargs="+", default=[1, 2], help="each measured by itself [1 2]")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(run_command(main))
