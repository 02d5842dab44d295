"""Adversarial uses of parameters: by turns, twice, detached, late, tied, and saved while tied."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from adversary_calls import predict_tokens
from adversary_trial import NOTHING_PERSISTS, WIDTH, Net, Registry
from equality_cases import Case
from safetensors.torch import load_file
from small_models import gpt2

CASES = Registry()
PLAIN = Case(zero=NOTHING_PERSISTS)
NUM_WORDS = 40


class OrderedNet(Net):
    """Calls its layers in ``order``, some of them ``detached``: without gradients."""

    def __init__(self):
        super().__init__()
        self.order = range(4)
        self.detached = ()

    def forward(self, x):
        for idx in self.order:
            with torch.set_grad_enabled(idx not in self.detached):
                y = self.layers[idx](x)
            x = torch.tanh(y) + x
        return x


def train_by_turns(trial, turns, **attributes):
    """Each micro-batch sets the model's attributes to those of its turn."""

    def choose(engine, micro_step):
        for name, values in attributes.items():
            setattr(engine.module, name, values[micro_step // turns % len(values)])

    trial.train(trial.open(OrderedNet(), PLAIN), steps=4, before=choose)


@CASES.add("layers in another order each micro-batch", (1, 2))
def orders(trial):
    """The order of use that the first iteration saw is never seen again."""
    train_by_turns(trial, 1, order=((0, 1, 2, 3), (3, 1, 0, 2), (2, 0, 1, 3), (3, 2, 1, 0)))


@CASES.add("layers used twice or thrice in one forward", (1, 2))
def used_twice(trial):
    train_by_turns(trial, 2, order=((0, 1, 0, 2, 3), (0, 0, 1, 2, 3, 3), (3, 2, 1, 0, 1, 2, 3)))


@CASES.add("layers used without gradients by turns", (1, 2))
def detached(trial):
    train_by_turns(trial, 1, detached=((), (1,), (1, 2), (), (2,)))


@CASES.add("a layer first used at step 3", (1, 2))
def used_late(trial):
    without = (0, 1, 3)
    train_by_turns(trial, 1, order=(without, without, without, without, range(4), range(4)))


@CASES.add("a layer used twice, once detached", (1, 2))
def used_beside_itself(trial):
    class Both(Net):
        def forward(self, x):
            with torch.no_grad():
                x = x + self.layers[2](x)
            x = super().forward(x)
            return x + self.layers[0](x.detach()) + torch.tanh(self.layers[1](x)).detach()

    trial.train(trial.open(Both(), PLAIN), steps=4)


@CASES.add("tied weights, first used by the module of the other group", (1, 2))
def tied_over_groups(trial):
    model = Net()
    model.layers[3].weight = model.layers[0].weight
    model.layers[2].bias = model.layers[1].bias

    def groups(model):
        first, second, third, last = model.layers
        return [
            {"params": [third.weight, last.bias, last.weight], "lr": 1e-3},
            {"params": [second.weight, third.bias, first.bias], "betas": (0.5, 0.9)},
        ]

    trial.train(trial.open(model, Case(groups=groups, zero=NOTHING_PERSISTS)), steps=4)


class Words(torch.nn.Module):
    """An embedding that is the head too, and whose first row gets no gradient as an embedding."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(NUM_WORDS, WIDTH, padding_idx=0)
        self.inner = Net()
        self.head = torch.nn.Linear(WIDTH, NUM_WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        return self.head(self.inner(self.words(tokens)))


@CASES.add("a tied embedding with padding_idx", (1, 2))
def padded_words(trial):
    def predict(engine, generator):
        tokens = torch.randint(0, 5, (2, 6), generator=generator).to(engine.device)
        logits = engine(tokens).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    trial.train(trial.open(Words()), predict)


@CASES.add("save_pretrained of tied weights, update in flight", (1, 2))
def save_pretrained(trial):
    zero = {"sub_group_size": 1000, "reduce_bucket_size": 8000, **NOTHING_PERSISTS}
    engine = trial.open(gpt2(), Case(accumulation=1, zero=zero), tile_numel=2048)
    for _ in range(2):
        trial.hold(engine)
        trial.micro_step(engine, predict_tokens)
        trial.let_go(engine)
        weights = engine._zero3_consolidated_16bit_state_dict()
        if not weights:  # a rank that saves nothing
            continue
        with TemporaryDirectory() as folder:
            engine.module.save_pretrained(folder, state_dict=weights)
            saved = load_file(Path(folder) / "model.safetensors")
        for name, weight in sorted(saved.items()):
            trial.see(name, weight)
