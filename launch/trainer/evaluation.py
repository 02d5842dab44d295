"""Measures a saved model: ``python -m launch.trainer.evaluation RUN_JSON --continue-from FOLDER``.

What every rank of :mod:`launch.evaluate` runs. RUN_JSON is that of a scratch folder whose point has
the batches to evaluate; rank 0 leaves ``performance.json`` beside it.
"""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING

from configs.errors import ConfigError
from launch.trainer.runfile import Ranks, RunFile, run_and_leave, run_program

if TYPE_CHECKING:
    from torch import Tensor

    from launch.trainer.data import MicroBatch

MODULE = "launch.trainer.evaluation"
RESULT = "performance.json"
WARMUP_BATCHES = 2


def main(argv: list[str] | None = None) -> int:
    """Load the checkpoint's weights, evaluate, and write what was measured.

    Returns:
        Exit code: 2 when the user has to mend something.
    """
    return run_program(_evaluate, __doc__, argv)


def _evaluate(run: RunFile, ranks: Ranks) -> None:
    # Only now: torch, megatron-core and DeepSpeed take seconds to import.
    from launch.trainer.deepspeed_adapter import DeepSpeedAdapter
    from launch.trainer.loop import PhaseClock, device_name
    from launch.trainer.recorder import Recorder
    from launch.trainer.runtime import distributed

    point, checkpoint = run.point, run.checkpoint
    assert checkpoint is not None
    with distributed(point, ranks) as device:
        adapter = DeepSpeedAdapter(run, device, Recorder(run, ranks))
        path, _ = adapter.engine.load_checkpoint(
            str(checkpoint.path.parent), checkpoint.path.name, load_module_only=True
        )
        if path is None:
            raise ConfigError(f"{checkpoint.path}: DeepSpeed found no weights in it")
        clock, latencies_s = PhaseClock(device, ("forward",)), []
        forward = adapter.forward

        def timed_forward(batch: MicroBatch) -> Tensor:
            with clock.phase("forward"):
                loss = forward(batch)
            latencies_s.append(clock.take()["forward_ms"] / 1e3)
            return loss

        adapter.forward = timed_forward  # type: ignore[method-assign]
        loss = adapter.evaluate()
        timed = latencies_s[WARMUP_BATCHES:]
        found = {
            "iteration": checkpoint.iteration,
            "batches": len(timed),
            "loss": loss,
            "latency_s": statistics.median(timed),
            "latency_p95_s": sorted(timed)[int(0.95 * (len(timed) - 1))],
            "samples_per_s": point.global_batch_size * len(timed) / sum(timed),
            "tokens": len(latencies_s) * point.global_batch_size * point.model.seq_length,
            "device": device_name(device),
        }
        if ranks.is_first:
            (run.run_dir / RESULT).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    run_and_leave(main)
