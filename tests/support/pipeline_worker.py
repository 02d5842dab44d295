"""Rank of the pipeline trainer's tests: trains ``PORT:RUN_JSON[=RUN_TO_CONTINUE]...`` in turn.

Starting a process takes longer than a tiny training does. A run that the user has to mend leaves
its message in ``refused`` in its folder.
"""

import os
import sys
from pathlib import Path

from configs.errors import ConfigError
from launch.trainer.checkpoint import find_checkpoint
from launch.trainer.runfile import ranks_from_environment, read_run_file


def main(arguments):
    from launch.trainer.pipeline_adapter import train

    for argument in arguments:
        port, _, words = argument.partition(":")
        path, _, start = words.partition("=")
        os.environ["MASTER_PORT"] = port
        ranks = ranks_from_environment(os.environ)
        try:
            checkpoint = find_checkpoint(Path(start)).path if start else None
            train(read_run_file(Path(path), checkpoint), ranks)
        except ConfigError as error:
            if ranks.is_first:
                Path(path).with_name("refused").write_text(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
