"""Ulysses sequence parallelism and pipelines, on two ranks."""

import functools

import deepspeed
import seams
import torch
from deepspeed import comm as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups
from engines import (
    POLICIES,
    STRIDE,
    WIDTH,
    Case,
    answer,
    differences,
    ds_config,
    lanes_left,
    play_late,
)
from rows import Rows, stock_of
from seams import Wait

ROWS = Rows({name: POLICIES[name] for name in ("stride 2", "ratio 0.5", "dynamic")})
run = ROWS.run
# Both ranks work on the same sequences, so that only one of them counts for the batch.
BATCH_OF_ONE_REPLICA = {"train_batch_size": 4 * 2}
HEADS, HEAD_WIDTH = 4, 8


def make_pipeline(stage, block):
    """A pipeline of two stages, one for each rank."""
    torch.manual_seed(3)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    loss = torch.nn.MSELoss()
    model = PipelineModule(layers, num_stages=2, loss_fn=loss, partition_method="uniform")
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    config = ds_config(Case(config={**BATCH_OF_ONE_REPLICA, "zero_optimization": zero}), block)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def refusal(stage, block):
    return answer(lambda: make_pipeline(stage, block))


@ROWS.check("pipelines", 2)  # first: nothing is installed yet
def pipelines(_folder):
    """Refused as by stock, or by name."""
    of_stock = refusal(3, None)
    seams.install()
    assert "ZeRO-3 are incompatible with pipeline" in of_stock
    assert refusal(3, STRIDE) == of_stock
    by_name = refusal(1, STRIDE)
    assert by_name.startswith("ConfigError")
    assert "PipelineModule" in by_name
    assert lanes_left() == []


class Attention(torch.nn.Module):
    """Attention of this rank's heads over whole sequences; (batch, sequence, head, width)."""

    def forward(self, query, key, value):
        inputs = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        return torch.nn.functional.scaled_dot_product_attention(*inputs).transpose(1, 2)


class SequenceParallelNet(torch.nn.Module):
    """Each rank holds half of every sequence, and for attention half of the heads."""

    def __init__(self, group=None):
        super().__init__()
        width = HEADS * HEAD_WIDTH
        self.inputs = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * width) for _ in range(3))
        self.attentions = torch.nn.ModuleList(
            DistributedAttention(Attention(), group, scatter_idx=2, gather_idx=1) for _ in range(3)
        )
        self.outputs = torch.nn.ModuleList(torch.nn.Linear(width, WIDTH) for _ in range(3))

    def forward(self, x):
        for inner, attention, outer in zip(self.inputs, self.attentions, self.outputs, strict=True):
            projections = inner(x).reshape(1, len(x), 3, HEADS, HEAD_WIDTH).unbind(2)
            x = x + outer(attention(*projections, 0).reshape(len(x), -1))
        return x


@functools.cache
def make_groups():
    parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size=2)


def split_sequences(trial, by_mesh):
    """One replica of two ranks."""
    make_groups()
    group = None if by_mesh else parallel_state_sp.get_sequence_parallel_group()
    told = {"mesh_param": (1, 2)} if by_mesh else {"mpu": parallel_state_sp}
    model = SequenceParallelNet(group)
    engine = trial.open(Case(config=BATCH_OF_ONE_REPLICA), model, **told)
    for attention in model.attentions:
        attention.spg = groups._get_sequence_parallel_group()
    assert engine.sequence_parallel_size == dist.get_world_size() == 2
    trial.train(engine, 5)


told_by_mesh = functools.partial(split_sequences, by_mesh=True)
# mpu first: DeepSpeed keeps groups of an earlier one, here those of the pipeline.
ROWS.compare("sequence parallelism told by mpu", 2, by_mesh=False)(split_sequences)
ROWS.compare("sequence parallelism told by a mesh", 2)(told_by_mesh)


@ROWS.check("sequence parallelism, weights gathered too early", 2)
def gather_too_early(_folder):
    """The negative control: without the wait of just-in-time forward the result differs."""
    late = play_late(told_by_mesh, STRIDE, {Wait.WEIGHTS_READY})
    assert differences(late, stock_of(told_by_mesh)) != []
