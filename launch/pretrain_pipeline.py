"""Train one point in a pipeline: ``python -m launch.pretrain_pipeline RUN_JSON``, as one rank.

RUN_JSON is a run folder's ``run.json``; ``ds_config.json`` lies beside it, of which the batch sizes
and the block ``optimus_cc`` count here. The log goes to stdout, ``metrics.jsonl`` into the folder.
"""

from __future__ import annotations

from launch.trainer.runfile import Ranks, RunFile, run_and_leave, run_program


def main(argv: list[str] | None = None) -> int:
    """Run the trainer in this process.

    Returns:
        Exit code: 0 after a finished run, 2 when the user has to mend something.
    """
    return run_program(_train, __doc__, argv)


def _train(run: RunFile, ranks: Ranks) -> None:
    # Only now: torch and megatron-core take seconds to import.
    from launch.trainer.pipeline_adapter import train

    train(run, ranks)


if __name__ == "__main__":
    run_and_leave(main)
