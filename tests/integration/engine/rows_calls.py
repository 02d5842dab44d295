"""Odd models, uses of parameters, calls between steps, and pairs of engines in one process."""

import functools

import deepspeed
import models
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
)
from engines import (
    HELD_S,
    NUM_RANKS,
    RANK,
    STRIDE,
    WIDTH,
    Case,
    Net,
    differences,
    play,
    play_late,
)
from rows import Rows
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


@ROWS.compare("hooks that read weights, state and gradients", 1, 2)
def reading_hooks(trial):
    engine, steps = trial.open(ONE_BATCH), []

    def before_forward_of_all(module, inputs):
        trial.see("master", safe_get_full_fp32_param(module.layers[3].weight))
        if steps:
            moment = safe_get_full_optimizer_state(module.layers[0].weight, "exp_avg")
            trial.see("moment", moment)

    def see_gradients(what):
        trial.see(what, [safe_get_full_grad(p) for p in engine.module.parameters()])

    engine.module.register_forward_pre_hook(before_forward_of_all)
    for layer in engine.module.layers:
        layer.register_forward_pre_hook(lambda module, _: trial.see("in forward", module.weight))
        layer.register_full_backward_hook(lambda _m, _g, of_out: trial.see("of output", [*of_out]))
        layer.weight.register_hook(lambda grad: trial.see("gradient of a weight", grad))
    for _ in range(3):
        trial.backward(engine)
        see_gradients("gradient")
        trial.step(engine)
        steps.append(1)
        see_gradients("scaled gradient")


def generate(trial, make, **options):
    """While the update is in flight, by a model in eval mode without gradients."""
    engine = trial.open(LANGUAGE, make())
    tokens = torch.arange(1, 2 * models.LENGTH + 1).reshape(2, -1).to(engine.device)
    tokens %= models.VOCAB_SIZE
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0} | options
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


ROWS.compare("generate, Mixtral, greedy", 1, 2, make=models.mixtral, do_sample=False)(generate)
ROWS.compare("generate, GPT-2, sampled", make=models.gpt2, do_sample=True, top_k=8)(generate)


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

    def __init__(self, registers):
        super().__init__(num_layers=4)
        if registers:
            deepspeed.zero.register_external_parameter(self, self.layers[2].weight)
            deepspeed.zero.register_external_parameter(self, self.layers[3].bias)

    def forward(self, x):
        x = torch.nn.functional.linear(x, self.layers[2].weight, self.layers[3].bias)
        x = self.layers[0](x) + x
        x = torch.tanh(self.layers[2](x)) @ self.layers[1].weight.t()
        return self.layers[3](x) + self.layers[1].bias


@ROWS.compare("external parameters, registered", 1, 2, registers=True)
@ROWS.compare("external parameters, found by DeepSpeed", registers=False)
def external(trial, registers):
    trial.train(trial.open(PLAIN, UsesOthersWeights(registers)))


# Uses.


def train_by_turns(trial, turns, **attributes):
    """Each micro-batch sets the model's attributes to those of its turn."""

    def choose(engine, micro_step):
        for name, values in attributes.items():
            setattr(engine.module, name, values[micro_step // turns % len(values)])

    trial.train(trial.open(PLAIN), steps=4, before=choose)


def orders(*texts):
    """Segments of one layer each."""
    return [tuple((int(layer),) for layer in text) for text in texts]


# The order of use that the first iteration saw is never seen again.
ROWS.compare(
    "layers in another order each micro-batch",
    *(1, 2),
    turns=1,
    segments=orders("0123", "3102", "2013", "3210"),
)(train_by_turns)
ROWS.compare(
    "layers used twice or thrice in one forward",
    *(1, 2),
    turns=2,
    segments=orders("01023", "001233", "3210123"),
)(train_by_turns)


@ROWS.compare("tied weights, first used by the module of the other group", 1, 2)
def tied_over_groups(trial):
    model = FourLayers()
    model.layers[3].weight = model.layers[0].weight
    model.layers[2].bias = model.layers[1].bias

    def groups(model):
        first, second, third, last = model.layers
        return [
            {"params": [third.weight, last.bias, last.weight], "lr": 1e-3},
            {"params": [second.weight, third.bias, first.bias], "betas": (0.5, 0.9)},
        ]

    trial.train(trial.open(net_case(groups=groups), model), steps=4)


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
@ROWS.check(
    "without its wait, other tokens are generated",
    act=functools.partial(generate, make=models.mixtral, do_sample=False),
)
def reads_too_early(_folder, act):
    assert differences(play_late(act, STRIDE, {Wait.WEIGHTS_READY}), play(act, None)) != []
