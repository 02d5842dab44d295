"""Train, save after every iteration, and be killed at a random moment; go on from the last save.

``saving_worker.py FOLDER ITERATIONS SEED VICTIM``: VICTIM is ``all``, a rank, or somebody else.
What rank 0 prints for each iteration is its number and a digest of the weights. Not a test itself.
"""

import hashlib
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import engines
import torch
from engines import RANK, Case, Trial
from seams import UNFINISHED

LONGEST_S = 0.1
BETAS = [0.5, 0.75]
"""Their powers are exact in so few steps. DeepSpeed multiplies up what it has, and takes ``pow``
after a load: with other betas a run that goes on ends in other bits, in stock too."""


def digest(engine):
    own = "".join(map(engines.bits, engines.state_of(engine).values()))
    found = [None] * engines.NUM_RANKS
    torch.distributed.all_gather_object(found, own)
    return hashlib.sha256("".join(found).encode()).hexdigest()[:16]


def kill_after(seconds):
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def tag_of(iteration, seed):
    """Return a new tag each time, or the same one every time."""
    return "again" if seed % 2 else f"iteration{iteration}"


def main():
    folder, iterations, seed, victim = Path(sys.argv[1]), *map(int, sys.argv[2:4]), sys.argv[4]
    engines.prepare()
    block = {**engines.STRIDE, "checkpoint": "background", "checkpoint_memory_bytes": 2000}
    adam = {"type": "AdamW", "params": {"betas": BETAS}}
    case = Case(config={"optimizer": adam})
    with Trial(block) as trial:
        engine = trial.open(case)
        first = 0
        path, state = engine.load_checkpoint(folder)
        if path is not None:
            first = state["iteration"] + 1
            said(first - 1, digest(engine))
        chance = random.Random(seed)
        # The save before is whole by then, so that the next run has something to go on from.
        last, delay = first + chance.randint(1, 2), chance.uniform(0, LONGEST_S)
        for iteration in range(first, iterations):
            trial.train(engine, 1, skip=iteration)
            said(iteration, digest(engine))
            if iteration == last and victim in ("all", str(RANK)):
                threading.Thread(target=kill_after, args=(delay,), daemon=True).start()
            engine.save_checkpoint(folder, tag_of(iteration, seed), {"iteration": iteration})
        engine.optimizer.checkpoints.wait()
        torch.distributed.barrier()
        if victim == "nobody":
            assert not list(folder.rglob(f"*{UNFINISHED}"))
        trial.end(engine)
    engines.leave()


def said(iteration, text):
    if RANK == 0:
        print("ITERATION", iteration, text, flush=True)


if __name__ == "__main__":
    main()
