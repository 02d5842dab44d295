"""Adversarial settings: every hyperparameter while training runs, schedulers, bad gradients."""

import functools
import math

import torch
from adversary_trial import FP16, NOTHING_PERSISTS, NUM_RANKS, RANK, Registry
from equality_cases import Case
from torch.optim import lr_scheduler

CASES = Registry()


def three_groups(model):
    layers = model.layers
    return [
        {"params": list(layers[:1].parameters()), "lr": 3e-3, "weight_decay": 0.0},
        {"params": list(layers[1:3].parameters()), "lr": 1e-2, "betas": (0.8, 0.99)},
        {"params": list(layers[3:].parameters()), "eps": 1e-6},
    ]


GROUPS = Case(accumulation=1, groups=three_groups, zero=NOTHING_PERSISTS)
CHANGES = {
    "lr": lambda step, group: 1e-3 * (step + group + 1),
    "betas": lambda step, group: (0.9 - 0.1 * (step % 2), 0.9 + 0.03 * ((step + group) % 3)),
    "eps": lambda step, group: 10.0 ** -(3 + step + group),
    "weight_decay": lambda step, group: 0.1 * ((step + group) % 3),
    "bias_correction": lambda step, group: (step + group) % 2 == 0,
}


def change(engine, names, step):
    for number, group in enumerate(engine.optimizer.param_groups):
        for name in names:
            assert name in group, f"no group has {name}"
            group[name] = CHANGES[name](step, number)


@CASES.add("every hyperparameter, group by group, before each step", (1, 2))
def change_all(trial):
    trial.train(trial.open(case=GROUPS), steps=5, before=lambda e, n: change(e, CHANGES, n))


@CASES.add("every hyperparameter while the update is in flight")
def change_in_flight(trial):
    engine = trial.open(case=GROUPS)
    for step in range(4):
        trial.hold(engine)
        trial.micro_step(engine)
        change(engine, CHANGES, step)
        trial.let_go(engine)


def change_one(trial, name):
    """In its turn, for one group alone: the others keep what they had."""

    def change_last(engine, step):
        if step in (1, 3):
            engine.optimizer.param_groups[step - 1][name] = CHANGES[name](step, 1)

    trial.train(trial.open(case=GROUPS), steps=4, before=change_last)


for name in CHANGES:
    CASES.add(f"{name} of one group")(functools.partial(change_one, name=name))


@CASES.add("optimizer started again")
def start_again(trial):
    """Moments and count of steps set to zero by hand."""

    def clear(engine, step):
        if step == 2:
            for state in engine.optimizer.state.values():
                state["step"] = 0
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()

    trial.train(trial.open(case=GROUPS), steps=4, before=clear)


def torch_scheduler(make, dtype=torch.bfloat16):
    """One of torch's, which DeepSpeed steps."""

    def act(trial):
        fp16 = dtype is torch.float16
        config = FP16 | {"gradient_clipping": 1.0} if fp16 else {}
        engine = trial.open(case=Case(dtype=dtype, config=config), lr_scheduler=make)
        poison = poison_at(((2, math.inf),)) if fp16 else None
        trial.train(engine, steps=4, before=poison, after=see_rates(trial))
        assert engine.skipped_steps == int(fp16)

    return act


def see_rates(trial):
    return lambda engine, micro_step: trial.see("rate", engine.get_lr())


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=6)


def falling(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


CASES_OF_TORCH = {
    "LambdaLR": (falling, torch.bfloat16),
    "OneCycleLR, with its betas": (one_cycle, torch.bfloat16),
}


def poison_at(places):
    """Multiply gradients of the last rank's micro-batches; ``places``: (micro-batch, factor)."""
    factors = dict(places)

    def poison(engine, micro_step):
        engine.module.poison = factors.get(micro_step) if RANK == NUM_RANKS - 1 else None

    return poison


for name, (make, dtype) in CASES_OF_TORCH.items():
    CASES.add(f"torch's {name}")(torch_scheduler(make, dtype))
CASES.add("torch's LambdaLR, a step skipped", (1, 2))(torch_scheduler(falling, torch.float16))


def config_scheduler(trial, kind, **params):
    """One of DeepSpeed's."""
    case = Case(config={"scheduler": {"type": kind, "params": params}})
    trial.train(trial.open(case=case), steps=4, after=see_rates(trial))


for kind, params in (
    ("WarmupLR", {"warmup_num_steps": 2, "warmup_max_lr": 1e-2}),
    ("OneCycle", {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 2}),
):
    CASES.add(f"DeepSpeed's {kind}")(functools.partial(config_scheduler, kind=kind, **params))


@CASES.add("a scheduler that the user steps")
def own_scheduler(trial):
    engine = trial.open()
    scheduler = falling(engine.basic_optimizer)

    def step_it(engine, micro_step):
        if micro_step % 2:
            scheduler.step()

    trial.train(engine, steps=4, after=step_it)


def train_badly(trial, config, dtype, places, skipped):
    """Gradients that are infinite or NaN on the last rank alone."""
    engine = trial.open(case=Case(dtype=dtype, config=config))
    trial.train(engine, steps=4, before=poison_at(places))
    assert engine.skipped_steps == skipped, engine.skipped_steps


ONCE_EACH = ((2, math.inf), (5, math.nan))
NO_CLIPPING = {"gradient_clipping": 0.0}
for name, config, dtype, places, skipped in (
    ("infinite, fp16", FP16, torch.float16, ((0, math.inf), (5, -math.inf)), 2),
    ("NaN, fp16", FP16, torch.float16, ((3, math.nan), (4, math.nan)), 2),
    ("infinite, then NaN, bf16", {}, torch.bfloat16, ONCE_EACH, 2),
    ("infinite, then NaN, bf16, no clipping", NO_CLIPPING, torch.bfloat16, ONCE_EACH, 2),
    ("infinite, then NaN, fp32", {"bf16": {"enabled": False}}, torch.float32, ONCE_EACH, 2),
):
    CASES.add(f"gradients of one rank {name}", (1, 2))(
        functools.partial(train_badly, config=config, dtype=dtype, places=places, skipped=skipped)
    )
