"""The training loop of every trainer but Lightning's, and what measures an iteration."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import math
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import Point
from deep_optimizer_states.core.host import usable_cores
from deep_optimizer_states.state_reader import digest, read_state
from launch.train_loop.checkpoint import require_usable, save_whole
from launch.train_loop.recorder import Iteration, Recorder
from launch.train_loop.runfile import Ranks, RunFile
from launch.train_loop.runtime import distributed

MAX_NUMEL_PER_CORE = 300_000_000
"""Above this many parameters a core, hashing would take longer than the run is worth."""
PHASES = ("forward", "backward", "update")
Digests = tuple[str | None, str | None]
"""Of the weights, and of master weights and moments."""


class Adapter(Protocol):
    """What the loop needs of a model and of those who train it; every rank has one and calls it."""

    with_deepspeed: ClassVar[bool]
    packages: ClassVar[tuple[str, ...]]
    """Whose versions decide the numbers."""

    def __init__(self, run: RunFile, device: torch.device, recorder: Recorder) -> None:
        """Make the model and read the data's order.

        Raises:
            ConfigError: the user has to mend something.
        """

    def begin_timing(self) -> None:
        """Begin to count the time of the next iteration."""

    def train(self, iteration: int) -> Iteration:
        """Run every micro-batch and the update."""

    def evaluate(self) -> float:
        """Return the mean loss of the validation batches, the same ones every time."""

    def save(self, folder: Path, when_whole: Callable[[], None]) -> bool:
        """Write this rank's files of a checkpoint: :data:`launch.train_loop.checkpoint.Write`."""

    def end_save(self) -> None:
        """Wait until no checkpoint is being written any more.

        Raises:
            RuntimeError: the last one could not be.
        """

    def load(self, checkpoint: Path) -> None:
        """Take up a checkpoint's weights, optimizer state, schedule and random states."""

    def digests(self) -> Digests:
        """Fingerprint the trained state of all ranks."""

    def results(self) -> dict[str, Any]:
        """Return further fields of the ``end`` event."""


def train(run: RunFile, ranks: Ranks, make: type[Adapter]) -> None:
    """Train a point from the first iteration, or from a checkpoint's, to the last.

    A loss or gradient that is not finite is reported and does not stop the run.

    Raises:
        ConfigError: the user has to mend something.
    """
    started, point = time.perf_counter(), run.point
    with (
        Recorder(run, ranks) as recorder,
        distributed(point, ranks, with_deepspeed=make.with_deepspeed) as device,
    ):
        recorder.sizes()
        adapter = make(run, device, recorder)
        versions = {name: importlib.metadata.version(name) for name in make.packages}
        recorder.start(
            {
                "parameters": point.model.num_parameters(point.tp),
                "vocab_size": point.model.vocab_size,
                "padded_vocab_size": point.model.padded_vocab_size(point.tp),
                "device": device_name(device),
                "versions": {"python": platform.python_version(), **versions},
                "continued_from": str(run.checkpoint.path) if run.checkpoint else None,
            }
        )
        iterate(run, adapter, recorder)
        recorder.event(
            "end", end_fields(point.iterations, started, adapter.digests()) | adapter.results()
        )


def end_fields(iterations: int, started: float, digests: Digests) -> dict[str, Any]:
    """Return the fields of the ``end`` event that every trainer has."""
    weights, optimizer_state = digests
    return {
        "iterations": iterations,
        "seconds": time.perf_counter() - started,
        "weights_sha256": weights,
        "optimizer_sha256": optimizer_state,
    }


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def iterate(run: RunFile, adapter: Adapter, recorder: Recorder) -> None:
    """Train, evaluate and save from the run's first iteration to its last.

    An evaluation or a checkpoint comes at every interval, and then also at the end.
    """
    point, first = run.point, 1
    if run.checkpoint is not None:
        require_usable(run, run.checkpoint)
        adapter.load(run.checkpoint.path)
        first = run.checkpoint.iteration + 1
    dist.barrier()
    adapter.begin_timing()
    for number in range(first, point.iterations + 1):
        recorder.iteration(adapter.train(number))
        evaluates, saves = (
            interval > 0 and (number % interval == 0 or number == point.iterations)
            for interval in (point.eval_interval, point.save_interval)
        )
        if evaluates:
            begin = time.perf_counter()
            loss = adapter.evaluate()
            recorder.evaluation(number, loss, seconds=time.perf_counter() - begin)
        if saves:
            begin = time.perf_counter()
            save_whole(run, number, adapter.save, functools.partial(recorder.checkpoint, number))
            recorder.checkpoint_stall(number, time.perf_counter() - begin)
        if evaluates or saves:
            adapter.begin_timing()
    adapter.end_save()


def learning_rate(point: Point, iteration: int) -> float:
    """Return the rate that ``iteration`` (from 1) is updated with: a warm-up, then half a cosine.

    Megatron's formula over iterations: with ``lr_warmup_iterations`` 1 the first iteration has the
    peak, and the last one ``min_lr``.
    """
    warmup, last = point.lr_warmup_iterations, point.iterations
    if warmup > 0 and iteration <= warmup:
        return point.lr * iteration / warmup
    if iteration > last:
        return point.min_lr
    share = (iteration - warmup) / (last - warmup)
    return point.min_lr + (point.lr - point.min_lr) * 0.5 * (math.cos(math.pi * share) + 1.0)


class PhaseClock:
    """Sums the wall time of each phase over an iteration's micro-batches.

    Forward is without reading the samples, backward with the gradients' reduction and their way to
    the host, update the optimizer's step. On CUDA a phase ends when the device has finished what
    the phase launched.
    """

    def __init__(self, device: torch.device, phases: tuple[str, ...] = PHASES) -> None:
        self._on_cuda = device.type == "cuda"
        self._ms = dict.fromkeys(phases, 0.0)
        self._mark = 0.0

    def begin(self) -> None:
        """Begin the first phase."""
        self._mark = self.now()

    def end(self, phase: str) -> None:
        """End a phase; the next one begins."""
        now = self.now()
        self._ms[phase] += (now - self._mark) * 1000.0
        self._mark = now

    def take(self) -> dict[str, float]:
        """Return ``forward_ms`` and so on since the last call; starts again at zero."""
        taken, self._ms = self._ms, dict.fromkeys(self._ms, 0.0)
        return {f"{name}_ms": milliseconds for name, milliseconds in taken.items()}

    def now(self) -> float:
        """Return a time in seconds, when the device has finished what was launched."""
        if self._on_cuda:
            # No deadline: the iteration is what is timed, and the launcher ends a run that hangs.
            torch.cuda.synchronize()
        return time.perf_counter()


class PeakMemory:
    """Most device memory allocated at once."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda, self._peak_bytes = device.type == "cuda", 0

    def note(self) -> None:
        """Look at the allocator's peak, which somebody is about to reset."""
        self._peak_bytes = max(self._peak_bytes, torch.cuda.max_memory_allocated())

    def take(self) -> int | None:
        """Return the bytes since the last call; None without CUDA."""
        if not self._on_cuda:
            return None
        self.note()
        peak, self._peak_bytes = self._peak_bytes, 0
        torch.cuda.reset_peak_memory_stats()
        return peak


def state_digests(engine: Any) -> Digests:
    """Fingerprint the 16-bit weights, and the master weights with both moments, of all ranks.

    Every rank hashes what it holds: under ZeRO-3 its partitions without their padding, which is
    uninitialised memory. Every rank must call it.

    Returns:
        Hex digests of the weights and of the optimizer state; both None when any rank holds
        ``MAX_NUMEL_PER_CORE`` elements a core or more, the second where another process than the
        rank holds the moments.
    """
    subgroups = read_state(engine)
    weights = [tensor for subgroup in subgroups for tensor in subgroup.weights]
    state = [t for subgroup in subgroups for t in (*subgroup.masters, *subgroup.moments)]
    mine: Digests = (None, None)
    if sum(tensor.numel() for tensor in weights) < MAX_NUMEL_PER_CORE * usable_cores():
        has_moments = all(subgroup.moments for subgroup in subgroups)
        mine = (_digest_of_each(weights), _digest_of_each(state) if has_moments else None)
    return joined_over_ranks(mine)


def joined_over_ranks(mine: Digests) -> Digests:
    """Join each rank's digests in the order of ranks; None where a rank has none."""
    everyone: list[Digests] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    weights, state = zip(*everyone, strict=True)
    return _joined(weights), _joined(state)


def _digest_of_each(tensors: list[Tensor]) -> str | None:
    with ThreadPoolExecutor(usable_cores()) as pool:
        return _joined(tuple(pool.map(lambda tensor: digest([tensor]), tensors)))


def _joined(digests: tuple[str | None, ...]) -> str | None:
    found = [text for text in digests if text is not None]
    if len(found) < len(digests):
        return None
    return hashlib.sha256("\n".join(found).encode()).hexdigest()
