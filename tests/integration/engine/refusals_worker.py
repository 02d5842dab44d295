"""Ask for what the engine does not do; write the answers, and what is left behind, as JSON.

Run as the only rank: ``refusals_worker.py OUT.json``. Not a test itself.
"""

import gc
import json
import math
import os
import sys
import threading
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
from late import late

import deep_optimizer_states
from deep_optimizer_states.adapter import homes, steppers
from deep_optimizer_states.core.device.base import Wait
from deep_optimizer_states.core.device.emulated import EmulatedDevice, Faults
from deep_optimizer_states.core.kernels.host import HostAdam
from deep_optimizer_states.core.timeline import read_rows
from deep_optimizer_states.errors import UpdateError

BLOCK = {"enabled": True, "policy": "stride", "stride": 2}


def make_engine(width=8, model=None, **changes):
    model = model or torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
    config = {
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "sub_group_size": 70 if width == 8 else 300_000,
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


def step(engine, width=8):
    loss = engine(torch.ones(1, width, device=engine.device, dtype=torch.bfloat16)).float().sum()
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
    """Fails when its steps are used up."""

    steps_left = math.inf

    def step(self, *args, **kwargs):
        FailingAdam.steps_left -= 1
        if FailingAdam.steps_left < 0:
            raise RuntimeError("the CPU lane is out of luck")
        super().step(*args, **kwargs)


def failure_in_a_lane():
    steppers.HostAdam = FailingAdam
    engine = make_engine(deep_optimizer_states={**BLOCK, "verify_every": 0})
    steppers.HostAdam = HostAdam
    FailingAdam.steps_left = 4
    try:
        return answer(lambda: [step(engine) for _ in range(4)])
    finally:
        answer(engine.destroy)


def tensor_bytes():
    """Bytes of all storages that live tensors of this process use."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) is torch.Tensor]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def host_bytes(block):
    """What optimizer state and gradients take beside the weights, in bytes a parameter."""
    before = tensor_bytes()
    engine = make_engine(width=512, deep_optimizer_states=block)
    try:
        step(engine, 512)
        numel = sum(parameter.ds_numel for parameter in engine.module.parameters())
        optimizer = engine.optimizer
        homes = [optimizer.grad_partitions_flat_buffer]
        for master in optimizer.fp32_partitioned_groups_flat:
            state = optimizer.optimizer.state[master]
            homes += [master, state["exp_avg"], state["exp_avg_sq"], master.grad]
        state_bytes = sum(h.untyped_storage().nbytes() for h in homes if h is not None)
        return {"state": state_bytes / numel, "all": (tensor_bytes() - before) / numel}
    finally:
        engine.destroy()


def locks_pages(**offload):
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", **offload}}
    engine = make_engine(zero_optimization=zero)
    try:
        return engine.optimizer._lanes.locks_pages
    finally:
        engine.destroy()


def with_little_memory(**block):
    """What an engine says on a machine that shows 1 KiB of free memory."""
    real, homes.free_host_bytes = homes.free_host_bytes, lambda: 1024
    try:
        return answer(lambda: make_engine(deep_optimizer_states=BLOCK | block).destroy())
    finally:
        homes.free_host_bytes = real


def where_affinity_is_forbidden():
    def forbid(pid, cores):
        raise PermissionError(1, "Operation not permitted")

    real, os.sched_setaffinity = os.sched_setaffinity, forbid
    try:
        return answer(lambda: make_engine().destroy())
    finally:
        os.sched_setaffinity = real


def muon():
    model = torch.nn.Linear(8, 8)
    for parameter in model.parameters():
        parameter.use_muon = parameter.ndim > 1
    return make_engine(model=model, optimizer={"type": "Muon", "params": {"lr": 1e-3}})


def timeline(folder):
    """Lanes that had work in the second of three updates, and what was said of it."""
    engine = make_engine(deep_optimizer_states={**BLOCK, "timeline": str(folder)})
    for _ in range(3):
        step(engine)
    engine.destroy()
    rows = [row for row in read_rows(folder / "rank-0.jsonl") if row["update"] == 2]
    return {
        "lanes": sorted({row["lane"] for row in rows if "lane" in row}),
        "updates": [row for row in rows if "busy_s" in row],
    }


def device_with_other_bits(block, grad_dtype):
    """Nor does it close well, which must not hide why it was refused."""
    honest, close = EmulatedDevice.adam, EmulatedDevice.close

    def adam(self, tensors, scalars, tail):
        honest(self, tensors, scalars, 0 if tensors.grad.dtype == grad_dtype else tail)

    def close_badly(self):
        close(self)
        raise UpdateError("waited for lane H2D")

    EmulatedDevice.adam, EmulatedDevice.close = adam, close_badly
    try:
        return answer(lambda: make_engine(deep_optimizer_states=block))
    finally:
        EmulatedDevice.adam, EmulatedDevice.close = honest, close


class HeldAdam(HostAdam):
    """Steps tiles of weights only when told to; those of biases at once."""

    told = threading.Event()

    def step(self, tensors, *args):
        if tensors.numel > 16:
            self.told.wait()
        super().step(tensors, *args)


def update_that_goes_wrong(verify_every, without=Wait.PREFETCHED, lane="H2D"):
    """Slots are stepped before they are filled, say."""
    with late(lane):
        steppers.faults_for_tests = Faults(without=frozenset({without}))
        engine = make_engine(deep_optimizer_states={**BLOCK, "verify_every": verify_every})
        steppers.faults_for_tests = None
        try:
            return answer(lambda: [step(engine) for _ in range(2)])
        finally:
            answer(engine.destroy)


def returns_before_the_weights_are_updated():
    """Whether ``step()`` waits for nothing but biases, which persist, between all weights."""
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    steppers.HostAdam = HeldAdam
    engine = make_engine(
        deep_optimizer_states={"enabled": True, "policy": "all-host", "verify_every": 0},
        zero_optimization={**zero, "stage3_param_persistence_threshold": 10},
    )
    steppers.HostAdam = HostAdam
    try:
        returned = []
        for _ in range(2):
            HeldAdam.told.clear()
            step(engine)
            returned.append(engine.optimizer.background.is_running)
            HeldAdam.told.set()
            engine.optimizer.background.wait()  # or it is held again by the next turn
        return returned
    finally:
        engine.destroy()


def set_gradient():
    engine = make_engine()
    try:
        step(engine)
        weight = engine.module[1].weight
        return answer(lambda: safe_set_full_grad(weight, torch.zeros(8, 8)))
    finally:
        engine.destroy()


def get_gradient_early(block, **changes):
    """Asked in the middle of an accumulation window, and at its end."""
    torch.manual_seed(4)
    sizes = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1}
    engine = make_engine(**sizes, **changes, deep_optimizer_states=block)
    weight, found = engine.module[1].weight, []

    def backward():
        loss = engine(torch.ones(1, 8, dtype=torch.bfloat16)).float().sum()
        engine.backward(loss)
        found.append(answer(lambda: found.append(safe_get_full_grad(weight).tolist())))

    try:
        for _ in range(3):
            backward()
            if engine.managed_gradient_accumulation():
                engine.step()
            backward()
            engine.step()
        return found
    finally:
        engine.destroy()


def hook_on_the_optimizer():
    engine = make_engine()
    try:
        step(engine)
        engine.basic_optimizer.register_step_post_hook(lambda *_: None)
        return answer(lambda: step(engine))
    finally:
        answer(engine.destroy)


def main():
    out = Path(sys.argv[1])
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    deep_optimizer_states.install()
    autocast = {"enabled": True, "dtype": "float16"}
    report = {
        "returns": returns_before_the_weights_are_updated(),
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
        "Muon": answer(muon),
        "locks pages": [locks_pages(), locks_pages(pin_memory=True), locks_pages(pin_memory=False)],
        "host bytes": host_bytes({"enabled": True, "policy": "all-host"}),
        "stock's host bytes": host_bytes({"enabled": False}),
        "other bits": device_with_other_bits(BLOCK, torch.bfloat16),
        "other bits, fp32": device_with_other_bits(
            {"enabled": True, "policy": "ratio", "ratio": 0.5}, torch.float32
        ),
        "wrong update": update_that_goes_wrong(1000),
        "late gradients": update_that_goes_wrong(1, Wait.GRADS_FLUSHED, "grads"),
        "wrong update, not verified": update_that_goes_wrong(0),
        "timeline": timeline(out.parent / "timeline"),
        "little memory": with_little_memory(),
        "more than it shows": with_little_memory(host_memory_bytes=2**20),
        "less than it shows": answer(
            lambda: make_engine(deep_optimizer_states=BLOCK | {"host_memory_bytes": 100})
        ),
        "affinity": where_affinity_is_forbidden(),
        "deepcompile": answer(lambda: make_engine(compile={"deepcompile": True})),
        "unknown key": answer(
            lambda: make_engine(deep_optimizer_states={"enabled": True, "strde": 2})
        ),
        "prefetching, windows of the caller's": answer(
            lambda: make_engine(
                managed_gradient_accumulation=False,
                deep_optimizer_states=BLOCK | {"prefetch_memory_bytes": "auto"},
            )
        ),
        "gradient": set_gradient(),
        "early gradients": {
            "ours": get_gradient_early(BLOCK),
            "stock": get_gradient_early({"enabled": False}),
            "windows of the caller's": get_gradient_early(
                BLOCK, managed_gradient_accumulation=False
            ),
        },
        "hook": hook_on_the_optimizer(),
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
