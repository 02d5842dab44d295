"""Adversarial models: adapters, experts, odd sizes, weights of other modules."""

import functools

import deepspeed
import torch
from adversary_trial import NOTHING_PERSISTS, WIDTH, Net, Registry
from deepspeed.utils import set_z3_leaf_modules
from equality_cases import Case
from small_models import Adapted

CASES = Registry()


def adapted_net():
    model = Net()
    model.requires_grad_(False)
    model.layers = torch.nn.ModuleList(Adapted(layer, 3) for layer in model.layers)
    return model


SMALL_GROUPS = Case(zero={"sub_group_size": 50})


@CASES.add("LoRA, merged into the frozen weights after a step", (1, 2))
def lora(trial):
    """The merge stays: no master weights write over a frozen parameter."""

    def merge(engine, micro_step):
        if micro_step != 3:
            return
        for layer in engine.module.layers:
            weights = layer.parameters_of_all()
            with deepspeed.zero.GatheredParameters(weights, modifier_rank=0), torch.no_grad():
                weights[0].add_(weights[1] @ weights[2])

    trial.train(trial.open(adapted_net(), SMALL_GROUPS), steps=4, after=merge)


class Experts(torch.nn.Module):
    """Each sample goes to one expert of those allowed; the choice is the router's."""

    def __init__(self, num_experts=4):
        super().__init__()
        self.router = torch.nn.Linear(WIDTH, num_experts)
        self.experts = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH) for _ in range(num_experts)
        )
        self.allowed = range(num_experts)

    def forward(self, x):
        weights = self.router(x).softmax(-1)[:, list(self.allowed)]
        best, choice = weights.max(-1)
        out = torch.zeros_like(x)
        for position, idx in enumerate(self.allowed):
            chosen = choice == position
            if chosen.any():
                out[chosen] = best[chosen, None] * torch.tanh(self.experts[idx](x[chosen]))
        return x + out


class ExpertNet(Net):
    """One layer of experts among the others."""

    def __init__(self):
        super().__init__(num_layers=3)
        self.layers[1] = Experts()


@CASES.add("experts by turns", (1, 2))
def experts_by_turns(trial):
    """An expert is used in all micro-batches of a window and on every rank, or in none."""

    def choose(engine, micro_step):
        engine.module.layers[1].allowed = ((0,), (1,), (0,), (3,), (1,))[micro_step // 2]

    trial.train(trial.open(ExpertNet()), steps=5, before=choose)


@CASES.add("experts in a leaf module", (1, 2))
def leaf_experts(trial):
    """What the router does not choose gets zeros, on each rank others."""
    model = ExpertNet()
    set_z3_leaf_modules(model, [Experts])
    trial.train(trial.open(model), steps=4)


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


def train_odd_sizes(trial, tile_numel, **zero):
    trial.train(trial.open(OddSizes(), Case(zero=zero), tile_numel=tile_numel))


for name, tile_numel, zero, ranks in (
    ("a subgroup for each parameter", 16, {"sub_group_size": 2}, (1, 2)),
    ("nothing persists", 48, {"sub_group_size": 4, **NOTHING_PERSISTS}, (1,)),
    (
        "a bucket below every parameter",
        112,
        {"sub_group_size": 3, "reduce_bucket_size": 5},
        (1, 2),
    ),
):
    CASES.add(f"odd sizes, {name}", ranks)(
        functools.partial(train_odd_sizes, tile_numel=tile_numel, **zero)
    )


class UsesOthersWeights(Net):
    """Computes with weights of modules that it does not call."""

    def __init__(self, registers):
        super().__init__()
        if registers:
            deepspeed.zero.register_external_parameter(self, self.layers[2].weight)
            deepspeed.zero.register_external_parameter(self, self.layers[3].bias)

    def forward(self, x):
        x = torch.nn.functional.linear(x, self.layers[2].weight, self.layers[3].bias)
        x = self.layers[0](x) + x
        x = torch.tanh(self.layers[2](x)) @ self.layers[1].weight.t()
        return self.layers[3](x) + self.layers[1].bias


@CASES.add("external parameters, registered", (1, 2))
def external_registered(trial):
    trial.train(trial.open(UsesOthersWeights(True), Case(zero=NOTHING_PERSISTS)))


@CASES.add("external parameters, found by DeepSpeed")
def external_found(trial):
    trial.train(trial.open(UsesOthersWeights(False), Case(zero=NOTHING_PERSISTS)))
