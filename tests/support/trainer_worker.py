"""Trains many points one after the other in this process: ``RUN_JSON...``, a line of JSON each.

Starting a process and DeepSpeed takes longer than a tiny training does.
"""

import json
import os
import sys
from pathlib import Path

from launch.trainer.metrics import MetricsFile
from launch.trainer.ranks import ranks_from_environment
from launch.trainer.runfile import read_run_file


def main(paths):
    ranks = ranks_from_environment(os.environ)
    ranks.export(os.environ)
    from launch.trainer import loop
    from launch.trainer.checkpoint import load_checkpoint
    from launch.trainer.digest import state_digests
    from launch.trainer.runtime import distributed, seed_everything
    from launch.trainer.scalars import Scalars

    runs = [read_run_file(Path(path)) for path in paths]
    with distributed(runs[0].point, ranks) as device:
        for run in runs:
            seed_everything(run.point.seed)
            try:
                with MetricsFile(run.metrics_path if ranks.is_first else None) as metrics:
                    trainer = loop._set_up(run, ranks, device)
                    first = 1
                    if run.checkpoint is not None:
                        load_checkpoint(run, trainer.engine, run.checkpoint)
                        first += run.checkpoint.iteration
                    metrics.write("start", {})
                    loop._iterate(trainer, first, metrics, Scalars([]))
                result = {"digests": state_digests(trainer.engine)}
                result["parameters"] = loop.num_local_parameters(trainer.engine.module)
                weight = next(trainer.engine.module.parameters())
                result["dtype"] = str(weight.dtype)
                trainer.engine.destroy()
            except Exception as error:
                result = {"error": f"{type(error).__name__}: {error}"}
                if num_ranks_of(run) > 1:
                    raise
            if ranks.is_first:
                (run.run_dir / "result.json").write_text(json.dumps(result))


def num_ranks_of(run):
    return run.point.num_ranks


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
