"""Measures a saved model: ``python -m launch.trainer.evaluation RUN_JSON --continue-from FOLDER``.

What every rank of :mod:`launch.evaluate` runs. RUN_JSON is that of a scratch folder whose point has
the batches to evaluate; rank 0 leaves ``performance.json`` beside it.
"""

from __future__ import annotations

import json
import statistics

from configs.errors import ConfigError
from launch.trainer.runfile import Ranks, RunFile, run_and_leave

MODULE = "launch.trainer.evaluation"
RESULT = "performance.json"
WARMUP_BATCHES = 2


def evaluate(run: RunFile, ranks: Ranks) -> None:
    """Load the checkpoint's weights, evaluate, and write what was measured."""
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
        clock, latencies_s = PhaseClock(device), []
        adapter.engine.register_forward_pre_hook(lambda *_: clock.begin())

        def end_forward(*_: object) -> None:
            clock.end("forward")
            latencies_s.append(clock.take()["forward_ms"] / 1e3)

        adapter.engine.register_forward_hook(end_forward)
        loss = adapter.evaluate()
        timed = latencies_s[WARMUP_BATCHES:]
        found = {
            "checkpoint": str(checkpoint.path),
            "iteration": checkpoint.iteration,
            "device": device_name(device),
            "samples_per_s": point.global_batch_size * len(timed) / sum(timed),
            "latency_s": statistics.median(timed),
            "loss": loss,
            "tokens": len(latencies_s) * point.global_batch_size * point.model.seq_length,
        }
        if ranks.is_first:
            (run.run_dir / RESULT).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    run_and_leave(evaluate, __doc__)
