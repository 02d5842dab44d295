"""Adversarial calls between steps: freezing, writes, averages of weights, hooks, generation."""

import functools

import deepspeed
import torch
from adversary_trial import (
    NOTHING_PERSISTS,
    NUM_RANKS,
    RANK,
    WIDTH,
    Net,
    Registry,
    fit_noise,
    gathered,
)
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
)
from equality_cases import Case
from small_models import LENGTH, VOCAB_SIZE, gpt2, llama, mixtral, t5

CASES = Registry()
PLAIN = Case(zero=NOTHING_PERSISTS)
ONE_BATCH = Case(accumulation=1, zero=NOTHING_PERSISTS)
MODEL = Case(zero={"sub_group_size": 1000, "reduce_bucket_size": 8000, **NOTHING_PERSISTS})


def predict_tokens(engine, generator):
    tokens = torch.randint(1, VOCAB_SIZE, (2, LENGTH), generator=generator).to(engine.device)
    return engine(input_ids=tokens, labels=tokens).loss.float()


def freeze(layers, frozen=True):
    for layer in layers:
        layer.requires_grad_(not frozen)


@CASES.add("frozen and unfrozen", (1, 2))
def frozen_and_unfrozen(trial):
    """Between windows; a weight that is frozen goes on being updated, as in stock."""
    engine = trial.open(case=PLAIN)
    layers = engine.module.layers

    def toggle(engine, micro_step):
        if micro_step == 2:
            layers[0].weight.requires_grad_(False)
            freeze([layers[2]])
        if micro_step == 6:
            freeze(layers, frozen=False)

    trial.train(engine, steps=5, before=toggle)


@CASES.add("frozen by halves, update in flight")
def frozen_by_halves(trial):
    engine = trial.open(case=ONE_BATCH)
    layers = engine.module.layers
    for step in range(4):
        trial.hold(engine)
        trial.micro_step(engine)
        freeze(layers, frozen=False)
        freeze(layers[:2] if step % 2 else layers[2:])
        trial.let_go(engine)


@CASES.add("frozen before the first step, unfrozen later")
def frozen_at_first(trial):
    model = Net()
    freeze(model.layers[1:3])
    engine = trial.open(model, Case(zero={"sub_group_size": 100}))
    trial.train(engine, steps=2)
    freeze(model.layers, frozen=False)
    freeze(model.layers[1:3])
    trial.train(engine, steps=2)


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


@CASES.add("GatheredParameters, update in flight", (1, 2))
def write_in_flight(trial):
    engine = trial.open(case=ONE_BATCH)
    for step in range(4):
        trial.hold(engine)
        trial.micro_step(engine)
        trial.let_go(engine)
        if step < 3:
            write(engine, modifier_rank=step % NUM_RANKS)
            trial.see("weights after the write", gathered(engine))


@CASES.add("GatheredParameters, then master weights from them", (1, 2))
def write_for_good(trial):
    engine = trial.open(case=ONE_BATCH)
    for _ in range(3):
        trial.hold(engine)
        trial.micro_step(engine)
        trial.let_go(engine)
        write(engine, modifier_rank=0)
        engine.optimizer.refresh_fp32_params()


@CASES.add("GatheredParameters between the micro-batches")
def write_between_micro_batches(trial):
    def halve(engine, micro_step):
        if micro_step in (1, 3):
            write(engine, 0, [engine.module.layers[1].weight, engine.module.layers[3].bias])

    trial.train(trial.open(), before=halve)


@CASES.add("EMA of the weights", (1, 2))
def average(trial):
    """Right after each step, from the gathered 16-bit weights."""
    engine = trial.open(case=ONE_BATCH)
    averages = [weight.float() for weight in gathered(engine)]
    for _ in range(4):
        trial.hold(engine)
        trial.micro_step(engine)
        trial.let_go(engine)
        for kept, weight in zip(averages, gathered(engine), strict=True):
            kept.lerp_(weight.float(), 0.1)
        trial.see("average", averages)


@CASES.add("EMA of the master weights, used to evaluate")
def average_of_masters(trial):
    engine = trial.open(case=ONE_BATCH)
    parameters = list(engine.module.parameters())
    averages = [safe_get_full_fp32_param(parameter).clone() for parameter in parameters]
    probe = torch.ones(2, WIDTH, dtype=torch.bfloat16, device=engine.device)
    for _ in range(3):
        trial.hold(engine)
        trial.micro_step(engine)
        trial.let_go(engine)
        for kept, parameter in zip(averages, parameters, strict=True):
            kept.lerp_(safe_get_full_fp32_param(parameter), 0.1)
        weights = gathered(engine)
        replace(parameters, averages)
        engine.eval()
        with torch.no_grad():
            trial.see("evaluated", engine(probe))
        engine.train()
        replace(parameters, weights)
        trial.see("average", averages)


def replace(parameters, values):
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
        if RANK == 0:
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)


@CASES.add("hooks that read weights, state and gradients", (1, 2))
def reading_hooks(trial):
    engine = trial.open(case=ONE_BATCH)

    def before_forward(module, inputs):
        trial.see("weight in forward", module.weight)

    def after_backward(module, grad_input, grad_output):
        trial.see("gradient of the output", [*grad_output])

    def before_forward_of_all(module, inputs):
        trial.see("master", safe_get_full_fp32_param(module.layers[3].weight))
        if trial.seen_steps:
            moment = safe_get_full_optimizer_state(module.layers[0].weight, "exp_avg")
            trial.see("moment", moment)

    trial.seen_steps = 0
    engine.module.register_forward_pre_hook(before_forward_of_all)
    for layer in engine.module.layers:
        layer.register_forward_pre_hook(before_forward)
        layer.register_full_backward_hook(after_backward)
        layer.weight.register_hook(lambda grad: trial.see("gradient of a weight", grad))
    for _ in range(3):
        engine.backward(fit_noise(engine, trial.generator))
        trial.see("gradient", [safe_get_full_grad(p) for p in engine.module.parameters()])
        engine.step()
        trial.seen_steps += 1
        trial.see("scaled gradient", [safe_get_full_grad(p) for p in engine.module.parameters()])


@CASES.add("hooks that change outputs and gradients")
def changing_hooks(trial):
    engine = trial.open()
    layers = engine.module.layers
    layers[0].register_forward_hook(lambda module, inputs, out: out * module.weight.mean())
    layers[1].register_full_backward_hook(lambda module, grads, _: (grads[0] * 0.5,))
    layers[2].weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    layers[3].bias.register_hook(lambda grad: torch.zeros_like(grad))
    trial.train(engine)


def generate(trial, make, **options):
    """While the update is in flight, by a model in eval mode without gradients."""
    engine = trial.open(make(), MODEL, tile_numel=2048)
    tokens = torch.arange(1, 2 * LENGTH + 1).reshape(2, LENGTH).to(engine.device) % VOCAB_SIZE
    for step in range(2):
        trial.micro_step(engine, predict_tokens)
        trial.hold(engine)
        trial.micro_step(engine, predict_tokens)
        trial.let_go(engine)
        engine.eval()
        with torch.no_grad():
            options = {"max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0} | options
            options |= {"return_dict_in_generate": True, "output_logits": True}
            found = engine.module.generate(
                tokens, attention_mask=torch.ones_like(tokens), **options
            )
            trial.see(f"tokens after step {step}", found.sequences)
            trial.see("logits of new tokens", list(found.logits))
            trial.see("logits", engine(input_ids=tokens, labels=tokens).logits)
        engine.train()
    trial.train(engine, predict_tokens, steps=1)


for name, make, options, ranks in (
    ("Llama, greedy", llama, {"do_sample": False}, (1, 2)),
    ("GPT-2, sampled", gpt2, {"do_sample": True, "top_k": 8}, (1,)),
    ("Mixtral, greedy", mixtral, {"do_sample": False}, (1, 2)),
    ("T5, beams", t5, {"num_beams": 2, "do_sample": False}, (1,)),
):
    CASES.add(f"generate, {name}", ranks)(functools.partial(generate, make=make, **options))


@CASES.add("evaluation in the middle of a window, update in flight", (1, 2))
def evaluate_mid_window(trial):
    """Once under inference_mode, once with gradients that nobody uses."""

    def evaluate(engine, micro_step):
        probe = torch.full((2, WIDTH), 0.1, dtype=torch.bfloat16, device=engine.device)
        engine.eval()
        with torch.inference_mode() if micro_step % 2 else torch.no_grad():
            trial.see("evaluated", engine(probe))
        engine.train()

    trial.train(trial.open(case=PLAIN), before=evaluate)
