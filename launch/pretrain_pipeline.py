"""Train one point in a pipeline: ``python -m launch.pretrain_pipeline RUN_JSON``, as one rank.

RUN_JSON is a run folder's ``run.json``; ``ds_config.json`` lies beside it, of which the batch sizes
and the block ``optimus_cc`` count here. The log goes to stdout, ``metrics.jsonl`` into the folder.
"""

from __future__ import annotations

from launch.train_loop.runfile import Ranks, RunFile, run_and_leave


def train(run: RunFile, ranks: Ranks) -> None:
    """Train as one of the run's ranks."""
    from launch.train_loop.pipeline_adapter import train

    train(run, ranks)


if __name__ == "__main__":
    run_and_leave(train, __doc__)
