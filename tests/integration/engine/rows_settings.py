"""Hyperparameters that change, schedulers, settings of DeepSpeed, gradients that are no numbers."""

import functools
import math
import warnings

import torch
from deepspeed.utils import (
    safe_get_full_grad,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from engines import NUM_RANKS, RANK, SMALL_TILES, WIDTH, Case, Net, make_folder
from rows import TWO_POLICIES, Rows
from rows_calls import NOTHING_PERSISTS, ONE_BATCH, net_case
from torch.optim import lr_scheduler

ROWS = Rows(TWO_POLICIES | {"all-host": {**SMALL_TILES, "policy": "all-host"}})
run = ROWS.run
FP16 = {
    "bf16": {"enabled": False},
    "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
}


def three_groups(model):
    layers = model.layers
    return [
        {"params": list(layers[:1].parameters()), "lr": 3e-3, "weight_decay": 0.0},
        {"params": list(layers[1:3].parameters()), "lr": 1e-2, "betas": (0.8, 0.99)},
        {"params": list(layers[3:].parameters()), "eps": 1e-6},
    ]


GROUPS = net_case(accumulation=1, groups=three_groups)
CHANGES = {
    "lr": lambda step, group: 1e-3 * (step + group + 1),
    "betas": lambda step, group: (0.9 - 0.1 * (step % 2), 0.9 + 0.03 * ((step + group) % 3)),
    "eps": lambda step, group: 10.0 ** -(3 + step + group),
    "weight_decay": lambda step, group: 0.1 * ((step + group) % 3),
    "bias_correction": lambda step, group: (step + group) % 2 == 0,
}


def change_all(engine, step):
    for number, group in enumerate(engine.optimizer.param_groups):
        assert group.keys() >= CHANGES.keys()
        group.update({name: make(step, number) for name, make in CHANGES.items()})


@ROWS.compare("every hyperparameter while the update is in flight")
def change_in_flight(trial):
    engine = trial.open(GROUPS)
    for step in range(4):
        trial.hold(engine)
        trial.micro_step(engine)
        change_all(engine, step)
        trial.let_go(engine)


EXTREMES = (
    {"betas": (0.0, 0.0)},
    {"betas": (0.9999999, 0.9999999)},
    {"betas": (0.9, 0.95), "eps": 0.0},
    {"eps": 1e30},
    {"eps": 1e-8, "lr": 0.0},
    {"lr": -1e-3},
    {"lr": 1e-42},
    {"lr": torch.tensor(3e-3)},
    {"lr": torch.tensor(3e-3, dtype=torch.float64), "weight_decay": -0.5},
    {"weight_decay": 300.0},
    {"lr": 0, "weight_decay": 1, "eps": 1},
)
"""Changes that add up: zeros, numbers at the edge of fp32, other signs and other types."""


def change_to_extremes(engine, step):
    if step:
        engine.optimizer.param_groups[0].update(EXTREMES[step - 1])


def jump(engine, micro_step):
    for state in engine.optimizer.state.values():
        state["step"] = (0, 0, 10**6, 3, 2**31, 5)[micro_step] or state["step"]


def clip(engine, micro_step):
    engine.optimizer.clip_grad = (0.0, 1e-3, 1.0, 1e9)[micro_step % 4]


def train_plainly(trial, case):
    trial.train(trial.open(case), case.steps)


for name, case in {
    "every hyperparameter, group by group, before each step": GROUPS.changed(before=change_all),
    "extreme hyperparameters, one after the other": ONE_BATCH.changed(
        before=change_to_extremes, steps=len(EXTREMES) + 1
    ),
    "a count of steps that jumps": ONE_BATCH.changed(before=jump, steps=6),
    "clipping changed between steps": ONE_BATCH.changed(before=clip, steps=6),
}.items():
    ROWS.compare(name, 1, 2, case=case)(train_plainly)


# Schedulers, and gradients that are no numbers.


def poison_at(*places):
    """Multiply gradients of the last rank's micro-batches; ``places``: (micro-batch, factor)."""
    factors = dict(places)

    def poison(engine, micro_step):
        engine.module.poison = factors.get(micro_step) if RANK == NUM_RANKS - 1 else None

    return poison


@ROWS.compare("torch's scheduler with its betas, a step skipped", 1, 2)
def schedule(trial):
    case = net_case(dtype=torch.float16, config={**FP16, "gradient_clipping": 1.0})
    make = functools.partial(lr_scheduler.OneCycleLR, max_lr=2e-2, total_steps=6)
    engine = trial.open(case, lr_scheduler=make)
    trial.train(
        engine,
        steps=4,
        before=poison_at((2, math.inf)),
        after=lambda engine, _: trial.see("rate", engine.get_lr()),
    )
    assert engine.skipped_steps == 1


@ROWS.compare("torch's scheduler finds step() called")
def scheduler_warns_of_nothing(trial):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make = functools.partial(lr_scheduler.ExponentialLR, gamma=0.9)
        trial.train(trial.open(net_case(), lr_scheduler=make), steps=2)
    assert not [1 for warning in caught if "lr_scheduler.step()" in str(warning.message)]


def train_badly(trial, places, config=None, dtype=torch.bfloat16, skips=None):
    """Gradients that are infinite or NaN on the last rank alone."""
    engine = trial.open(net_case(dtype=dtype, config=config or {}, skips=skips))
    trial.train(engine, steps=4, before=poison_at(*places))
    assert engine.skipped_steps == len(places)


ONCE_EACH = ((2, math.inf), (5, math.nan))
HALF = {"config": FP16, "dtype": torch.float16}
UNUSED = {"skips": lambda n: (2,) if n // 2 in (2, 3) else ()}
for name, places, given in (
    ("NaN, fp16", ((3, math.nan), (4, math.nan)), HALF),
    ("infinite, then NaN, bf16", ONCE_EACH, {}),
    ("infinite, then NaN, no clipping", ONCE_EACH, {"config": {"gradient_clipping": 0.0}}),
    ("infinite, a layer unused", ((4, math.inf), (7, math.inf)), UNUSED),
):
    ROWS.compare(f"gradients of one rank {name}", 1, 2, places=places, **given)(train_badly)


# Settings.


class OddSizes(torch.nn.Module):
    """Parameters of 1, 3 and 17 elements beside larger ones: a rank may hold padding alone."""

    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(1))
        self.first = torch.nn.Linear(WIDTH, 17)
        self.three = torch.nn.Parameter(torch.linspace(0.5, 1.5, 3))
        self.second = torch.nn.Linear(17, WIDTH, bias=False)
        self.last = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        hidden = torch.tanh(self.first(x)) * self.gain
        head = hidden[:, :3] * self.three
        return self.second(torch.cat((head, hidden[:, 3:]), -1)) + self.last


def train_odd_sizes(trial, zero, config=None, tile_numel=16):
    zero = {"sub_group_size": 4, **NOTHING_PERSISTS, **zero}
    case = Case(make=OddSizes, zero=zero, config=config or {}, tile_numel=tile_numel)
    trial.train(trial.open(case))


AT_ONCE = {"stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0}
ALL_REDUCED = {"reduce_scatter": False}
for name, zero, given in (
    ("a bucket below all", {"sub_group_size": 3, "reduce_bucket_size": 5}, {"tile_numel": 112}),
    ("a bucket of one element", {"sub_group_size": 1, "reduce_bucket_size": 1}, {}),
    ("nothing prefetched", AT_ONCE, {}),
    ("gradients divided twice", ALL_REDUCED, {"config": {"gradient_predivide_factor": 4.0}}),
    ("gradients prescaled", ALL_REDUCED, {"config": {"prescale_gradients": True}}),
    ("gradients summed in fp16", {}, {"config": {"data_types": {"grad_accum_dtype": "fp16"}}}),
    ("gradients reduced in fp32", {}, {"config": {"communication_data_type": "fp32"}}),
):
    ROWS.compare(f"odd sizes, {name}", 1, 2, zero=zero, **given)(train_odd_sizes)


class MixedNet(torch.nn.Module):
    """Parameters that the user made in several types, buffers in more."""

    def __init__(self):
        super().__init__()
        self.net = Net(num_layers=4)
        self.net.layers[1].double()
        self.net.layers[2].half()
        self.register_buffer("shift", torch.full((1,), 0.25, dtype=torch.float64))

    def forward(self, x):
        return self.net(x) + self.shift.to(x.dtype)


def halve_local_state(engine, micro_step):
    if micro_step == 4:
        for parameter in engine.module.parameters():
            safe_set_local_fp32_param(parameter, safe_get_local_fp32_param(parameter) * 0.5)
            moment = safe_get_local_optimizer_state(parameter, "exp_avg")
            safe_set_local_optimizer_state(parameter, moment * 0.5, "exp_avg")


AUTOCAST = {"bf16": {"enabled": False}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
NARROW = {"optimizer": {"type": "AdamW", "params": {"fp32_optimizer_states": False}}}
for name, case in {
    "parameters of several types": net_case(make=MixedNet),
    "fp32_optimizer_states off": net_case(config=NARROW),
    "safe_set_local_*": net_case(before=halve_local_state),
}.items():
    ROWS.compare(name, 1, 2, case=case)(train_plainly)


@ROWS.compare("boundaries set by hand", 1, 2)
def step_at_the_end_of_windows(trial):
    """Windows of 1 to 3 micro-batches, of whose end DeepSpeed is told."""
    engine = trial.open(net_case(zero={}))
    for length in (1, 2, 3, 2, 1):
        for number in range(length):
            engine.set_gradient_accumulation_boundary(number == length - 1)
            trial.backward(engine)
        trial.step(engine)


def read_gradients(trial, case, poisoned=None):
    """Before and after steps; of parameters that took no part in the window too."""
    engine = trial.open(case)

    def read():
        trial.see("gradient", [safe_get_full_grad(p) for p in engine.module.parameters()])

    for micro_step in range(10):
        engine.module.skipped = (2,) if micro_step // 2 in (2, 3) else ()
        engine.module.poison = math.inf if micro_step == poisoned else None
        trial.backward(engine)
        if micro_step % 2:
            read()
        trial.step(engine)
        if micro_step % 2:
            read()


ROWS.compare("safe_get_full_grad", 1, 2, case=net_case(zero={}))(read_gradients)
ROWS.compare(
    "safe_get_full_grad, a step skipped",
    *(1, 2),
    case=net_case(zero={}, dtype=torch.float16, config=FP16),
    poisoned=3,
)(read_gradients)


@ROWS.compare("torch's other defaults", 1, 2)
def step_under_other_defaults(trial):
    """torch's default type is another one, and on its default device no tensor has values."""
    engine = trial.open(net_case(zero={}))
    for _ in range(6):
        trial.backward(engine)
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("meta")
        try:
            engine.step()
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)


@ROWS.compare("zero_to_fp32", 1, 2)
def to_fp32(trial):
    engine, folder = trial.open(net_case()), make_folder()
    trial.train(engine)
    engine.save_checkpoint(folder, tag="step3")
    for name, weight in get_fp32_state_dict_from_zero_checkpoint(folder, tag="step3").items():
        trial.see(name, weight)


# Last: DeepSpeed keeps both switched on for the rest of the process.
for name, case in {
    "comms_logger": net_case(config={"comms_logger": {"enabled": True}}),
    "torch_autocast in bfloat16": net_case(dtype=torch.float32, config=AUTOCAST),
}.items():
    ROWS.compare(name, 1, 2, case=case)(train_plainly)
