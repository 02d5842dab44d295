"""Pairs of engines in one process."""

import deepspeed
import torch
from adversary_trial import (
    HELD_S,
    NOTHING_PERSISTS,
    RANK,
    WIDTH,
    Net,
    Registry,
    fit_noise,
    gathered,
)
from equality_cases import Case, ds_config

CASES = Registry()
ONE_BATCH = Case(accumulation=1, zero=NOTHING_PERSISTS)


@CASES.add("two of ours, micro-batch by micro-batch", (1, 2))
def two(trial):
    """The second engine's update begins in the middle of the first one's window."""
    first, second = trial.open(), trial.open()
    trial.micro_step(second)
    for _ in range(5):
        trial.micro_step(first)
        trial.micro_step(second)


@CASES.add("ours beside stock", (1, 2))
def beside_stock(trial):
    ours, stock = trial.open(), trial.open(block=None)
    for _ in range(6):
        trial.micro_step(ours)
        trial.micro_step(stock)


@CASES.add("one destroyed while the other's update is in flight", (1, 2))
def destroyed_beside(trial):
    first, second = trial.open(case=ONE_BATCH), trial.open(case=ONE_BATCH)
    trial.micro_step(first)
    trial.hold(second)
    trial.micro_step(second)
    trial.end(first)
    trial.let_go(second)
    trial.see("weights", gathered(second))
    trial.micro_step(second)


@CASES.add("destroyed in mid-update and mid-window, another made of the model", (1, 2))
def made_again(trial):
    model = Net()
    engine = trial.open(model)
    trial.train(engine, steps=2)
    trial.micro_step(engine)
    trial.end(engine)
    again = trial.open(model)
    trial.train(again, steps=2)
    trial.end(again)
    trial.train(trial.open(model, block=None), steps=1)


@CASES.add("stock's model taken over")
def taken_over(trial):
    model = Net()
    stock = trial.open(model, block=None)
    trial.train(stock, steps=2)
    trial.end(stock)
    trial.train(trial.open(model), steps=2)


def move_towards(trial, target, source, engines):
    """As a target network is made: one call gathers the parameters of two models.

    DeepSpeed asks the parameter that was partitioned first, so the target is the older model.
    ``engines``: those whose update is then in flight.
    """
    for engine in engines:
        trial.hold(engine)
        trial.micro_step(engine)
    for number, engine in enumerate(engines):
        trial.let_go(engine, HELD_S * (1 + 3 * number))  # the later one is still in flight then
    mine, others = list(target.parameters()), list(source.parameters())
    with deepspeed.zero.GatheredParameters([*mine, *others], modifier_rank=0), torch.no_grad():
        if RANK == 0:
            for kept, new in zip(mine, others, strict=True):
                kept.lerp_(new, 0.25)
    with deepspeed.zero.GatheredParameters(mine):
        trial.see("target", mine)


@CASES.add("weights of two of ours gathered at once, in flight", (1, 2))
def gathered_at_once(trial):
    first, second = trial.open(case=ONE_BATCH), trial.open(case=ONE_BATCH)
    for _ in range(3):
        move_towards(trial, first.module, second.module, (first, second))


@CASES.add("weights of stock and of ours gathered at once, in flight")
def gathered_with_stock(trial):
    stock, ours = trial.open(case=ONE_BATCH, block=None), trial.open(case=ONE_BATCH)
    for _ in range(3):
        move_towards(trial, stock.module, ours.module, (stock, ours))


@CASES.add("weights of no engine and of ours gathered at once, in flight")
def gathered_with_none(trial):
    """An average in a model that is partitioned and never trained."""
    with deepspeed.zero.Init(config_dict_or_path=ds_config(ONE_BATCH, None)):
        average = Net()
    engine = trial.open(case=ONE_BATCH)
    for _ in range(3):
        move_towards(trial, average, engine.module, (engine,))


class Student(Net):
    """Computes with a weight of another engine's model beside one of its own."""

    def __init__(self, teacher):
        super().__init__()
        self.own = torch.nn.Parameter(torch.eye(WIDTH))
        deepspeed.zero.register_external_parameter(self, teacher.layers[0].weight)
        self.borrowed = [teacher.layers[0].weight]  # in a list: no parameter of this module

    def forward(self, x):
        return super().forward(x) @ self.own + x @ self.borrowed[0].detach().t()


@CASES.add("a student that borrows a weight of its teacher, in flight", (1, 2))
def borrowed(trial):
    teacher = trial.open(case=ONE_BATCH)
    student = trial.open(Student(teacher.module), ONE_BATCH)
    train_in_flight(trial, teacher, student)


@CASES.add("a student that is older than its teacher, in flight")
def older(trial):
    """DeepSpeed gathers a module's parameters in the order in which they were partitioned."""
    teacher = Net()
    student = trial.open(Student(teacher), ONE_BATCH)
    train_in_flight(trial, trial.open(teacher, ONE_BATCH), student)


def train_in_flight(trial, teacher, student):
    for _ in range(3):
        for engine in (teacher, student):
            trial.hold(engine)
            trial.micro_step(engine)
            trial.let_go(engine)


@CASES.add("a loss through both")
def chained(trial):
    """One backward: the gradients of both are reduced in it."""
    first, second = trial.open(case=ONE_BATCH), trial.open(case=ONE_BATCH)

    def forward(engine, generator):
        x = torch.randn(4, WIDTH, generator=generator).to(engine.device, torch.bfloat16)
        return (second(first(x)).float() ** 2).mean()

    for _ in range(3):
        loss = forward(first, trial.generator)
        trial.see("loss", loss)
        first.backward(loss)
        first.step()
        second.step()
    trial.micro_step(second, fit_noise)
