"""Odd models, uses of parameters, calls between steps, and pairs of engines in one process."""

import functools

import deepspeed
import models
import torch
from engines import (
    HELD_S,
    NUM_RANKS,
    RANK,
    STRIDE,
    WIDTH,
    Case,
    Net,
    differences,
    play_late,
)
from rows import Rows, stock_of
from seams import Wait

ROWS = Rows()
run = ROWS.run
NOTHING_PERSISTS = {"stage3_param_persistence_threshold": 0}
FourLayers = functools.partial(Net, 4)
net_case = functools.partial(Case, make=FourLayers, zero=NOTHING_PERSISTS)
PLAIN = net_case()
ONE_BATCH = net_case(accumulation=1)
LANGUAGE = Case(
    zero={"sub_group_size": 1000 // NUM_RANKS, "reduce_bucket_size": 8000, **NOTHING_PERSISTS},
    batch=models.draw_tokens,
    loss=models.predict_tokens,
    tile_numel=2048,
)


def step_in_flight(trial, engine):
    """A step whose update goes on a while after this has returned."""
    trial.hold(engine)
    trial.micro_step(engine)
    trial.let_go(engine)


def gathered(engine):
    """Copies of all weights, as a user reads them."""
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return [parameter.detach().clone() for parameter in parameters]


def write(engine, modifier_rank, parameters=None):
    """Other weights, which the next update undoes; forward alone sees them."""
    parameters = parameters or list(engine.module.parameters())
    with (
        deepspeed.zero.GatheredParameters(parameters, modifier_rank=modifier_rank),
        torch.no_grad(),
    ):
        if modifier_rank == engine.global_rank:
            for parameter in parameters:
                parameter.mul_(0.5).add_(0.01)


@ROWS.compare("GatheredParameters, update in flight", 1, 2)
def write_in_flight(trial):
    engine = trial.open(ONE_BATCH)
    for step in range(4):
        step_in_flight(trial, engine)
        if step < 3:
            write(engine, modifier_rank=step % NUM_RANKS)
            trial.see("weights after the write", gathered(engine))


@ROWS.compare("GatheredParameters, then master weights from them", 1, 2)
def write_for_good(trial):
    engine = trial.open(ONE_BATCH)
    for _ in range(3):
        step_in_flight(trial, engine)
        write(engine, modifier_rank=0)
        engine.optimizer.refresh_fp32_params()


@ROWS.compare("generate, Mixtral, greedy", 1, 2)
def generate(trial):
    """While the update is in flight, by a model in eval mode without gradients."""
    engine = trial.open(LANGUAGE, models.mixtral())
    tokens = torch.arange(1, 2 * models.LENGTH + 1).reshape(2, -1).to(engine.device)
    tokens %= models.VOCAB_SIZE
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    for _ in range(2):
        trial.micro_step(engine)
        step_in_flight(trial, engine)
        engine.eval()
        with torch.no_grad():
            mask = torch.ones_like(tokens)
            found = engine.module.generate(tokens, attention_mask=mask, **options)
            trial.see("new tokens", found.sequences)
            trial.see("logits of new tokens", list(found.logits))
            trial.see("logits", engine(input_ids=tokens, labels=tokens).logits)
        engine.train()
    trial.train(engine, steps=1)


# Models.


def adapted_net():
    model = FourLayers()
    model.requires_grad_(False)
    model.layers = torch.nn.ModuleList(models.Adapted(layer, 3) for layer in model.layers)
    return model


@ROWS.compare("LoRA, merged into the frozen weights after a step", 1, 2)
def lora(trial):
    """The merge stays: no master weights write over a frozen parameter."""

    def merge(engine, micro_step):
        if micro_step != 3:
            return
        for layer in engine.module.layers:
            weights = layer.parameters_of_all()
            with deepspeed.zero.GatheredParameters(weights, modifier_rank=0), torch.no_grad():
                weights[0].add_(weights[1] @ weights[2])

    engine = trial.open(Case(zero={"sub_group_size": 50}), adapted_net())
    trial.train(engine, steps=4, after=merge)


class UsesOthersWeights(Net):
    """Computes with weights of modules that it does not call."""

    def __init__(self):
        super().__init__(num_layers=4)
        deepspeed.zero.register_external_parameter(self, self.layers[2].weight)
        deepspeed.zero.register_external_parameter(self, self.layers[3].bias)

    def forward(self, x):
        x = torch.nn.functional.linear(x, self.layers[2].weight, self.layers[3].bias)
        x = self.layers[0](x) + x
        x = torch.tanh(self.layers[2](x)) @ self.layers[1].weight.t()
        return self.layers[3](x) + self.layers[1].bias


@ROWS.compare("external parameters", 1, 2)
def external(trial):
    trial.train(trial.open(PLAIN, UsesOthersWeights()))


@ROWS.compare("layers in another order each micro-batch", 1, 2)
def other_orders(trial):
    """The order of use that the first iteration saw is never seen again."""

    def choose(engine, micro_step):
        order = ((0, 1, 2, 3), (3, 1, 0, 2), (2, 0, 1, 3), (3, 2, 1, 0))[micro_step % 4]
        engine.module.segments = [(layer,) for layer in order]

    trial.train(trial.open(PLAIN), steps=4, before=choose)


# Pairs of engines.


@ROWS.compare("destroyed in mid-update and mid-window, another made of the model", 1, 2)
def made_again(trial):
    model = FourLayers()
    engine = trial.open(PLAIN, model)
    trial.train(engine, steps=2)
    trial.micro_step(engine, ends_window=False)
    trial.end(engine)
    again = trial.open(PLAIN, model)
    trial.train(again, steps=2)
    trial.end(again)
    trial.train(trial.open(PLAIN, model, block=None), steps=1)


@ROWS.compare("weights of two of ours gathered at once, in flight", 1, 2)
def gathered_at_once(trial):
    """As a target network is made: one call gathers the parameters of two models.

    DeepSpeed asks the parameter that was partitioned first, so the target is the older model.
    """
    engines = [trial.open(ONE_BATCH), trial.open(ONE_BATCH)]
    mine, others = (list(engine.module.parameters()) for engine in engines)
    for _ in range(3):
        for engine in engines:
            trial.hold(engine)
            trial.micro_step(engine)
        for number, engine in enumerate(engines):
            trial.let_go(engine, HELD_S * (1 + 3 * number))  # the later one is still in flight then
        with deepspeed.zero.GatheredParameters([*mine, *others], modifier_rank=0), torch.no_grad():
            if RANK == 0:
                for kept, new in zip(mine, others, strict=True):
                    kept.lerp_(new, 0.25)
        with deepspeed.zero.GatheredParameters(mine):
            trial.see("target", mine)


@ROWS.compare("a loss through both")
def chained(trial):
    """One backward: the gradients of both are reduced in it."""
    first, second = trial.open(ONE_BATCH), trial.open(ONE_BATCH)
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(4, WIDTH, generator=generator).to(first.device, torch.bfloat16)
        loss = (second(first(x)).float() ** 2).mean()
        trial.see("loss", loss)
        first.backward(loss)
        first.step()
        second.step()
    trial.micro_step(second)


# Negative controls: a gather that does not wait for its tiles must show.


@ROWS.check("without its wait, a write meets other weights", act=write_in_flight)
@ROWS.check("without its wait, other tokens are generated", act=generate)
def reads_too_early(_folder, act):
    assert differences(play_late(act, STRIDE, {Wait.WEIGHTS_READY}), stock_of(act)) != []


def differentiate_after_backward(trial, case):
    """DeepSpeed leaves its count of open backwards too high then, and trains on."""
    engine = trial.open(case)
    for _ in range(3):
        x = torch.ones(4, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        old = engine(x).float().pow(2).mean()
        engine.backward(trial.loss(engine))
        trial.see("gradient", torch.autograd.grad(old, x)[0])
        trial.step(engine)


for stage in (2, 3):
    case = Case(accumulation=1, zero={"stage": stage})
    ROWS.compare(f"an older graph, not by engine.backward, stage {stage}", case=case)(
        differentiate_after_backward
    )


# Last, since torch's compiler keeps what it has seen.


class PlainNet(Net):
    """Layers that can be compiled as one; few, because the compiler takes a second for each."""

    def __init__(self):
        super().__init__(num_layers=2)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


COMPILED = {stage: Case(make=PlainNet, zero={"stage": stage}) for stage in (3, 2)}


def train_compiled(trial, case):
    """And no graph is broken where stock breaks none."""
    from torch._dynamo.utils import counters  # seconds, which other groups would pay as well

    torch._dynamo.reset()
    counters.clear()
    engine = trial.open(case)
    engine.compile(backend="aot_eager")
    trial.train(engine)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    trial.see("graphs", graphs)
    trial.see("breaks between them", sum(counters["graph_break"].values()))


class Pair(torch.nn.Module):
    """Two layers with names of their own."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def train_in_a_compiled_function(trial, case, eager_steps):
    """Of the user's own, which calls the model; some steps come before its first call."""
    torch._dynamo.reset()
    engine = trial.open(case)
    forward = torch.compile(lambda x: engine.module(x), backend="eager")
    for number in range(4):
        x = torch.full((4, WIDTH), 0.1 * number, dtype=torch.bfloat16)
        out = (engine.module if number < eager_steps else forward)(x)
        engine.backward(out.float().pow(2).mean())
        trial.step(engine)


for eager_steps in (0, 1):
    ROWS.compare(
        f"a function that is compiled calls the model, {eager_steps} steps before",
        case=Case(make=Pair, accumulation=1, zero={"stage": 2}),
        eager_steps=eager_steps,
    )(train_in_a_compiled_function)
compiled_at_3 = functools.partial(train_compiled, case=COMPILED[3])
ROWS.compare("engine.compile() at stage 2", case=COMPILED[2])(train_compiled)
ROWS.compare("engine.compile()")(compiled_at_3)
ROWS.check("compiled, without its wait other weights are met", act=compiled_at_3)(reads_too_early)
