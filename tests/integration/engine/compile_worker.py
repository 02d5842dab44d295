"""Train compiled models; write what differs from stock as JSON.

Run as the only rank: ``compile_worker.py OUT.json WAY...``. Not a test itself.
"""

import json
import sys
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).parent))
import equality_worker as equality
from equality_cases import Case, Net

import deep_optimizer_states
from deep_optimizer_states.adapter import steppers
from deep_optimizer_states.core.device.base import Wait
from deep_optimizer_states.core.device.emulated import Faults

CASE = Case(steps=3)
BLOCK = equality.POLICIES["stride 2"]


class PlainNet(Net):
    """Layers that can be compiled as one."""

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


def compile_engine(engine):
    engine.compile(backend="aot_eager")


def compile_each_layer(engine):
    for layer in engine.module.layers:
        layer.compile(backend="aot_eager")


def compile_with_inductor(engine):
    engine.compile(backend="inductor")


WAYS = {
    "engine.compile()": compile_engine,
    "every layer": compile_each_layer,
    "inductor": compile_with_inductor,
}


def run(compile_it, block, faults=None):
    """Results, state, and the number of graphs and of breaks between them."""
    torch._dynamo.reset()
    counters.clear()
    steppers.faults_for_tests = faults
    engine = equality.make_engine(Case(make=PlainNet), block)
    compile_it(engine)
    results = (*equality.train(engine, CASE, CASE.steps), [])
    state = equality.state_of(engine)
    engine.destroy()
    graphs = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return (results, state), graphs


def main():
    out, ways = Path(sys.argv[1]), sys.argv[2:]
    equality.make_engines_cheaper()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    deep_optimizer_states.install()
    report = {}
    for name in ways:
        stock, stock_graphs = run(WAYS[name], None)
        ours, graphs = run(WAYS[name], BLOCK, Faults(jitter_s=0.0005))
        report[name] = {
            "differences": equality.differences(ours, stock),
            "graphs": graphs,
            "stock's graphs": stock_graphs,
        }
    with equality.late():
        too_early = Faults(without=frozenset({Wait.WEIGHTS_READY}))
        ours, _ = run(WAYS[ways[-1]], BLOCK, too_early)
    report["weights gathered too early"] = equality.differences(ours, stock)
    out.write_text(json.dumps(report))
    equality.leave()


if __name__ == "__main__":
    main()
