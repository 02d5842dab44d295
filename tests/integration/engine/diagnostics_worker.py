"""Train while what the plugin writes cannot be written; write warnings and weights as JSON.

Run as the only rank: ``diagnostics_worker.py OUT.json``. Not a test itself.
"""

import json
import logging
import os
import shutil
import sys
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
from deepspeed.utils import safe_get_full_fp32_param

sys.path.insert(0, str(Path(__file__).parent))
from refusals_worker import BLOCK, make_engine, step

import deep_optimizer_states
from deep_optimizer_states.core.kernels import host


class Warnings(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def train(timeline="", after_two=lambda: None):
    """Four steps; the master weights after them, and what was warned of."""
    handler, logger = Warnings(), logging.getLogger("deep_optimizer_states")
    logger.addHandler(handler)
    torch.manual_seed(3)
    engine = make_engine(deep_optimizer_states={**BLOCK, "timeline": str(timeline)})
    for number in range(4):
        step(engine)
        if number == 1:
            after_two()
    parameters = engine.module.parameters()
    weights = [safe_get_full_fp32_param(parameter).flatten().tolist() for parameter in parameters]
    engine.destroy()
    logger.removeHandler(handler)
    return {"weights": weights, "warnings": handler.texts}


def train_with_a_folder_that_vanishes(folder):
    return train(folder, lambda: shutil.rmtree(folder))


def train_on_a_full_disk(folder):
    folder.mkdir()
    (folder / "rank-0.jsonl").symlink_to("/dev/full")
    return train(folder)


def train_where_nothing_can_be_built(parent):
    host._load.cache_clear()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(parent)
    return train()


def main():
    out = Path(sys.argv[1])
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    deep_optimizer_states.install()
    file = out.parent / "file"
    file.touch()
    report = {
        "none": train(),
        "vanished": train_with_a_folder_that_vanishes(out.parent / "vanishing"),
        "full": train_on_a_full_disk(out.parent / "full"),
        "never there": train(file / "folder"),
        "no kernel": train_where_nothing_can_be_built(file / "extensions"),  # last: it stays so
    }
    out.write_text(json.dumps(report))
    torch.distributed.destroy_process_group()
    os._exit(0)  # see equality_worker.leave


if __name__ == "__main__":
    main()
