"""Measure a saved model: ``python -m launch.evaluate CHECKPOINT --batch-size N``.

CHECKPOINT is a run's folder (its last checkpoint is taken) or a checkpoint's own. Forward alone, on
validation documents: samples a second, latency, loss, perplexity. The run itself stays as it is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.cli import Parser, add_json, complain, count, run_command, say
from configs.errors import ConfigError
from configs.files import read_json, write_json
from launch.hosts.launchers import Program, free_port, ranks_command, ranks_environment
from launch.trainer.checkpoint import FOLDER, Checkpoint, find_checkpoint
from launch.trainer.evaluation import MODULE, RESULT, WARMUP_BATCHES
from launch.trainer.runfile import ERROR
from launch.trainers.protocol import PLUGIN_BLOCK


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit code: 0; 1 when the evaluation failed; 2 when the user has to mend something.
    """
    parser = Parser("python -m launch.evaluate", __doc__ or "")
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a run's folder or a checkpoint's"
    )
    parser.add_argument(
        "--batch-size",
        type=count,
        metavar="N",
        help="samples a forward and rank [default: the run's]",
    )
    parser.add_argument(
        "--batches", type=count, default=10, metavar="N", help="forwards to measure [default 10]"
    )
    parser.add_argument("--data-prefix", metavar="PREFIX", help="other data than the run's")
    add_json(parser)
    options = parser.read(argv)
    checkpoint = find_checkpoint(options.checkpoint)
    with tempfile.TemporaryDirectory(prefix="evaluate-") as scratch:
        found = _evaluate(checkpoint, Path(scratch), options)
    if found is None:
        return 1
    # Beyond this a float has no exponential.
    perplexity = math.exp(found["loss"]) if found["loss"] < 700 else math.inf
    found = {"checkpoint": str(checkpoint.path), **found, "perplexity": perplexity}
    say(json.dumps(found, indent=2) if options.json else _text(found))
    return 0


def _evaluate(
    checkpoint: Checkpoint, scratch: Path, options: argparse.Namespace
) -> dict[str, Any] | None:
    """Return what the ranks measured; None when they failed, after their last words."""
    num_ranks = _write_run(checkpoint, scratch, options)
    run_json = scratch / "run.json"
    program = Program(MODULE, (str(run_json), "--continue-from", str(checkpoint.path)))
    port = free_port()
    done = subprocess.run(
        ranks_command(program, num_ranks, port),
        env=ranks_environment(os.environ, num_ranks, port),
        capture_output=True,
        text=True,
        check=False,
    )
    result = scratch / RESULT
    if done.returncode == 0 and result.is_file():
        return read_json(result)
    lines = (done.stderr or done.stdout).strip().splitlines()
    errors = [line for line in lines if line.startswith(ERROR)]
    if errors:
        raise ConfigError(errors[0].removeprefix(ERROR))
    complain("\n".join((*lines[-20:], f"evaluation failed, exit code {done.returncode}")))
    return None


def _write_run(checkpoint: Checkpoint, scratch: Path, options: argparse.Namespace) -> int:
    """Describe the evaluation as a run of its own; the number of its ranks."""
    folder = checkpoint.run_dir
    if folder is None:
        raise ConfigError(f"{checkpoint.path}: lies in no run's folder; give RUN/{FOLDER}/NAME")
    if not any(checkpoint.path.glob("*model_states.pt")):
        raise ConfigError(
            f"{checkpoint.path}: not a checkpoint of DeepSpeed, which alone is measured; a run of "
            "another trainer evaluates while it trains (--eval-interval)"
        )
    run, ds_config = read_json(folder / "run.json"), read_json(folder / "ds_config.json")
    size = options.batch_size or checkpoint.point["micro_batch_size"]
    samples = size * checkpoint.point["dp"]
    run["point"] |= {
        "micro_batch_size": size,
        "global_batch_size": samples,
        "iterations": 1,
        "eval_interval": 1,
        "eval_iterations": options.batches + WARMUP_BATCHES,
        "save_interval": 0,
    }
    if options.data_prefix:
        run["data_prefix"] = str(Path(options.data_prefix).resolve())
    ds_config |= {"train_batch_size": samples, "train_micro_batch_size_per_gpu": size}
    ds_config.pop(PLUGIN_BLOCK, None)  # it takes part in updates alone
    ds_config |= {"wall_clock_breakdown": False, "memory_breakdown": False}
    write_json(scratch / "run.json", run)
    write_json(scratch / "ds_config.json", ds_config)
    point = run["point"]
    return int(point["tp"] * point["dp"])


def _text(found: dict[str, Any]) -> str:
    rows = {
        "checkpoint": f"{found['checkpoint']} (iteration {found['iteration']})",
        "device": found["device"],
        "throughput": f"{found['samples_per_s']:.4g} samples/s",
        "latency": f"{found['latency_s'] * 1e3:.4g} ms a forward, median of {found['batches']} "
        f"(95%: {found['latency_p95_s'] * 1e3:.4g} ms)",
        "loss": f"{found['loss']:.6f} on {found['tokens']} validation tokens, "
        f"perplexity {found['perplexity']:.6g}",
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows.items())


if __name__ == "__main__":
    raise SystemExit(run_command(main))
