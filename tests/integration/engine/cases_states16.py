"""Master weights, gradients and moments of 16 bits: each combination that stock accepts.

Not a test itself, see ``equality_worker``.
"""

import tempfile

import torch
from equality_cases import ADAM_L2, FP16, Case, two_groups

BF16_MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True}
BF16_ALL = {**BF16_MASTERS, "bf16_optimizer_states": True}
FP16_MASTERS = {**FP16, "fp16_master_weights_and_grads": True}
NARROW_MOMENTS = {"fp32_optimizer_states": False}
ADAMW_NARROW = {"type": "AdamW", "params": NARROW_MOMENTS}


def masters_in_fp16(**config):
    return {"bf16": {"enabled": False}, "fp16": FP16_MASTERS, **config}


def save_and_load_midway(engine, micro_step):
    """Loading leaves moments in the type of the master weights, in stock as well."""
    if micro_step == 6:
        folder = [tempfile.mkdtemp() if engine.global_rank == 0 else None]
        torch.distributed.broadcast_object_list(folder)
        engine.save_checkpoint(folder[0])
        engine.load_checkpoint(folder[0])


CASES = {
    "bf16 states, unused in every other window": Case(
        config={"bf16": BF16_ALL},
        skips=lambda n: (2, 3) if n // 2 % 2 else (),
        states="bf16",
    ),
    "bf16 states, gradients summed in fp32, Adam with L2": Case(
        config={
            "bf16": BF16_MASTERS,
            "data_types": {"grad_accum_dtype": "fp32"},
            "optimizer": {**ADAM_L2, "params": {**ADAM_L2["params"], **NARROW_MOMENTS}},
        },
        groups=two_groups,
        states="bf16",
    ),
    "bf16 masters, fp32 moments, loaded midway": Case(
        config={"bf16": BF16_MASTERS},
        before=save_and_load_midway,
        states="bf16 (moments fp32)",
        policies=("stride 2", "dynamic"),
    ),
    "fp16 states, overflows": Case(
        dtype=torch.float16,
        config=masters_in_fp16(optimizer=ADAMW_NARROW),
        steps=12,
        states="fp16",
        policies=("stride 2", "ratio 0.5"),
    ),
    "fp16 masters, fp32 moments, loaded before a step": Case(
        dtype=torch.float16,
        config=masters_in_fp16(),
        before=save_and_load_midway,
        steps=12,
        states="fp16 (moments fp32)",
        policies=("dynamic",),
    ),
    "bf16 masters of fp32 weights": Case(
        dtype=torch.float32,
        config={"bf16": {**BF16_ALL, "enabled": False}},
        states="bf16",
        policies=("stride 2",),
    ),
    "fp16 masters of bf16 weights": Case(
        config={"fp16": {"enabled": False, "fp16_master_weights_and_grads": True}},
        states="fp16 (moments fp32)",
        policies=("ratio 0.5",),
    ),
}
