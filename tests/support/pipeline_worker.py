"""Rank of the pipeline trainer's tests: trains ``PORT:RUN_JSON[=RUN_TO_CONTINUE]...`` in turn.

Starting a process takes longer than a tiny training does. A run that the user has to mend leaves
its message in ``refused`` in its folder. One that saves checkpoints leaves what the trained model
answers in ``logits.pt``: ``tokens`` (samples, sequence) and the ``logits`` of all of them (samples,
sequence, padded vocabulary), as stages and shards compute them together.
"""

import os
import sys
from pathlib import Path

from configs.errors import ConfigError
from launch.train_loop.checkpoint import find_checkpoint
from launch.train_loop.runfile import ranks_from_environment, read_run_file


def main(arguments):
    from launch.train_loop import pipeline_adapter

    adapter = pipeline_adapter.PipelineAdapter
    results = adapter.results
    adapter.results = lambda self: leave_logits(self) or results(self)
    for argument in arguments:
        port, _, words = argument.partition(":")
        path, _, start = words.partition("=")
        os.environ["MASTER_PORT"] = port
        ranks, folder = ranks_from_environment(os.environ), Path(path).parent
        os.chdir(folder)
        try:
            checkpoint = find_checkpoint(Path(start)).path if start else None
            pipeline_adapter.train(read_run_file(Path(path), checkpoint), ranks)
        except ConfigError as error:
            if ranks.is_first:
                (folder / "refused").write_text(str(error))


def leave_logits(adapter):
    import torch
    import torch.distributed as dist
    from megatron.core.pipeline_parallel.schedules import (
        forward_backward_pipelining_without_interleaving,
    )

    point, groups, answers = adapter.point, adapter.groups, []
    if not point.save_interval:
        return
    length = point.model.seq_length
    size = (point.micro_batch_size, length)
    tokens = torch.randint(point.model.vocab_size, size, generator=torch.Generator().manual_seed(7))

    def step(_batches, model):
        answers.append(model(tokens, torch.arange(length).expand(size), adapter.mask))
        return answers[-1], lambda output: (output.sum(), {})

    with torch.no_grad():
        forward_backward_pipelining_without_interleaving(
            forward_step_func=step,
            data_iterator=None,
            model=adapter.model,
            num_microbatches=1,
            seq_length=length,
            micro_batch_size=point.micro_batch_size,
            forward_only=True,
            p2p_communicator=adapter.communicator,
            pg_collection=groups,
        )
    if adapter.is_last and not groups.dp.rank():
        parts = [torch.empty_like(answers[0]) for _ in range(groups.tp.size())]
        dist.all_gather(parts, answers[0].contiguous(), group=groups.tp)
        if groups.tp.rank() == 0:
            torch.save({"tokens": tokens, "logits": torch.cat(parts, dim=-1)}, "logits.pt")


if __name__ == "__main__":
    main(sys.argv[1:])
