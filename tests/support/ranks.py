"""Start a worker of the tests as the ranks of a job; not a test itself.

Ranks have the variables that a launcher would set, and are forked from a process that has imported
torch and DeepSpeed already. What the launchers do is tested where they are meant
(``test_launch.py``, ``test_trainer.py``).
"""

import os
import tempfile
from pathlib import Path

import prepared

from launch.launchers import free_port

_LAST_CHARACTERS = 6000


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


def run_ranks(worker, *words, num_ranks=1, modules=prepared.DEEPSPEED, **environment):
    """Run a worker as every rank; when one of them fails, so does the test, with its end.

    Returns what each rank printed.

    Args:
        worker: its path.
        words: its arguments.
        num_ranks: processes.
        modules: what is imported before the ranks are forked (see ``prepared.py``).
        environment: variables beyond those of a rank.
    """
    port = free_port()
    environments = [
        {**rank_environment(rank, num_ranks, port), **environment} for rank in range(num_ranks)
    ]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"rank{rank}" for rank in range(num_ranks)]
        codes = prepared.run(modules, [worker, *words], environments, outputs)
        printed = [path.read_text(errors="replace") for path in outputs]
    failed = [
        f"rank {rank} of {num_ranks} ended with {code}:\n{text[-_LAST_CHARACTERS:]}"
        for rank, (code, text) in enumerate(zip(codes, printed, strict=True))
        if code
    ]
    assert not failed, "\n".join(failed)
    return printed


def run_script(text, *words, modules=prepared.MEGATRON, **environment):
    """Run a program as the only rank of a job; returns the words that it writes to ``RESULTS``.

    Args:
        text: the program.
        words: its arguments.
        modules, environment: see `run_ranks`.
    """
    with tempfile.TemporaryDirectory() as folder:
        script, results = Path(folder) / "script.py", Path(folder) / "results"
        script.write_text(f"RESULTS = open({str(results)!r}, 'w')\n{text}\nRESULTS.close()\n")
        run_ranks(script, *words, modules=modules, **environment)
        return results.read_text().split()
