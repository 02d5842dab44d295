"""Train one point: ``python -m launch.pretrain_gpt RUN_JSON``, alone or under ``torchrun``.

RUN_JSON is a run folder's ``run.json``; ``ds_config.json`` lies beside it (docs/design.md). The log
goes to stdout, ``metrics.jsonl`` into the run folder.
"""

from __future__ import annotations

from launch.train_loop.runfile import Ranks, RunFile, run_and_leave


def train(run: RunFile, ranks: Ranks) -> None:
    """Train as one of the run's ranks."""
    from launch.train_loop.deepspeed_adapter import train

    train(run, ranks)


if __name__ == "__main__":
    run_and_leave(train, __doc__)
