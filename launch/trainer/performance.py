"""Measures a saved model: ``python -m launch.trainer.performance RUN_JSON --continue-from FOLDER``.

What every rank of :mod:`launch.evaluate` runs. RUN_JSON is that of a scratch folder whose point has
the batches to evaluate; rank 0 leaves ``performance.json`` beside it.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import TYPE_CHECKING, Any

from configs.errors import ConfigError
from launch.trainer.program import leave, run_program
from launch.trainer.ranks import Ranks
from launch.trainer.runfile import RunFile

if TYPE_CHECKING:
    import torch

RESULT = "performance.json"
WARMUP_BATCHES = 2


def main(argv: list[str] | None = None) -> int:
    """Load the checkpoint's weights, evaluate, and write what was measured.

    Returns:
        Exit code: 2 when the user has to mend something.
    """
    return run_program(_evaluate, "launch.trainer.performance", __doc__, argv)


def _evaluate(run: RunFile, ranks: Ranks) -> None:
    # Only now: torch, megatron-core and DeepSpeed take seconds to import.
    from launch.trainer.runtime import distributed

    with distributed(run.point, ranks) as device:
        found = _measure(run, device)
        if ranks.is_first:
            (run.run_dir / RESULT).write_text(json.dumps(found), encoding="utf-8")


def _measure(run: RunFile, device: torch.device) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from launch.trainer.data import MicroBatches, build_samples
    from launch.trainer.model import ParallelState, build_model, causal_mask, initialize_engine

    point, mpu, checkpoint = run.point, ParallelState(), run.checkpoint
    assert checkpoint is not None
    engine = initialize_engine(run, build_model(run, mpu, device), mpu)
    path, _ = engine.load_checkpoint(
        str(checkpoint.path.parent), checkpoint.path.name, load_module_only=True
    )
    if path is None:
        raise ConfigError(f"{checkpoint.path}: DeepSpeed found no weights in it")
    engine.eval()
    _, samples = build_samples(run)
    batches = MicroBatches(samples, point, mpu.get_data_parallel_rank(), device)
    mask = causal_mask(point, device)
    latencies_s, losses = [], []
    with torch.no_grad():
        for iteration in range(1, point.eval_iterations + 1):
            for batch in batches.of_iteration(iteration):
                _wait(device)
                begin = time.perf_counter()
                loss = engine(
                    input_ids=batch.tokens,
                    position_ids=batch.position_ids,
                    attention_mask=mask,
                    labels=batch.labels,
                ).mean()
                _wait(device)
                latencies_s.append(time.perf_counter() - begin)
                losses.append(loss)
    total = torch.stack(losses).double().mean()
    dist.all_reduce(total, group=mpu.get_data_parallel_group())
    timed = latencies_s[WARMUP_BATCHES:]
    return {
        "iteration": checkpoint.iteration,
        "batches": len(timed),
        "loss": total.item() / point.dp,
        "latency_s": statistics.median(timed),
        "latency_p95_s": sorted(timed)[int(0.95 * (len(timed) - 1))],
        "samples_per_s": point.global_batch_size * len(timed) / sum(timed),
        "tokens": len(latencies_s) * point.global_batch_size * point.model.seq_length,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def _wait(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    leave(main())
