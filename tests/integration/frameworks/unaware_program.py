"""A training program that does not know the plugin: ``unaware_program.py FOLDER``, as every rank.

Its config has the plugin's block, as a user's JSON would. Not a test itself.
"""

import json
import os
import sys
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch

# gloo does without it, and building it takes minutes.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
model = torch.nn.Linear(8, 8)
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "deep_optimizer_states": {"enabled": True, "policy": "dynamic"},
    },
)
loss = engine(torch.ones(1, 8, device=engine.device, dtype=torch.bfloat16)).float().sum()
engine.backward(loss)
engine.step()
told = Path(sys.argv[1]) / f"told.{os.environ['RANK']}.json"
told.write_text(json.dumps(type(engine.optimizer).__name__))
engine.destroy()
torch.distributed.barrier()
# Without the end of the interpreter, in which some jobs of several ranks abort, stock or not.
os._exit(0)
