"""Start a worker of the tests as the ranks of a job; not a test itself.

Ranks are started with the variables that a launcher would set, without one: it would import torch
a second time. What the launchers do is tested where they are meant (``test_launch.py``,
``test_nodes.py``, ``test_trainer.py``).
"""

import contextlib
import os
import subprocess
import sys
import tempfile

from processes import wait_for

from launch.hosts.ranks import free_port

_LAST_CHARACTERS = 6000
_FOR_EVER_S = 1e9
"""Nothing is waited for here for longer than the test's own limit allows."""


def rank_environment(rank, num_ranks, port):
    """The variables by which a process of this machine knows that it is a rank."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks}
    numbers |= {"LOCAL_WORLD_SIZE": num_ranks, "MASTER_PORT": port}
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        **{name: str(number) for name, number in numbers.items()},
    }


def run_ranks(*words, num_ranks=1, **environment):
    """Run ``python WORDS`` as every rank; when one of them fails, so does the test, with its end.

    Args:
        words: the worker's path and its arguments, or other words for Python.
        num_ranks: processes.
        environment: variables beyond those of a rank.
    """
    command = [sys.executable, "-W", "ignore", *map(str, words)]
    port = free_port()
    with contextlib.ExitStack() as files:
        outputs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(num_ranks)]
        ranks = [
            subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**rank_environment(rank, num_ranks, port), **environment},
            )
            for rank, output in enumerate(outputs)
        ]
        wait_for(lambda: _are_over(ranks), _FOR_EVER_S)
        failed = [rank for rank, process in enumerate(ranks) if process.returncode]
        for process in ranks:
            process.kill()
            process.wait()
        texts = []
        for rank in failed:
            outputs[rank].seek(0)
            texts.append(f"rank {rank} of {num_ranks}:\n{outputs[rank].read()[-_LAST_CHARACTERS:]}")
        assert not failed, "\n".join(texts)


def _are_over(ranks):
    """Whether all have ended or one has failed, which the others might wait for in vain."""
    codes = [process.poll() for process in ranks]
    return None not in codes or any(codes)
