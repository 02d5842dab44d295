"""One training step of stock DeepSpeed, and then of the installed plugin. Not a test itself.

The last line that it writes is JSON: where the plugin lies, which folders of the checkout can be
imported, and for stock and each policy the optimizer's module, the loss, and the SHA-256 of master
weights, moments and 16-bit weights.
"""

import hashlib
import importlib.util
import json
import os

import deepspeed
import torch

import deep_optimizer_states

CHECKOUT = ("launch", "configs", "parse", "plots", "dataset", "benchmarks")
POLICIES = ("all-host", "stride")


def train_once(policy):
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(48, 48) for _ in range(4)))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "train_batch_size": 4,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "sub_group_size": 2000,
            "reduce_bucket_size": 5000,
        },
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    if policy:
        block = {"enabled": True, "policy": policy, "tile_numel": 512}
        config["deep_optimizer_states"] = block
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    loss = engine(torch.randn(4, 48, dtype=torch.bfloat16)).square().mean()
    engine.backward(loss)
    engine.step()
    optimizer = type(engine.optimizer).__module__
    return {"optimizer": optimizer, "loss": loss.item(), "state": state_sha256(engine.optimizer)}


def state_sha256(optimizer):
    digest = hashlib.sha256()
    for idx, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        state = optimizer.optimizer.state[master]
        tensors = [master.data, state["exp_avg"], state["exp_avg_sq"]]
        for tensor in [*tensors, optimizer.fp16_partitioned_groups_flat[idx]]:
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main():
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    report = {
        "plugin": deep_optimizer_states.__file__,
        "checkout": [name for name in CHECKOUT if importlib.util.find_spec(name)],
        "stock": train_once(""),
    }
    deep_optimizer_states.install()
    report |= {policy: train_once(policy) for policy in POLICIES}
    print(json.dumps(report), flush=True)
    os._exit(0)  # gloo now and then aborts while the interpreter is torn down


main()
