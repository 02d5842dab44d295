"""Run a program as it stands and say what the plugin updated; not a test itself.

``example_program.py MODULE_OR_FILE WORD...`` prints the tiles of each update in its last line.
"""

import os
import runpy
import sys

import deepspeed.ops
import torch

from deep_optimizer_states.core.executor import Executor

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo does without
update, counts = Executor.run, []


def run(executor, *arguments, **more):
    update(executor, *arguments, **more)
    counts.append(executor.last_plan.num_tiles)


Executor.run = run
sys.path.insert(0, ".")  # as `python -m` and a notebook's kernel have it
sys.argv[:] = sys.argv[1:]
start = runpy.run_path if sys.argv[0].endswith(".py") else runpy.run_module
start(sys.argv[0], run_name="__main__")
print("tiles updated:", counts, flush=True)
if torch.distributed.is_initialized():
    torch.distributed.barrier()
# Without the end of the interpreter, in which some jobs of several ranks abort, stock or not.
os._exit(0)
