"""What a checkpoint costs training, beside stock DeepSpeed's: ``python -m benchmarks.save``.

Engines train the same model in turns: so many iterations without a save, then as many with one at
their beginning. What the second takes longer is what the save costs. The next turn begins when
everything is on the disk. All files must hold the same numbers, or there is no ratio. Engines too
large to stand side by side are measured by a call each (``--engines stock``, then
``--engines background``), which print the same SHA-256.

``disk`` saves nothing: while it trains, a thread writes as many random bytes past the page cache,
all of them from the same pages. What it costs is what this disk takes from whoever writes to it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.timing import BenchmarkError, Times
from configs.cli import Parser, count, run_command, say
from deep_optimizer_states.core.host import bytes_of_state

TARGET = 0.05
"""Share of what stock loses, and of an iteration."""
WARM_UP = 2
BLOCKS: dict[str, dict[str, Any]] = {
    "stock": {"enabled": False},
    "blocking": {"enabled": True, "policy": "all-host"},
    "background": {"enabled": True, "policy": "all-host", "checkpoint": "background"},
    "disk": {"enabled": True, "policy": "all-host"},
}


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train the engines in turns.

    Returns:
        For each engine seconds of an iteration, seconds that a save costs, seconds of the call, and
        bytes that were copied or waited for.

    Raises:
        BenchmarkError: Two engines saved different numbers.
    """
    from benchmarks.host_worker import make_engine, start_one_rank

    start_one_rank()
    found: dict[str, dict[str, list[float]]] = {}
    engines = {name: make_engine(given.width, given.layers, BLOCKS[name]) for name in given.engines}
    for turn in range(WARM_UP + given.repeats):
        for name, engine in engines.items():
            shutil.rmtree(folder / name, ignore_errors=True)
            row = _one_turn(engine, given, folder / name)
            if turn >= WARM_UP:
                for key, value in row.items():
                    found.setdefault(name, {}).setdefault(key, []).append(value)
    digests = {name: _digest(folder / name) for name in engines if name != "disk"}
    if len(set(digests.values())) > 1:
        raise BenchmarkError(f"not the same master weights in all checkpoints; no ratio: {digests}")
    say(f"SHA-256 of the last saved master weights: {', '.join(set(digests.values()))}")
    return {name: {key: Times(tuple(it)) for key, it in row.items()} for name, row in found.items()}


def _one_turn(engine: Any, given: argparse.Namespace, folder: Path) -> dict[str, float]:
    checkpoints = getattr(engine.optimizer, "checkpoints", None)
    wait: Callable[[], Any] | None
    with ThreadPoolExecutor(1) as pool:
        plain, begin = _train(engine, given), time.perf_counter()
        if folder.name == "disk":
            # A checkpoint has 16-bit weights beside the state.
            size = given.width**2 * given.layers * (2 + bytes_of_state())
            wait = pool.submit(_write_past_cache, folder, size).result
        else:
            engine.save_checkpoint(str(folder), "saved")
            wait = checkpoints.wait if checkpoints is not None else None
        call = time.perf_counter() - begin
        cost = call + _train(engine, given) - plain
        if wait is not None:
            wait()
    os.sync()
    last = getattr(checkpoints, "last", None)
    return {
        "iteration": plain / given.every,
        "cost": cost,
        "call": call,
        "copied": getattr(last, "copied_bytes", 0),
        "waited for": getattr(last, "written_first_bytes", 0),
    }


def _write_past_cache(folder: Path, size: int) -> None:
    from deep_optimizer_states.core.checkpoint import CHUNK_BYTES

    folder.mkdir()
    file = os.open(folder / "bytes", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    try:
        with mmap.mmap(-1, CHUNK_BYTES) as pages:  # begins at a whole page, as O_DIRECT wants it
            pages[:] = os.urandom(CHUNK_BYTES)
            for at in range(0, size, CHUNK_BYTES):
                if os.pwrite(file, pages, at) < CHUNK_BYTES:
                    raise BenchmarkError(f"{folder}: the disk is full; give another --folder")
        os.fsync(file)
    finally:
        os.close(file)


@contextlib.contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Train with so many threads; the plugin takes as many as the machine seems to have cores."""
    if number is None:
        yield
        return
    import torch

    from deep_optimizer_states.core import host

    torch.set_num_threads(number)
    with mock.patch.object(host, "usable_cores", return_value=number):
        yield


def _train(engine: Any, given: argparse.Namespace) -> float:
    import torch

    inputs = torch.ones(given.batch, given.width, dtype=torch.bfloat16)
    begin = time.perf_counter()
    for _ in range(given.every):
        engine.backward(engine(inputs).float().pow(2).mean())
        engine.step()
    updates = getattr(engine.optimizer, "background", None)
    if updates is not None:
        updates.wait()  # the update that the last step() launched belongs to these iterations
    return time.perf_counter() - begin


def _digest(folder: Path) -> str:
    import torch

    (file,) = (folder / "saved").glob("*optim_states.pt")
    state = torch.load(file, mmap=True, weights_only=False)["optimizer_state_dict"]
    found = hashlib.sha256()
    for master in state["fp32_flat_groups"]:
        found.update(master.view(torch.uint8).numpy())
    return found.hexdigest()


def as_text(found: dict[str, Any], numel: int, every: int) -> str:
    """Return the figures as a table, with the ratios that the targets are of."""
    lines = [f"{numel:,} parameters, a save every {every} iterations; medians (quartiles)"]
    for name, row in found.items():
        texts = [f"{key} {_seconds(row[key])}" for key in ("iteration", "call", "cost")]
        copied, waited = (row[key].median_s / 2**20 for key in ("copied", "waited for"))
        lines.append(
            f"{name:12}{', '.join(texts)}; {copied:,.0f} MiB copied, {waited:,.0f} waited for"
        )
    if "stock" in found and "background" in found:
        ours, stock = found["background"], found["stock"]
        of_stock = ours["cost"].median_s / stock["cost"].median_s
        of_iteration = ours["cost"].median_s / ours["iteration"].median_s
        for share, what in ((of_stock, "what stock loses"), (of_iteration, "an iteration")):
            met = "met" if share <= TARGET else "missed"
            lines.append(
                f"background loses {share:.1%} of {what}; goal at most {TARGET:.0%}: {met}"
            )
        if "disk" in found:
            disk = found["disk"]["cost"].median_s
            beyond = (ours["cost"].median_s - disk) / stock["cost"].median_s
            lines.append(
                f"the disk alone takes {disk / stock['cost'].median_s:.1%} of what stock loses; "
                f"background loses {beyond:.1%} beyond it"
            )
    return "\n".join(lines)


def _seconds(times: Times) -> str:
    low, high = times.quartiles_s
    return f"{times.median_s:.3f} s ({low:.3f} to {high:.3f})"


def main() -> int:
    """Measure and say it."""
    parser = Parser(prog="benchmarks.save", description=__doc__)
    parser.add_argument("--width", type=count, default=2048, help="of a square matrix")
    parser.add_argument("--layers", type=count, default=24, help="matrices")
    parser.add_argument("--batch", type=count, default=256, help="rows of a micro-batch")
    parser.add_argument("--every", type=count, default=5, help="iterations from save to save")
    parser.add_argument("--repeats", type=count, default=5, help="saves that count")
    parser.add_argument("--engines", nargs="+", default=list(BLOCKS), choices=list(BLOCKS))
    parser.add_argument("--threads", type=count, help="of training [default: one a core]")
    parser.add_argument("--folder", type=Path, help="where files go [default: a temporary one]")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=given.folder, prefix="saves-"))
    try:
        with _threads(given.threads):
            found = measure(given, folder)
    finally:
        shutil.rmtree(folder)
    say(as_text(found, given.width**2 * given.layers, given.every))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main, BenchmarkError))
