"""ZeRO-1 and ZeRO-2 with the optimizer offloaded. Not a test itself, see ``equality_cases``."""

import torch
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad, safe_update_full_grad_vectorized
from equality_cases import (
    FP16,
    WIDTH,
    Case,
    Net,
    freeze_midway,
    frozen_net,
    offload_midway,
    read_state_between,
    set_weights_midway,
    throw_away_midway,
    two_groups,
)

POLICIES = ("all-host", "stride 1", "stride 2", "stride 3", "all-device", "dynamic")
"""What has a meaning where the state of a parameter group is one tensor."""
FP32 = {"bf16": {"enabled": False}}
SUM_IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
MIXED = {9: (2,), 10: (2,), 15: (2,), 17: (4,)}


def tiny_net():
    """Fewer elements than two ranks could share without padding; sizes that nothing divides."""
    model = Net()
    model.layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    model.scale = torch.nn.Parameter(torch.ones(5))
    return model


def look_at_gradients(engine, micro_step):
    """As a user does between steps: after an update they are scaled, old ones several times."""
    if micro_step in (4, 5, 8):
        found = [safe_get_full_grad(parameter) for parameter in engine.module.parameters()]
        total = sum(gradient.double().sum().item() for gradient in found if gradient is not None)
        engine.seen = [*getattr(engine, "seen", []), total]


def change_gradients(engine, micro_step):
    """Of a parameter that takes no part: the next update goes by what was written."""
    weight = engine.module.layers[2].weight
    if micro_step == 4:
        safe_set_full_grad(weight, torch.full_like(weight, 0.01, dtype=torch.float32))
    if micro_step == 8:
        safe_update_full_grad_vectorized([weight], lambda gradient, _: gradient * 0.5)


def of_stage(stage, **given):
    zero = {"stage": stage, **given.pop("zero", {})}
    return Case(**{"zero": zero, "policies": POLICIES, "few": 1, **given})


def of_fp16(stage, **given):
    config = {"bf16": {"enabled": False}, "fp16": FP16}
    return of_stage(stage, dtype=torch.float16, config=config, steps=12, **given)


SETTINGS = {
    "bf16, clipping, accumulation 2": {"few": 2},
    "bf16, gradients summed in fp32": {"config": SUM_IN_FP32},
    "fp32": {"dtype": torch.float32, "config": FP32},
    "no clipping, accumulation 1": {"accumulation": 1, "config": {"gradient_clipping": 0.0}},
    "two parameter groups, own betas": {"groups": two_groups},
    "DeepSpeedCPUAdam passed in": {"own_optimizer": True},
    "all-reduce instead of reduce-scatter": {"zero": {"reduce_scatter": False}},
    "contiguous_gradients off": {"zero": {"contiguous_gradients": False}},
    "overlap_comm": {"zero": {"overlap_comm": True}},
    "round_robin_gradients": {"zero": {"round_robin_gradients": True}},
    "sizes that nothing divides": {"make": tiny_net, "zero": {"sub_group_size": 300}},
    "buckets smaller than a gradient": {"zero": {"reduce_bucket_size": 500}},
    "one subgroup": {"zero": {"sub_group_size": 1_000_000}, "is_cut": False},
    "frozen parameters": {"make": frozen_net},
    "parameters frozen midway": {"before": freeze_midway},
    "unused in every other window": {"skips": lambda n: (2, 3) if n // 2 % 2 else ()},
    "never used": {"skips": lambda n: (2,)},
    "used early in a window alone": {
        "skips": lambda n: {3: (2,), 4: (2,), 7: (2,), 1: (4,), 8: (2, 4), 9: (2, 4)}.get(n, ())
    },
    "windows thrown away by zero_grad()": {
        "before": throw_away_midway,
        "skips": lambda n: (2,) if n in (5, 9) else (),
    },
    "windows that the caller ends": {
        "config": {"managed_gradient_accumulation": False},
        "skips": lambda n: {3: (2,), 4: (2,), 7: (4,)}.get(n, ()),
    },
    "gradients looked at": {
        "before": look_at_gradients,
        "skips": lambda n: (2, 3) if n // 2 % 2 else (),
    },
    "gradients changed": {
        "before": change_gradients,
        "skips": lambda n: (2,) if n >= 4 else (),
    },
    # Stock of 0.19.5 locks pages for it, which it cannot on a CPU.
    "offload_states and back": {"before": offload_midway, "since": "0.19.6"},
    "safe_get_* between steps": {"before": read_state_between},
    "safe_set_full_fp32_param": {"before": set_weights_midway},
}
OTHERWISE_AT_STAGE_1 = (
    *("bf16, clipping, accumulation 2", "bf16, gradients summed in fp32", "fp32"),
    *("two parameter groups, own betas", "contiguous_gradients off", "overlap_comm"),
    *("frozen parameters", "unused in every other window", "used early in a window alone"),
    *("windows that the caller ends", "gradients looked at"),
)
"""Where stock's backward goes another way than at stage 2: it reduces at the end of a window."""
CASES = {
    f"ZeRO-{stage}: {name}": of_stage(stage, **given)
    for stage in (2, 1)
    for name, given in SETTINGS.items()
    if stage == 2 or name in OTHERWISE_AT_STAGE_1
}
for number in (2, 1):
    CASES[f"ZeRO-{number}: fp16, dynamic scale, overflows"] = of_fp16(number)
    # After a window without overflow: an older gradient that overflowed makes stock's weights NaN.
    CASES[f"ZeRO-{number}: unused in windows that overflow"] = of_fp16(
        number, skips=lambda n: (2, 3) if n >= 8 and n // 2 % 2 == 0 else ()
    )
CASES["ZeRO-2: used early alone, fp16, overflows"] = of_fp16(2, skips=lambda n: MIXED.get(n, ()))
