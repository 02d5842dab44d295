"""Train one point: ``python -m launch.pretrain_gpt RUN_JSON``, alone or under ``torchrun``.

RUN_JSON is a run folder's ``run.json``; ``ds_config.json`` lies beside it (docs/design.md). The log
goes to stdout, ``metrics.jsonl`` into the run folder.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from configs.errors import ConfigError
from launch.trainer.ranks import Ranks, ranks_from_environment
from launch.trainer.runfile import read_run_file, with_tuned_config


def main(argv: list[str] | None = None) -> int:
    """Run the trainer in this process.

    Returns:
        Exit code: 0 after a finished run, 2 when the user has to mend something.
    """
    parser = argparse.ArgumentParser(prog="python -m launch.pretrain_gpt", description=__doc__)
    parser.add_argument("run_json", type=Path, help="run.json of a run folder")
    parser.add_argument(
        "--local_rank", "--local-rank", type=int, default=None, help="given by DeepSpeed's launcher"
    )
    parser.add_argument(
        "--continue-from", type=Path, default=None, help="folder of the checkpoint to begin at"
    )
    parser.add_argument(
        "--deepspeed_config", default=None, help="in place of ds_config.json; by the autotuner"
    )
    arguments = parser.parse_args(argv)
    try:
        run = read_run_file(arguments.run_json, arguments.continue_from)
        if arguments.deepspeed_config is not None:
            run = with_tuned_config(run, arguments.deepspeed_config)
        ranks = ranks_from_environment(os.environ, arguments.local_rank)
        ranks.require(run.point)
        ranks.export(os.environ)
        # Only now: torch, megatron-core and DeepSpeed take seconds to import.
        from launch.trainer.loop import train

        train(run, ranks)
    except ConfigError as error:
        _complain(str(error), os.environ)
        return 2
    return 0


def _complain(message: str, environment: Mapping[str, str]) -> None:
    """Every rank meets the same cause; one line of it is enough."""
    if environment.get(Ranks.RANK_VARIABLE, "0") == "0":
        sys.stderr.write(f"pretrain_gpt: error: {message}\n")


def _leave(code: int) -> NoReturn:
    """End the process; after good work without tearing the interpreter down.

    With gloo that teardown now and then ends in SIGABRT, and torchrun would call the run failed.
    """
    if code == 0:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    sys.exit(code)


if __name__ == "__main__":
    # The launcher asks a run that hangs what it does; from here on there is an answer.
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    _leave(main())
