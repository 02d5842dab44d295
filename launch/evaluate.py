"""Measure a saved model: ``python -m launch.evaluate CHECKPOINT --batch-size N``.

CHECKPOINT is a run's folder (its last checkpoint is taken) or a checkpoint's own. Forward alone, on
the run's validation documents: samples a second, median latency and loss, as JSON. The run itself
stays as it is.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from configs.cli import Parser, complain, count, run_command, say
from configs.errors import ConfigError
from configs.files import as_json, read_json, write_json
from launch.hosts.launchers import Program, free_port, ranks_command, ranks_environment
from launch.trainer.checkpoint import FOLDER, Checkpoint, find_checkpoint
from launch.trainer.evaluation import MODULE, RESULT, WARMUP_BATCHES
from launch.trainer.runfile import ERROR
from launch.trainers.protocol import PLUGIN_BLOCK


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit code: 0; 1 when the evaluation failed.

    Raises:
        ConfigError: the user has to mend something.
    """
    parser = Parser("python -m launch.evaluate", __doc__ or "")
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a run's folder or a checkpoint's"
    )
    size = "samples a forward and rank [default: the run's]"
    parser.add_argument("--batch-size", type=count, metavar="N", help=size)
    parser.add_argument(
        "--batches", type=count, default=10, metavar="N", help="forwards to measure [default 10]"
    )
    options = parser.read(argv)
    checkpoint = find_checkpoint(options.checkpoint)
    with tempfile.TemporaryDirectory(prefix="evaluate-") as folder:
        scratch = Path(folder)
        num_ranks = _write_run(checkpoint, scratch, options.batch_size, options.batches)
        run_json, port = scratch / "run.json", free_port()
        words = (str(run_json), "--continue-from", str(checkpoint.path))
        done = subprocess.run(
            ranks_command(Program(MODULE, words), num_ranks, port),
            env=ranks_environment(os.environ, num_ranks, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        found = read_json(scratch / RESULT)
    if found:
        say(as_json(found).rstrip())
        return 0
    lines = done.stdout.strip().splitlines()
    for line in lines:
        if line.startswith(ERROR):
            raise ConfigError(line.removeprefix(ERROR))
    complain("\n".join((*lines[-20:], f"evaluation failed, exit code {done.returncode}")))
    return 1


def _write_run(
    checkpoint: Checkpoint, scratch: Path, batch_size: int | None, num_batches: int
) -> int:
    """Describe the evaluation as a run of its own; return the number of its ranks."""
    folder = checkpoint.run_dir
    if folder is None:
        raise ConfigError(f"{checkpoint.path}: lies in no run's folder; give RUN/{FOLDER}/NAME")
    if not any(checkpoint.path.glob("*model_states.pt")):
        raise ConfigError(
            f"{checkpoint.path}: not a checkpoint of DeepSpeed, which alone is measured; a run of "
            "another trainer evaluates while it trains (--eval-interval)"
        )
    run, ds_config = read_json(folder / "run.json"), read_json(folder / "ds_config.json")
    point = run["point"]
    size = batch_size or point["micro_batch_size"]
    point |= {
        "micro_batch_size": size,
        "global_batch_size": size * point["dp"],
        "iterations": 1,
        "eval_interval": 1,
        "eval_iterations": num_batches + WARMUP_BATCHES,
        "save_interval": 0,
    }
    ds_config.pop(PLUGIN_BLOCK, None)  # it takes part in updates alone
    ds_config |= {
        "train_batch_size": point["global_batch_size"],
        "train_micro_batch_size_per_gpu": size,
        "wall_clock_breakdown": False,
        "memory_breakdown": False,
    }
    write_json(scratch / "run.json", run)
    write_json(scratch / "ds_config.json", ds_config)
    return int(point["tp"] * point["dp"])


if __name__ == "__main__":
    raise SystemExit(run_command(main))
