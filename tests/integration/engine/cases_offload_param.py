"""ZeRO-3 whose 16-bit weights live in host memory as well: ``offload_param`` and ``zero.Init``.

Not a test itself, see ``equality_worker``. The CPU writes such weights where they are, and the
device sends its own back.
"""

import functools

import deepspeed
import torch
from equality_cases import FP16, Case, Net, ds_config, evaluate_between, two_groups

CPU = {"offload_param": {"device": "cpu"}}
PAGEABLE = {"offload_param": {"device": "cpu", "pin_memory": False}}
NOTHING_LIVE = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
ONE_OF_EACH = dict.fromkeys([*NOTHING_LIVE, "stage3_param_persistence_threshold"], 1)
EVERYTHING_LIVE = dict.fromkeys(ONE_OF_EACH, 10**9)


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
    "offload_param, pageable": Case(zero=PAGEABLE, accumulation=1),
    "offload_param, fp16, overflows": Case(
        dtype=torch.float16,
        config={"bf16": {"enabled": False}, "fp16": FP16},
        zero=CPU,
        steps=12,
    ),
    "offload_param, fp32": Case(dtype=torch.float32, config={"bf16": {"enabled": False}}, zero=CPU),
    "offload_param, gradients summed in fp32": Case(
        config={"data_types": {"grad_accum_dtype": "fp32"}}, zero=CPU
    ),
    "offload_param, two parameter groups": Case(groups=two_groups, zero=CPU),
    "offload_param, unused in every other window": Case(
        skips=lambda n: (2, 3) if n // 2 % 2 else (), zero=CPU
    ),
    "offload_param, zero.Init": Case(
        make=functools.partial(init_by_config, CPU), zero=CPU, accumulation=1
    ),
    "offload_param, zero.Init(remote_device)": Case(
        make=functools.partial(
            net_in_zero_init, remote_device="cpu", pin_memory=True, dtype=torch.bfloat16
        ),
        zero=CPU,
    ),
    "offload_param, nothing live": Case(zero=CPU | NOTHING_LIVE),
    "offload_param, one of each live": Case(zero=CPU | ONE_OF_EACH),
    "offload_param, all live and persistent": Case(zero=CPU | EVERYTHING_LIVE),
    "offload_param, nothing persistent": Case(
        zero=CPU | {"stage3_param_persistence_threshold": 0}, before=evaluate_between
    ),
    "offload_param, weights set by hand": Case(zero=CPU, before=gather_and_change_midway),
}
