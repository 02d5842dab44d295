"""Compiled models: the bits of stock, and no graph broken where stock breaks none."""

import functools

import torch
from engines import STRIDE, Case, Net, differences, play, play_late
from rows import Rows
from seams import Wait
from torch._dynamo.utils import counters

ROWS = Rows({"stride 2": STRIDE})
run = ROWS.run


class PlainNet(Net):
    """Layers that can be compiled as one."""

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


def compile_each_layer(engine):
    for layer in engine.module.layers:
        layer.compile(backend="aot_eager")


WAYS = {
    "engine.compile()": lambda engine: engine.compile(backend="aot_eager"),
    "every layer compiled": compile_each_layer,
    "inductor": lambda engine: engine.compile(backend="inductor"),
}


def train_compiled(trial, compile_it):
    torch._dynamo.reset()
    counters.clear()
    engine = trial.open(Case(make=PlainNet))
    compile_it(engine)
    trial.train(engine)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0
    trial.see("graphs", graphs)
    trial.see("breaks between them", sum(counters["graph_break"].values()))


def gather_too_early(_folder, compile_it):
    """The negative control: without the wait of just-in-time forward the result differs."""
    act = functools.partial(train_compiled, compile_it=compile_it)
    assert differences(play_late(act, STRIDE, {Wait.WEIGHTS_READY}), play(act, None)) != []


for name, compile_it in WAYS.items():
    ROWS.compare(name, compile_it=compile_it)(train_compiled)
    ROWS.check(f"{name}, weights gathered too early", compile_it=compile_it)(gather_too_early)
