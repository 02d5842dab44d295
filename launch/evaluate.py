"""Measure a saved model: ``python -m launch.evaluate CHECKPOINT --batch-size N``.

CHECKPOINT is a run's folder (its last checkpoint is taken) or a checkpoint's own. Forward alone, on
the run's validation documents: samples a second, median latency and loss, as JSON. The run itself
stays as it is: the evaluation is described as a run of its own, of which every rank runs
:func:`evaluate`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from configs.cli import Parser, complain, count, run_command, say
from configs.errors import ConfigError
from configs.files import as_json, read_json, write_json
from launch.launchers import Program, free_port, ranks_command, ranks_environment
from launch.trainer.checkpoint import FOLDER, Checkpoint, find_checkpoint
from launch.trainer.runfile import ERROR, Ranks, RunFile, run_and_leave
from launch.trainers.protocol import PLUGIN_BLOCK

AS_RANK = "DOS_EVALUATES"
"""Environment variable that tells this program to be a rank."""
RESULT = "performance.json"
WARMUP_BATCHES = 2


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
        words = (str(scratch / "run.json"), "--continue-from", str(checkpoint.path))
        port = free_port()
        done = subprocess.run(
            ranks_command(Program("launch.evaluate", words), num_ranks, port),
            env={**ranks_environment(os.environ, num_ranks, port), AS_RANK: "1"},
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


def evaluate(run: RunFile, ranks: Ranks) -> None:
    """Load the checkpoint's weights, evaluate, and write what was measured, as one of the ranks."""
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
            write_json(run.run_dir / RESULT, found)


if __name__ == "__main__":
    if AS_RANK in os.environ:
        run_and_leave(evaluate, __doc__)
    raise SystemExit(run_command(lambda: main(sys.argv[1:])))
