"""Measures a saved model: ``python -m launch.trainer.performance RUN_JSON CHECKPOINT ...``.

What every rank of :mod:`launch.evaluate` runs. RUN_JSON is that of a scratch folder whose point has
the batches to evaluate; rank 0 leaves ``performance.json`` beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from configs.errors import ConfigError
from launch.trainer.checkpoint_files import find_checkpoint
from launch.trainer.data import MicroBatches, build_samples
from launch.trainer.model import ParallelState, build_model, causal_mask, initialize_engine
from launch.trainer.ranks import Ranks, ranks_from_environment
from launch.trainer.runfile import RunFile, read_run_file
from launch.trainer.runtime import distributed

RESULT = "performance.json"
WARMUP_BATCHES = 2


def main(argv: list[str] | None = None) -> int:
    """Load the checkpoint's weights, evaluate, and write what was measured.

    Returns:
        Exit code: 2 when the user has to mend something.
    """
    parser = argparse.ArgumentParser(prog="python -m launch.trainer.performance")
    parser.add_argument("run_json", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--local_rank", "--local-rank", type=int, default=None)
    arguments = parser.parse_args(argv)
    try:
        run = read_run_file(arguments.run_json)
        ranks = ranks_from_environment(os.environ, arguments.local_rank)
        ranks.require(run.point)
        ranks.export(os.environ)
        with distributed(run.point, ranks) as device:
            found = _measure(run, arguments.checkpoint, device)
            if ranks.is_first:
                (run.run_dir / RESULT).write_text(json.dumps(found), encoding="utf-8")
    except ConfigError as error:
        if os.environ.get(Ranks.RANK_VARIABLE, "0") == "0":
            sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _measure(run: RunFile, folder: Path, device: torch.device) -> dict[str, Any]:
    point, mpu = run.point, ParallelState()
    checkpoint = find_checkpoint(folder)
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
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _leave(code: int) -> None:
    # Tearing gloo down now and then ends in SIGABRT, after everything has gone well.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main())
