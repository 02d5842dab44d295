"""Rank that trains ``PORT:RUN_JSON...`` in turn and leaves what each trained model answers.

``logits.pt`` in a run's folder then has ``tokens`` (samples, sequence) and the ``logits`` of all of
them (samples, sequence, padded vocabulary), as stages and shards compute them together.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from launch.trainer.metrics import MetricsFile
from launch.trainer.ranks import ranks_from_environment
from launch.trainer.runfile import read_run_file
from launch.trainer.scalars import scalars_of_run


def main(arguments):
    from launch.trainer.pipeline.loop import Training
    from launch.trainer.pipeline.runtime import distributed

    for argument in arguments:
        port, _, path = argument.partition(":")
        os.environ["MASTER_PORT"] = port
        ranks = ranks_from_environment(os.environ)
        run = read_run_file(Path(path))
        with (
            MetricsFile(None) as metrics,
            scalars_of_run(run, False, {}) as scalars,
            distributed(run.point, ranks) as device,
        ):
            training = Training(run, ranks, device)
            training.iterate(1, metrics, scalars)
            leave_logits(training.rank, Path(path).with_name("logits.pt"))


@torch.no_grad()
def leave_logits(rank, path):
    from megatron.core.pipeline_parallel.schedules import (
        forward_backward_pipelining_without_interleaving,
    )

    point = rank.point
    length = point.model.seq_length
    generator = torch.Generator().manual_seed(7)
    size = (point.micro_batch_size, length)
    tokens = torch.randint(point.model.vocab_size, size, generator=generator)
    positions = torch.arange(length).expand(size)
    answers = []

    def step(_batches, model):
        answers.append(model(tokens, positions, rank.mask))
        return answers[-1], lambda output: (output.sum(), {})

    forward_backward_pipelining_without_interleaving(
        forward_step_func=step,
        data_iterator=None,
        model=rank.model,
        num_microbatches=1,
        seq_length=length,
        micro_batch_size=point.micro_batch_size,
        forward_only=True,
        p2p_communicator=rank.communicator,
        pg_collection=rank.groups,
    )
    groups = rank.groups
    if not rank.part.is_last or groups.dp.rank():
        return
    parts = [torch.empty_like(answers[0]) for _ in range(groups.tp.size())]
    dist.all_gather(parts, answers[0].contiguous(), group=groups.tp)
    if groups.tp.rank() == 0:
        torch.save({"tokens": tokens, "logits": torch.cat(parts, dim=-1)}, path)


if __name__ == "__main__":
    main(sys.argv[1:])
