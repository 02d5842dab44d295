"""Train by the lines of the package's README, with and without the plugin: the same bits.

``nox -s wheel`` runs it where only the wheel and its dependencies are. Not a test itself.
"""

import json
import os
import re
from importlib import metadata
from pathlib import Path

import deepspeed.ops
import torch

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "src" / "deep_optimizer_states" / "README.md").read_text()
CODE, BLOCK = (re.search(rf"```{kind}\n(.*?)```", README, re.S)[1] for kind in ("python", "json"))
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
BASE = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


def train(enabled):
    """Return the optimizer's class, and every loss, norm and weight."""
    ds_config = BASE | json.loads(f"{{{BLOCK}}}")
    ds_config["zero_optimization"]["sub_group_size"] = 5000
    ds_config["deep_optimizer_states"]["enabled"] = enabled
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    namespace = {"model": model, "ds_config": ds_config}
    exec(CODE, namespace)
    engine, found = namespace["engine"], []
    for _ in range(5):
        x = torch.randn(1, 64, device=engine.device, dtype=torch.bfloat16)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        found += [loss.item(), float(engine.get_global_grad_norm())]
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        found += [parameter.tolist() for parameter in model.parameters()]
    name = type(engine.optimizer).__name__
    engine.destroy()
    return name, found


os.environ |= RANK | {"MASTER_PORT": os.environ.get("MASTER_PORT", "29563")}
# gloo does without it, and building it takes minutes.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
(stock, expected), (ours, found) = train(False), train(True)
assert (stock, ours) == ("DeepSpeedZeroOptimizer_Stage3", "InterleavedZeroOptimizer")
assert found == expected
versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "deepspeed"))
origin = Path(metadata.distribution("deep-optimizer-states").locate_file("deep_optimizer_states"))
assert not origin.is_relative_to(ROOT / "src")
print(f"{versions}: 5 losses, 5 norms and {len(found) - 10} parameters equal", flush=True)
os._exit(0)  # without the end of the interpreter, in which some jobs abort, stock or not
