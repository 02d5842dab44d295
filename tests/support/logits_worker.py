"""Rank that trains ``PORT:RUN_JSON...`` in turn and leaves what each trained model answers.

``logits.pt`` in a run's folder then has ``tokens`` (samples, sequence) and the ``logits`` of all of
them (samples, sequence, padded vocabulary), as stages and shards compute them together.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from launch.trainer.recorder import Recorder
from launch.trainer.runfile import ranks_from_environment, read_run_file


def main(arguments):
    from launch.trainer.loop import iterate
    from launch.trainer.pipeline_adapter import PipelineAdapter
    from launch.trainer.runtime import distributed_pipeline

    for argument in arguments:
        port, _, path = argument.partition(":")
        os.environ["MASTER_PORT"] = port
        ranks = ranks_from_environment(os.environ)
        run = read_run_file(Path(path))
        with Recorder(run, ranks, {}) as recorder, distributed_pipeline(run.point, ranks) as device:
            adapter = PipelineAdapter(run, device, recorder)
            iterate(run, adapter, recorder)
            leave_logits(adapter, Path(path).with_name("logits.pt"))


@torch.no_grad()
def leave_logits(adapter, path):
    from megatron.core.pipeline_parallel.schedules import (
        forward_backward_pipelining_without_interleaving,
    )

    point = adapter.point
    length = point.model.seq_length
    generator = torch.Generator().manual_seed(7)
    size = (point.micro_batch_size, length)
    tokens = torch.randint(point.model.vocab_size, size, generator=generator)
    positions = torch.arange(length).expand(size)
    answers = []

    def step(_batches, model):
        answers.append(model(tokens, positions, adapter.mask))
        return answers[-1], lambda output: (output.sum(), {})

    forward_backward_pipelining_without_interleaving(
        forward_step_func=step,
        data_iterator=None,
        model=adapter.model,
        num_microbatches=1,
        seq_length=length,
        micro_batch_size=point.micro_batch_size,
        forward_only=True,
        p2p_communicator=adapter.communicator,
        pg_collection=adapter.groups,
    )
    groups = adapter.groups
    if not adapter.part.is_last or groups.dp.rank():
        return
    parts = [torch.empty_like(answers[0]) for _ in range(groups.tp.size())]
    dist.all_gather(parts, answers[0].contiguous(), group=groups.tp)
    if groups.tp.rank() == 0:
        torch.save({"tokens": tokens, "logits": torch.cat(parts, dim=-1)}, path)


if __name__ == "__main__":
    main(sys.argv[1:])
