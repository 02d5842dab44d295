"""Train under a framework, stock and with each policy, as every rank of a job; not a test itself.

``worker.py FRAMEWORK OUT FOLDER`` writes what differs from stock to ``OUT.RANK.json``, and
``worker.py presets OUT FOLDER`` what became of each preset.
"""

import importlib
import json
import os
import sys
from pathlib import Path

import comparison
import deepspeed.ops
import torch

import deep_optimizer_states


def main():
    framework, out, folder = sys.argv[1], *map(Path, sys.argv[2:])
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo does without
    deep_optimizer_states.install()
    if framework == "presets":
        report = importlib.import_module("preset_outcomes").outcomes()
    else:
        run = importlib.import_module(f"by_{framework}").run
        report = comparison.compare(run, folder)
    out.with_suffix(f".{os.environ['RANK']}.json").write_text(json.dumps(report, indent=1))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    # Without the end of the interpreter, in which some jobs of several ranks abort, stock or not.
    os._exit(0)


if __name__ == "__main__":
    main()
