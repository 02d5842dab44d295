"""Train one point on film reviews: ``python -m launch.frameworks.imdb.program RUN_JSON``.

RUN_JSON is a run folder's ``run.json``; ``ds_config.json`` lies beside it (docs/design.md).
"""

from __future__ import annotations

from pathlib import Path

from configs.errors import ConfigError
from launch.trainer.runfile import Ranks, RunFile, run_and_leave, run_program


def main(argv: list[str] | None = None) -> int:
    """Run the program in this process; 0 after a finished run, 2 when the user has to mend it."""
    return run_program(_train, __doc__, argv, require_reviews)


def require_reviews(prefix: Path) -> Path:
    """Return the prefix of tokenized reviews.

    Raises:
        ConfigError: they are not there.
    """
    manifest = prefix.with_name(f"{prefix.name}.manifest.json")
    if not manifest.is_file():
        raise ConfigError(f"data_prefix = {prefix}: {manifest} is missing; launch the run again")
    return prefix


def _train(run: RunFile, ranks: Ranks) -> None:
    # Only now: torch, Lightning and DeepSpeed take seconds to import.
    from launch.frameworks.imdb.train import train

    train(run, ranks)


if __name__ == "__main__":
    run_and_leave(main)
