"""Ulysses sequence parallelism and pipelines on two ranks; write what was found as JSON.

Run as every rank of a job of two: ``parallelism_worker.py OUT``. Not a test itself.
"""

import json
import os
import sys
import threading
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
from deepspeed import comm as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups

sys.path.insert(0, str(Path(__file__).parent))
import equality_worker as equality
from equality_cases import WIDTH, Case

import deep_optimizer_states
from deep_optimizer_states.adapter import steppers
from deep_optimizer_states.core.device.base import Wait
from deep_optimizer_states.core.device.emulated import Faults

BATCH_OF_ONE_REPLICA = {"train_batch_size": 4 * 2}
"""Both ranks work on the same sequences, so that only one of them counts for the batch."""
HEADS, HEAD_WIDTH = 4, 8
POLICIES = {name: equality.POLICIES[name] for name in ("stride 2", "ratio 0.5", "dynamic")}


class Attention(torch.nn.Module):
    """Attention of this rank's heads over whole sequences; (batch, sequence, head, width)."""

    def forward(self, query, key, value):
        inputs = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        return torch.nn.functional.scaled_dot_product_attention(*inputs).transpose(1, 2)


class SequenceParallelNet(torch.nn.Module):
    """Each rank holds half of every sequence, and for attention half of the heads."""

    skipped = ()

    def __init__(self, group=None):
        super().__init__()
        heads_width = HEADS * HEAD_WIDTH
        self.inputs = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * heads_width) for _ in range(3))
        self.attentions = torch.nn.ModuleList(
            DistributedAttention(Attention(), group, scatter_idx=2, gather_idx=1) for _ in range(3)
        )
        self.outputs = torch.nn.ModuleList(torch.nn.Linear(heads_width, WIDTH) for _ in range(3))

    def forward(self, x):
        for inner, attention, outer in zip(self.inputs, self.attentions, self.outputs, strict=True):
            projections = inner(x).reshape(1, len(x), 3, HEADS, HEAD_WIDTH).unbind(2)
            x = x + outer(attention(*projections, 0).reshape(len(x), -1))
        return x


def make_sequence_parallel(block, by_mesh):
    """An engine over one replica of two ranks, told of them by a mesh or by DeepSpeed's ``mpu``."""
    torch.manual_seed(3)
    if by_mesh:
        model, told = SequenceParallelNet(), {"mesh_param": (1, 2)}
    else:
        model = SequenceParallelNet(parallel_state_sp.get_sequence_parallel_group())
        told = {"mpu": parallel_state_sp}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=equality.ds_config(Case(config=BATCH_OF_ONE_REPLICA), block),
        **told,
    )
    for attention in model.attentions:
        attention.spg = groups._get_sequence_parallel_group()
    return engine


def run_sequence_parallel(block, by_mesh, faults=None):
    steppers.faults_for_tests = faults
    engine = make_sequence_parallel(block, by_mesh)
    try:
        assert engine.sequence_parallel_size == dist.get_world_size() == 2
        return (*equality.train(engine, Case()), []), equality.state_of(engine)
    finally:
        engine.destroy()
        steppers.faults_for_tests = None


def compare_sequence_parallel(report):
    parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size=2)
    for told, by_mesh in (("mpu", False), ("mesh", True)):
        stock = run_sequence_parallel(None, by_mesh)
        for policy, block in POLICIES.items():
            ours = run_sequence_parallel(block, by_mesh, Faults(jitter_s=0.0005))
            report[f"{told} | {policy}"] = equality.differences(ours, stock)
    too_early = Faults(without=frozenset({Wait.WEIGHTS_READY}))
    with equality.late():
        ours = run_sequence_parallel(POLICIES["stride 2"], True, too_early)
    report["weights gathered too early"] = equality.differences(ours, stock)


def make_pipeline(stage, block):
    """A pipeline of two stages, one for each rank."""
    torch.manual_seed(3)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    loss = torch.nn.MSELoss()
    model = PipelineModule(layers, num_stages=2, loss_fn=loss, partition_method="uniform")
    changes = {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}}
    config = equality.ds_config(Case(config={**BATCH_OF_ONE_REPLICA, **changes}), block)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def refusal_of_a_pipeline(stage, block):
    try:
        make_pipeline(stage, block)
    except Exception as error:  # noqa: BLE001 - the answer is what it says
        return f"{type(error).__name__}: {error}"
    return "no error"


def losses_of_a_pipeline():
    generator = torch.Generator().manual_seed(5)
    batches = [
        tuple(torch.randn(4, WIDTH, generator=generator).bfloat16() for _ in range(2))
        for _ in range(2 * 3)
    ]
    engine, data = make_pipeline(1, None), iter(batches)
    try:
        return [engine.train_batch(data).item() for _ in range(3)]
    finally:
        engine.destroy()


def lanes():
    return sorted(t.name for t in threading.enumerate() if "deep_optimizer_states" in t.name)


def main():
    out = Path(sys.argv[1])
    equality.make_engines_cheaper()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    block = POLICIES["stride 2"]
    report = {"stock, stage 3": refusal_of_a_pipeline(3, None)}
    report["stock's losses"] = losses_of_a_pipeline()
    deep_optimizer_states.install()
    report["losses after install()"] = losses_of_a_pipeline()
    report["stage 1"] = refusal_of_a_pipeline(1, block)
    report["stage 3"] = refusal_of_a_pipeline(3, block)
    report["lanes after refusals"] = lanes()
    report["sequences"] = {}
    compare_sequence_parallel(report["sequences"])
    out.with_suffix(f".{os.environ['RANK']}.json").write_text(json.dumps(report))
    equality.leave()


if __name__ == "__main__":
    main()
