"""ZeRO-3 whose 16-bit weights live in host memory as well: ``offload_param`` and ``zero.Init``.

Not a test itself, see ``equality_worker``. The CPU writes such weights where they are, and the
device sends its own back.
"""

import functools

import deepspeed
import torch
from equality_cases import (
    FP16,
    Case,
    Net,
    ds_config,
    evaluate_between,
    frozen_net,
    two_groups,
)

CPU = {"offload_param": {"device": "cpu"}}
PAGEABLE = {"offload_param": {"device": "cpu", "pin_memory": False}}
LIMITS = (
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
)


def net_in_zero_init(**of_init):
    """A model whose parameters are partitioned as they are made."""
    with deepspeed.zero.Init(**of_init):
        return Net()


def init_by_config(zero):
    config = ds_config(Case(zero=zero), None)
    return net_in_zero_init(config_dict_or_path=config)


def gather_and_change_midway(engine, micro_step):
    """As a user sets weights by hand; stock writes them to their home, and not to the masters."""
    weight = engine.module.layers[3].weight
    if micro_step in (4, 6):
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            weight.data.mul_(0.5)


CASES = {
    "offload_param": Case(zero=CPU),
    "offload_param, fp16, overflows": Case(
        dtype=torch.float16,
        config={"bf16": {"enabled": False}, "fp16": FP16},
        zero=CPU,
        steps=12,
    ),
    "offload_param, fp32": Case(dtype=torch.float32, config={"bf16": {"enabled": False}}, zero=CPU),
    # Each group has host memory of its own.
    "offload_param, two groups, frozen parameters": Case(
        make=frozen_net, groups=two_groups, zero=CPU
    ),
    "offload_param, unused in every other window": Case(
        skips=lambda n: (2, 3) if n // 2 % 2 else (), zero=CPU
    ),
    "offload_param, pageable, zero.Init": Case(
        make=functools.partial(init_by_config, PAGEABLE), zero=PAGEABLE, accumulation=1
    ),
    "offload_param, zero.Init(remote_device)": Case(
        make=functools.partial(
            net_in_zero_init, remote_device="cpu", pin_memory=True, dtype=torch.bfloat16
        ),
        zero=CPU,
    ),
    "offload_param, nothing live or persistent": Case(
        zero=CPU | dict.fromkeys(LIMITS, 0), before=evaluate_between
    ),
    "offload_param, limits of 1": Case(zero=CPU | dict.fromkeys(LIMITS, 1)),
    "offload_param, all live and persistent": Case(zero=CPU | dict.fromkeys(LIMITS, 10**9)),
    "offload_param, weights set by hand": Case(zero=CPU, before=gather_and_change_midway),
}
