"""What a trainer's program does around training: command line, errors, its end."""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from configs.errors import ConfigError
from launch.trainer.ranks import Ranks, ranks_from_environment
from launch.trainer.runfile import (
    RunFile,
    read_run_file,
    require_token_files,
    with_tuned_config,
)


def run_program(
    train: Callable[[RunFile, Ranks], None],
    module: str,
    description: str | None,
    argv: list[str] | None = None,
    require_data: Callable[[Path], Path] = require_token_files,
) -> int:
    """Read what a trainer is given on its command line, and train.

    Args:
        train: trains a run as one of its ranks.
        module: the program's, as ``python -m`` takes it.
        description: what ``--help`` says of it.
        argv: the command line without its first word; None for the process's own.
        require_data: looks whether the data at a prefix is there.

    Returns:
        Exit code: 0 after a finished run, 2 when the user has to mend something.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
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
        run = read_run_file(arguments.run_json, arguments.continue_from, require_data)
        if arguments.deepspeed_config is not None:
            run = with_tuned_config(run, arguments.deepspeed_config)
        ranks = ranks_from_environment(os.environ, arguments.local_rank)
        ranks.require(run.point)
        ranks.export(os.environ)
        train(run, ranks)
    except ConfigError as error:
        _complain(module.rpartition(".")[2], str(error), os.environ)
        return 2
    return 0


def _complain(program: str, message: str, environment: Mapping[str, str]) -> None:
    """Every rank meets the same cause; one line of it is enough."""
    if environment.get(Ranks.RANK_VARIABLE, "0") == "0":
        sys.stderr.write(f"{program}: error: {message}\n")


def answer_when_asked() -> None:
    """Write where every thread is on a signal: the launcher asks a run that hangs what it does."""
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)


def leave(code: int) -> NoReturn:
    """End the process; after good work without tearing the interpreter down.

    With gloo that teardown now and then ends in SIGABRT, and torchrun would call the run failed.
    """
    if code == 0:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    sys.exit(code)
