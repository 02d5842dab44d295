"""Train one point on film reviews: ``python -m launch.frameworks.imdb.program RUN_JSON``.

RUN_JSON is a run folder's ``run.json``; ``ds_config.json`` lies beside it (docs/design.md).
"""

from __future__ import annotations

from launch.train_loop.runfile import Ranks, RunFile, run_and_leave


def train(run: RunFile, ranks: Ranks) -> None:
    """Train as one of the run's ranks."""
    from launch.frameworks.imdb.train import train

    train(run, ranks)


if __name__ == "__main__":
    run_and_leave(train, __doc__)
