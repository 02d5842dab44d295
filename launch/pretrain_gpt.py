"""Train one point: ``python -m launch.pretrain_gpt RUN_JSON``, alone or under ``torchrun``.

RUN_JSON is a run folder's ``run.json``; ``ds_config.json`` lies beside it (docs/design.md). The log
goes to stdout, ``metrics.jsonl`` into the run folder.
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
    # Only now: torch, megatron-core and DeepSpeed take seconds to import.
    from launch.trainer.deepspeed_adapter import train

    train(run, ranks)


if __name__ == "__main__":
    run_and_leave(main)
