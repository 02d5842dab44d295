"""Rank of the tests of reductions and of few bits: two gloo ranks, all cases in one start.

    python peers_worker.py OUT

Writes ``OUT/RANK.pt``, results by name.
"""

import io
import sys
from pathlib import Path

import torch
from compression_worker import Pipeline
from torch import distributed as dist, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd

from optimus_cc import GradientReduction, Kind, Settings, Stage, Traffic
from optimus_cc.selective import compressor

SHAPES = ((24, 16), (24, 16), (40, 30), (7,))
ITERATIONS = 5
RANK = 3


def local_gradients(rank, iteration, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * iteration + rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def settings(method, **others):
    return Settings(
        grad_comp=True,
        grad_comp_method=method,
        grad_comp_rank=RANK,
        grad_comp_warm_up=0.0,
        **others,
    )


def reduced(group, method, first=0, state=None, spoil=None, dtype=torch.float32, **others):
    """Reduce made-up gradients for some iterations; ``spoil``: after which one is made infinite."""
    rank, traffic = group.rank(), Traffic()
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    reduction = GradientReduction(
        parameters,
        Stage(0, 2, group),
        settings(method, **others),
        num_iterations=ITERATIONS,
        traffic=traffic,
    )
    if state is not None:
        reduction.load_state_dict(state)
    seen, states = [], []
    for iteration in range(first, ITERATIONS):
        for parameter, gradient in zip(
            parameters, local_gradients(rank, iteration, dtype), strict=True
        ):
            parameter.grad = gradient
        if iteration == spoil and rank == 1:
            parameters[0].grad[3, 3] = torch.inf
        traffic.reset()
        reduction.reduce()
        seen.append([p.grad.clone() for p in parameters])
        file = io.BytesIO()  # a state as a checkpoint keeps it
        torch.save(reduction.state_dict(), file)
        states.append(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    return {"seen": seen, "states": states, "bytes": traffic.sent[Kind.GRADIENTS].sent_bytes}


def continued(group, method, **others):
    """A run, and another that takes its state up after two iterations."""
    whole = reduced(group, method, **others)
    rest = reduced(group, method, first=2, state=whole["states"][1], **others)
    forgetful = reduced(group, method, first=2, **others)
    return whole | {"continued": rest["seen"], "forgetful": forgetful["seen"]}


def hook(group):
    """The same gradients by torch's hook on a module in ``DistributedDataParallel``."""
    model = nn.Linear(16, 24, bias=False)
    whole = nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=1)
    made = settings("torch-power-sgd", use_error_feedback=True)
    state = torch_power_sgd.PowerSGDState(
        process_group=group,
        matrix_approximation_rank=made.grad_comp_rank,
        start_powerSGD_iter=2,
        min_compression_rate=1,
        use_error_feedback=True,
    )
    whole.register_comm_hook(state, torch_power_sgd.powerSGD_hook)
    ours, pairs = compressor(made, group, Traffic()), []
    for iteration in range(ITERATIONS + state.start_powerSGD_iter):
        gradient = local_gradients(group.rank(), iteration)[0]
        model.weight.grad = None
        # The gradient of this product's sum is what the rank is to reduce.
        (whole(torch.eye(16)) * gradient.T).sum().backward()
        if iteration >= state.start_powerSGD_iter:
            ours.average([gradient])
            pairs.append((model.weight.grad.clone(), gradient))
    return pairs


def messages(group, method, **others):
    """Two stages: what was given to a link, and what came over it."""
    made = Settings(inter_grad_comp=True, inter_grad_comp_method=method, **others)
    pipeline = Pipeline(group, made, 4)
    result = pipeline.run(1)
    statistics = pipeline.stage.compressor.statistics
    return result | {"statistics": statistics and statistics.take()}


def main(out):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    world = dist.group.WORLD
    feedback = {"use_error_feedback": True}
    results = {"hook": hook(world)}
    for method in ("4bit", "torch-power-sgd", "power-sgd"):
        results[method] = continued(world, method, **feedback)
        results[f"{method}-no-feedback"] = reduced(world, method)
        results[f"{method}-bf16"] = reduced(world, method, dtype=torch.bfloat16, **feedback)
        results[f"{method}-spoilt"] = continued(world, method, spoil=1, **feedback)
    for method in ("hadamard-4bit", "fp8"):
        results[method] = messages(world, method, check_orth_error=True, **feedback)
    results["unchecked"] = messages(world, "fp8", **feedback)
    torch.save(results, Path(out) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
