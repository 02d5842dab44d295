"""Models and settings under which every policy must equal stock; the first family is ZeRO-3's.

Not a test itself, see ``equality_worker``.
"""

import dataclasses
import functools
import importlib
import os

import deepspeed
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)
from packaging.version import Version
from torch.utils.checkpoint import checkpoint

WIDTH = 37
STEPS = 5


class Net(torch.nn.Module):
    """Residual layers; some may be skipped, frozen, used again or recomputed.

    Args:
        reentrant: How each segment is recomputed in backward; None for not at all.
        segments: The layers of each, in order; None for every layer by itself.
    """

    def __init__(self, reentrant=None, segments=None):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.skipped = ()
        self.reentrant = reentrant
        self.segments = segments

    def forward(self, x):
        for segment in self.segments or [(idx,) for idx in range(len(self.layers))]:
            x = self._run_or_checkpoint([idx for idx in segment if idx not in self.skipped], x)
        return x

    def _run_or_checkpoint(self, segment, x):
        if self.reentrant is None or not segment:
            return self._run(segment, x)
        x = x if x.requires_grad else x.requires_grad_()  # or reentrant backward has no root
        return checkpoint(self._run, segment, x, use_reentrant=self.reentrant)

    def _run(self, segment, x):
        for idx in segment:
            x = torch.tanh(self.layers[idx](x)) + x
        return x


def mean_square(engine, batch):
    x, y = batch
    return ((engine(x) - y).float() ** 2).mean()


@dataclasses.dataclass(frozen=True)
class Case:
    """One feature under which a policy must equal stock.

    Attributes:
        config, zero: Laid over DeepSpeed's JSON, and over its ``zero_optimization``.
        make: Builds the model.
        groups: Makes parameter groups of a model; None for one group.
        batch: Draws a batch of ``dtype`` for one micro-step, on the host.
        loss: Of an engine and a batch on its device.
        skips: Maps a micro-step to the layers left out of it.
        before: Called with the engine before each micro-step.
        own_optimizer: Whether DeepSpeed is given a ``DeepSpeedCPUAdam``.
        most_ranks: On more of them stock itself fails.
        policies: What alone it is run under; empty for all.
        few: How many of ``policies``, by turns, where not all is run; 0 for all of them.
        is_cut: Whether the state must be in three subgroups at least.
        states: Type of master weights and moments.
        since: The first DeepSpeed release that has the feature; empty for every supported one.
    """

    dtype: torch.dtype = torch.bfloat16
    accumulation: int = 2
    config: dict = dataclasses.field(default_factory=dict)
    zero: dict = dataclasses.field(default_factory=dict)
    make: callable = Net
    groups: callable = None
    batch: callable = lambda generator: [torch.randn(4, WIDTH, generator=generator) for _ in "xy"]
    loss: callable = mean_square
    skips: callable = lambda micro_step: ()
    before: callable = lambda engine, micro_step: None
    own_optimizer: bool = False
    steps: int = STEPS
    most_ranks: int = 4
    policies: tuple = ()
    few: int = 0
    is_cut: bool = True
    states: str = "fp32"
    since: str = ""

    @property
    def is_in_this_release(self):
        """Whether the installed DeepSpeed has the feature."""
        return not self.since or Version(deepspeed.__version__) >= Version(self.since)


def two_groups(model):
    return [
        {"params": list(model.layers[:3].parameters()), "lr": 3e-3, "weight_decay": 0.0},
        {
            "params": list(model.layers[3:].parameters()),
            "lr": 1e-2,
            "weight_decay": 0.2,
            "betas": (0.8, 0.99),
        },
    ]


def frozen_net():
    model = Net()
    model.layers[1].weight.requires_grad_(False)
    model.layers[4].bias.requires_grad_(False)
    return model


def net_in_zero_init():
    with deepspeed.zero.Init(config_dict_or_path=ds_config(Case(), None)):
        return Net()


def evaluate_between(engine, micro_step):
    engine.eval()
    with torch.no_grad():
        engine(torch.ones(4, WIDTH, device=engine.device, dtype=torch.bfloat16))
    engine.train()


def freeze_midway(engine, micro_step):
    if micro_step == 4:
        engine.module.layers[2].weight.requires_grad_(False)


def read_state_between(engine, micro_step):
    for parameter in engine.module.parameters():
        safe_get_full_fp32_param(parameter)
        if micro_step >= 2:  # stock has no moments before its first step
            safe_get_full_optimizer_state(parameter, "exp_avg")


def save_16bit_between(engine, micro_step):
    """Weights as a user saves them, right after a step; losses alone would not show them."""
    if micro_step % 2 == 0:
        weights = engine._zero3_consolidated_16bit_state_dict()
        if engine.global_rank == 0:
            total = sum(tensor.double().sum().item() for tensor in weights.values())
            engine.seen = [*getattr(engine, "seen", []), total]


def offload_midway(engine, micro_step):
    if micro_step == 4:
        engine.offload_states(include=[OffloadStateTypeEnum.lp_params])
        engine.reload_states()


def throw_away_midway(engine, micro_step):
    """A bad batch: what its window has gathered so far is thrown away."""
    if micro_step in (5, 9):
        engine.optimizer.zero_grad()


def set_weights_midway(engine, micro_step):
    if micro_step == 4:
        weight = engine.module.layers[3].weight
        safe_set_full_fp32_param(weight, safe_get_full_fp32_param(weight) * 0.5)


THRICE = ((0,), (1,), (2,), (1,), (3,), (1, 4), (5,))
"""Segments that use layer 1 in three of them, as a model does that shares its layers."""
# Stock fails where two gradients of a parameter meet in one bucket.
ONE_LAYER_A_BUCKET = {"reduce_bucket_size": 1500}
FIRST_CASE = "bf16, clipping, accumulation 2"
FP16 = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1}
ADAM_L2 = {"type": "Adam", "params": {"adam_w_mode": False}}
SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": {"total_num_steps": 6, "warmup_num_steps": 3, "warmup_max_lr": 1e-2},
}
ZERO_3 = {
    "bf16, clipping, accumulation 2": Case(),
    "bf16, gradients summed in fp32": Case(config={"data_types": {"grad_accum_dtype": "fp32"}}),
    "fp32": Case(dtype=torch.float32, config={"bf16": {"enabled": False}}),
    "fp16, dynamic scale, overflows": Case(
        dtype=torch.float16, config={"bf16": {"enabled": False}, "fp16": FP16}, steps=12
    ),
    "fp16, unused after an overflow": Case(
        dtype=torch.float16,
        config={"bf16": {"enabled": False}, "fp16": FP16},
        skips=lambda n: (2, 3) if n // 2 % 2 else (),
        steps=12,
    ),
    "no clipping, accumulation 1": Case(accumulation=1, config={"gradient_clipping": 0.0}),
    "Adam with L2": Case(config={"optimizer": ADAM_L2}),
    "two parameter groups, own betas": Case(groups=two_groups),
    "learning-rate scheduler": Case(config={"scheduler": SCHEDULER}),
    "DeepSpeedCPUAdam passed in": Case(own_optimizer=True),
    "all-reduce instead of reduce-scatter": Case(zero={"reduce_scatter": False}),
    "contiguous_gradients off": Case(zero={"contiguous_gradients": False}),
    "overlap_comm": Case(zero={"overlap_comm": True}),
    "one subgroup": Case(zero={"sub_group_size": 1_000_000}, is_cut=False),
    "checkpointing": Case(make=functools.partial(Net, reentrant=False)),
    "checkpointing, reentrant": Case(make=functools.partial(Net, reentrant=True)),
    "checkpointing, reentrant, a layer thrice": Case(
        make=functools.partial(Net, reentrant=True, segments=THRICE), zero=ONE_LAYER_A_BUCKET
    ),
    "zero.Init": Case(make=net_in_zero_init),
    "frozen parameters": Case(make=frozen_net),
    "parameters frozen midway": Case(before=freeze_midway),
    "unused in every other window": Case(skips=lambda n: (2, 3) if n // 2 % 2 else ()),
    "first used late in a window": Case(skips=lambda n: (2,) if n == 0 else ()),
    "never used": Case(skips=lambda n: (2,)),
    # Micro-steps 1, 3, 5, ... end a window. Layer 2 is dropped twice and comes late after it once;
    # layer 4 is dropped before it was ever part of an update.
    "used early in a window alone": Case(
        skips=lambda n: {3: (2,), 4: (2,), 7: (2,), 1: (4,), 8: (2, 4), 9: (2, 4)}.get(n, ())
    ),
    "used early alone, fp16, overflows": Case(
        dtype=torch.float16,
        config={"bf16": {"enabled": False}, "fp16": FP16},
        # In windows that follow one without overflow: the older gradient, which stock goes by, is
        # infinite otherwise, and the weights are NaN.
        skips=lambda n: {9: (2,), 10: (2,), 15: (2,), 17: (4,)}.get(n, ()),
        steps=12,
    ),
    "windows thrown away by zero_grad()": Case(
        before=throw_away_midway, skips=lambda n: (2,) if n in (5, 9) else ()
    ),
    "windows that the caller ends": Case(
        config={"managed_gradient_accumulation": False},
        skips=lambda n: {3: (2,), 4: (2,), 7: (4,)}.get(n, ()),
        since="0.19",
    ),
    "eval between steps": Case(before=evaluate_between),
    "16-bit weights saved between steps": Case(before=save_16bit_between),
    "offload_states and back": Case(before=offload_midway, since="0.19"),
    "safe_get_* between steps": Case(before=read_state_between),
    # Stock itself fails here on a parameter whose elements the ranks do not divide.
    "safe_set_full_fp32_param": Case(before=set_weights_midway, most_ranks=1),
}


def ds_config(case, block):
    world = int(os.environ["WORLD_SIZE"])
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "train_batch_size": 4 * case.accumulation * world,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "sub_group_size": 700,
            "reduce_bucket_size": 3000,
            "stage3_param_persistence_threshold": 50,
            **case.zero,
        },
        "bf16": {"enabled": True},
        "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {}},
    } | case.config
    adam = {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}
    if case.own_optimizer:
        del config["optimizer"]
    else:
        kind = config["optimizer"]
        config["optimizer"] = {**kind, "params": {**adam, **kind["params"]}}
    return config | ({"deep_optimizer_states": block} if block else {})


FAMILIES = (
    "cases_offload_param",
    "cases_states16",
    "cases_zero12",
    "cases_models",
)
"""Modules beside this one, each with ``CASES`` of its own: other stages, settings and models."""


def all_cases():
    """Every feature, by its name."""
    found = dict(ZERO_3)
    for name in FAMILIES:
        found |= importlib.import_module(name).CASES
    return found


def columns_of(case):
    """What the table says of a feature beside its name."""
    zero = ds_config(case, None)["zero_optimization"]
    parameters = zero.get("offload_param", {}).get("device", "device")
    return {"stage": str(zero["stage"]), "parameters": parameters, "states": case.states}
