"""Ask for what the engine does not do; write the answers, and what is left behind, as JSON.

Run as the only rank: ``refusals_worker.py OUT.json``. Not a test itself.
"""

import json
import os
import sys
import threading
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
from deepspeed.utils import safe_set_full_grad

import deep_optimizer_states
from deep_optimizer_states import zero3
from deep_optimizer_states.kernels.host import HostAdam

BLOCK = {"enabled": True, "policy": "stride", "stride": 2}


def make_engine(**changes):
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    config = {
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "sub_group_size": 70,
            "reduce_bucket_size": 1000,
        },
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "deep_optimizer_states": BLOCK,
    } | changes
    kwargs = {"optimizer": config.pop("own")(model.parameters())} if "own" in config else {}
    return deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, **kwargs
    )[0]


def step(engine):
    loss = engine(torch.ones(1, 8, device=engine.device, dtype=torch.bfloat16)).float().sum()
    engine.backward(loss)
    engine.step()


def answer(action):
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the answer is what it says
        return f"{type(error).__name__}: {error}"
    return "no error"


def lanes():
    return sorted(
        t.name for t in threading.enumerate() if t.name.startswith("deep_optimizer_states")
    )


class FailingAdam(HostAdam):
    """Fails in its second step."""

    steps = 0

    def step(self, *args, **kwargs):
        FailingAdam.steps += 1
        if FailingAdam.steps > 4:
            raise RuntimeError("the CPU lane is out of luck")
        super().step(*args, **kwargs)


def failure_in_a_lane():
    zero3.HostAdam = FailingAdam
    engine = make_engine()
    zero3.HostAdam = HostAdam
    try:
        return answer(lambda: [step(engine) for _ in range(4)])
    finally:
        answer(engine.destroy)


def set_gradient():
    engine = make_engine()
    try:
        step(engine)
        weight = engine.module[1].weight
        return answer(lambda: safe_set_full_grad(weight, torch.zeros(8, 8)))
    finally:
        engine.destroy()


def main():
    out = Path(sys.argv[1])
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    deep_optimizer_states.install()
    autocast = {"enabled": True, "dtype": "float16"}
    report = {
        "torch AdamW": answer(
            lambda: make_engine(
                own=torch.optim.AdamW,
                zero_allow_untested_optimizer=True,
                zero_force_ds_cpu_optimizer=False,
            )
        ),
        "SGD": answer(
            lambda: make_engine(
                own=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                zero_allow_untested_optimizer=True,
                zero_force_ds_cpu_optimizer=False,
            )
        ),
        "deepcompile": answer(lambda: make_engine(compile={"deepcompile": True})),
        "unknown key": answer(
            lambda: make_engine(deep_optimizer_states={"enabled": True, "strde": 2})
        ),
        "gradient": set_gradient(),
        "lane": failure_in_a_lane(),
        # Last: DeepSpeed keeps autocast switched on for the rest of the process.
        "autocast fp16": answer(
            lambda: make_engine(bf16={"enabled": False}, torch_autocast=autocast)
        ),
        "lanes left": lanes(),
    }
    out.write_text(json.dumps(report))
    torch.distributed.destroy_process_group()
    os._exit(0)  # see equality_worker.leave


if __name__ == "__main__":
    main()
