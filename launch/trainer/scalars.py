"""Scalars of a running training for TensorBoard and Weights & Biases, where they are asked for.

Rank 0 hands each iteration's numbers to a thread and goes on, so that no iteration waits for a
dashboard. A dashboard that fails is left out from then on; it never fails a run.
"""

from __future__ import annotations

import importlib
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from launch.trainer.runfile import RunFile

TENSORBOARD_VARIABLE = "DOS_TENSORBOARD"
"""Set by the launcher when TensorBoard was asked for."""
WANDB_VARIABLE = "DOS_WANDB_PROJECT"
"""The project of Weights & Biases, when it was asked for."""
CLOSE_S = 60.0
"""Longest wait for the last numbers to be written or sent."""

_NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "iteration_ms": "time/iteration_ms",
    "forward_ms": "time/forward_ms",
    "backward_ms": "time/backward_ms",
    "update_ms": "time/update_ms",
    "tokens_per_s": "time/tokens_per_s",
    "host_memory_bytes": "memory/host_bytes",
    "device_memory_bytes": "memory/device_bytes",
}


class TensorBoard:
    """Event files in a folder."""

    def __init__(self, run: RunFile) -> None:
        tensorboard: Any = importlib.import_module("torch.utils.tensorboard")
        self._writer = tensorboard.SummaryWriter(str(run.run_dir / "tensorboard"))
        self.close: Callable[[], object] = self._writer.close

    def write(self, iteration: int, scalars: Mapping[str, float]) -> None:
        """Take the numbers of one iteration."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()


class WeightsAndBiases:
    """A run of a project; its files lie in the run folder, and ``WANDB_MODE`` decides the mode."""

    def __init__(self, run: RunFile, project: str) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            project=project,
            name=f"{run.run_dir.parent.name}/{run.run_dir.name}",
            dir=str(run.run_dir),
            config=run.point.model_dump(mode="json"),
        )
        self.close: Callable[[], object] = self._run.finish

    def write(self, iteration: int, scalars: Mapping[str, float]) -> None:
        """Take the numbers of one iteration."""
        self._run.log(dict(scalars), step=iteration)


Dashboard = TensorBoard | WeightsAndBiases


class Scalars:
    """Passes iterations on to dashboards."""

    def __init__(self, makers: Sequence[Callable[[], Dashboard]]) -> None:
        """Say where to; nothing is started when it is nowhere.

        Args:
            makers: each opens a dashboard; called before the first iteration.
        """
        self._makers = makers
        self._dashboards: list[Dashboard] = []
        self._waiting: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        for make in self._makers:
            _works(partial(self._open, make))
        if self._dashboards:
            self._thread = threading.Thread(target=self._pass_on, name="scalars", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(timeout=CLOSE_S)

    def _open(self, make: Callable[[], Dashboard]) -> None:
        self._dashboards.append(make())

    def write(self, fields: Mapping[str, Any], tokens_per_iteration: int) -> None:
        """Hand over an ``iteration`` event of ``metrics.jsonl``; returns at once."""
        if self._thread is None:
            return
        self._waiting.put((fields["iteration"], scalars_of(fields, tokens_per_iteration)))

    def _pass_on(self) -> None:
        dashboards = self._dashboards
        while (item := self._waiting.get()) is not None:
            dashboards = [board for board in dashboards if _works(partial(board.write, *item))]
        for board in dashboards:
            _works(board.close)


def scalars_of(fields: Mapping[str, Any], tokens_per_iteration: int) -> dict[str, float]:
    """Names and numbers of an iteration; what is missing or not finite is left out."""
    seconds = fields["iteration_ms"] / 1000.0
    values = {**fields, "tokens_per_s": tokens_per_iteration / seconds if seconds > 0 else None}
    return {
        name: float(values[field])
        for field, name in _NAMES.items()
        if values.get(field) is not None
    }


def scalars_of_run(run: RunFile, is_first: bool, environment: Mapping[str, str]) -> Scalars:
    """What the launcher asked for; nothing off rank 0.

    Args:
        run: the run.
        is_first: whether this is rank 0.
        environment: ``os.environ``.
    """
    makers: list[Callable[[], Dashboard]] = []
    if is_first and environment.get(TENSORBOARD_VARIABLE):
        makers.append(lambda: TensorBoard(run))
    if is_first and (project := environment.get(WANDB_VARIABLE)):
        makers.append(lambda: WeightsAndBiases(run, project))
    return Scalars(makers)


def _works(action: Callable[[], object]) -> bool:
    """Do what runs somebody else's code; when it fails, say so in the log."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - a dashboard must not end a run
        sys.stderr.write(f"scalars: left out from now on: {type(error).__name__}: {error}\n")
        return False
    return True
