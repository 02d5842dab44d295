"""Rank of the tests on torch alone, not a test itself: four gloo ranks, all cases in one start.

    python compression_worker.py OUT

Writes ``OUT/RANK.pt``, results by name.
"""

import sys
from pathlib import Path
from unittest import mock

import torch
from later import Later
from torch import distributed as dist, nn

from optimus_cc import (
    GradientReduction,
    Kind,
    Settings,
    SettingsError,
    Stage,
    Traffic,
    traffic as traffic_module,
)

pipelining, compressed = Later("torch.distributed.pipelining"), Later("optimus_cc.pipelining")
HIDDEN, NARROW, TOKENS = 16, 4, 32
CPU = torch.device("cpu")


class Bottleneck(nn.Module):
    """Hidden units through a narrow layer, so that its input's gradient has the narrow rank."""

    def __init__(self):
        super().__init__()
        self.down = nn.Linear(HIDDEN, NARROW)
        self.up = nn.Linear(NARROW, HIDDEN)

    def forward(self, x):
        return torch.tanh(self.up(torch.tanh(self.down(x))))


class Pipeline:
    """A pipeline over some ranks, its data, and what its messages were."""

    def __init__(self, ranks, settings, num_micro_batches, dtype=torch.float32, kind="1F1B"):
        """``ranks``: a process group of the pipeline's stages."""
        self.stages, self.index = ranks.size(), ranks.rank()
        torch.manual_seed(0)
        modules = [Bottleneck().to(dtype) for _ in range(self.stages)]
        self.module = modules[self.index]
        self.traffic = Traffic()
        self.stage = compressed.CompressedStage(
            self.module, self.index, self.stages, CPU, settings, traffic=self.traffic, group=ranks
        )
        self.given, self.received = [], []
        if dtype is torch.float32:
            self._record()
        schedule = getattr(pipelining, f"Schedule{kind}")
        self.schedule = schedule(self.stage, num_micro_batches, loss_fn=nn.functional.mse_loss)
        self.batch = (num_micro_batches * TOKENS, HIDDEN)
        self.dtype = dtype

    def _record(self):
        compress, restore = self.stage.compressor.compress, self.stage.compressor.restore

        def recorded_compress(gradient, in_epilogue, stream=0):
            self.given.append(gradient.clone())
            return compress(gradient, in_epilogue, stream)

        def recorded_restore(*arguments):
            gradient = restore(*arguments)
            self.received.append(gradient.clone())
            return gradient

        self.stage.compressor.compress = recorded_compress
        self.stage.compressor.restore = recorded_restore

    def iteration(self, seed):
        self.module.zero_grad()
        data = torch.randn(2, *self.batch, generator=torch.Generator().manual_seed(seed))
        inputs, targets = data.to(self.dtype)
        arguments = (inputs,) if self.index == 0 else ()
        last = self.index == self.stages - 1
        losses = []
        self.schedule.step(
            *arguments, target=targets if last else None, losses=losses if last else None
        )
        return [loss.item() for loss in losses]

    def run(self, iterations=2):
        losses = [self.iteration(seed) for seed in range(iterations)]
        sent = self.traffic.sent[Kind.BACKWARD]
        return {
            "stage": self.index,
            "losses": losses,
            "gradients": [p.grad.clone() for p in self.module.parameters()],
            "messages": sent.messages,
            "compressed": sent.compressed,
            "bytes": sent.sent_bytes,
            "forward_bytes": self.traffic.sent[Kind.FORWARD].sent_bytes,
            "given": self.given,
            "received": self.received,
            "error": self.stage.compressor.error((TOKENS, HIDDEN)),
        }


def backward(rank, **settings):
    return Settings(inter_grad_comp=True, inter_grad_comp_rank=rank, **settings)


def pipelines(groups):
    """Every case of backpropagation over two and four stages."""
    four = groups["four"]
    late = backward(2, inter_grad_comp_epilogue_only=True)
    results = {
        "whole": Pipeline(four, Settings(), 8).run(),
        "full": Pipeline(four, backward(HIDDEN), 8).run(),
        "narrow": Pipeline(four, backward(NARROW), 8).run(),
        "below": Pipeline(four, backward(NARROW - 1), 8).run(),
        "lep": Pipeline(four, backward(2, use_error_feedback=True), 8).run(),
        "no-lep": Pipeline(four, backward(2), 8).run(),
        "compression-time": compression_time(four),
        "whole-bf16": Pipeline(four, Settings(), 8, torch.bfloat16).run(),
        "narrow-bf16": Pipeline(four, backward(NARROW), 8, torch.bfloat16).run(),
    }
    for group in (groups["two"], four):
        for count in (4, 8):
            results[f"late-{group.size()}-{count}"] = Pipeline(group, late, count).run(1)
        results[f"late-{group.size()}-gpipe"] = Pipeline(group, late, 6, kind="GPipe").run(1)
    return results


def compression_time(ranks):
    """Of an iteration, on a clock that stands still but while messages are made and restored."""
    pipeline = Pipeline(ranks, backward(2), 8)
    pipeline.traffic._device = CPU
    clock = mock.Mock(now=0.0, perf_counter=lambda: clock.now)

    def slow(call, seconds):
        def slower(*arguments):
            clock.now += seconds
            return call(*arguments)

        return slower

    compressor = pipeline.stage.compressor
    compressor.compress = slow(compressor.compress, 1.0)
    compressor.restore = slow(compressor.restore, 100.0)
    with mock.patch.object(traffic_module, "time", clock):
        pipeline.iteration(0)
        return pipeline.traffic.seconds()


def refusals():
    """What a stage of an interleaved schedule is told."""
    try:
        compressed.CompressedStage(Bottleneck(), 0, 8, CPU, backward(2))
    except SettingsError as error:
        return str(error)
    return ""


def local_gradient(rank, iteration):
    generator = torch.Generator().manual_seed(1000 * iteration + rank)
    return torch.randn((24, HIDDEN), generator=generator)


def selective(rank, group, stage=0, iterations=6, **others):
    """Reduce made-up gradients of two matrices and a vector for some iterations."""
    settings = Settings(grad_comp=True, grad_comp_rank=3, grad_comp_warm_up=0.34, **others)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((24, HIDDEN), (24, HIDDEN), (5,))]
    traffic = Traffic()
    reduction = GradientReduction(
        parameters, Stage(stage, 2, group), settings, num_iterations=iterations, traffic=traffic
    )
    reduced, sent_bytes, compressed = [], [], []
    for iteration in range(iterations):
        for number, parameter in enumerate(parameters):
            gradient = local_gradient(rank, iteration) + number
            parameter.grad = gradient[:5, 0].clone() if number == 2 else gradient
        traffic.reset()
        reduction.reduce()
        reduced.append([p.grad.clone() for p in parameters])
        sent_bytes.append(traffic.sent[Kind.GRADIENTS].sent_bytes)
        compressed.append(traffic.sent[Kind.GRADIENTS].compressed)
    return {"reduced": reduced, "bytes": sent_bytes, "compressed": compressed}


def main(out):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.group.WORLD
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    results = pipelines({"two": pairs[rank // 2], "four": world})
    results |= {
        "interleaved": refusals(),
        "sc": selective(rank, world),
        "sc-other-stage": selective(
            rank, world, stage=1, selective_grad_comp=True, selective_grad_comp_way=1
        ),
    }
    torch.save(results, Path(out) / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
