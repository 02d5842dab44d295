"""Trains points one after the other in this process: ``RUN_JSON[=RUN_TO_CONTINUE]...``.

Starting a process and DeepSpeed takes longer than a tiny training does. Each run's folder gets a
``result.json``, and ``logits.pt`` if the run saves checkpoints: ``tokens`` (samples, sequence) and
the trained model's ``logits`` of all of them (samples, sequence, padded vocabulary).
"""

import json
import os
import sys
from pathlib import Path

from launch.train_loop.checkpoint import find_checkpoint
from launch.train_loop.recorder import Recorder
from launch.train_loop.runfile import ranks_from_environment, read_run_file


def main(arguments):
    ranks = ranks_from_environment(os.environ)
    ranks.export(os.environ)
    from launch.train_loop.runtime import distributed

    words = [argument.partition("=")[::2] for argument in arguments]
    with distributed(read_run_file(Path(words[0][0])).point, ranks) as device:
        for path, start in words:
            checkpoint = find_checkpoint(Path(start)).path if start else None
            run = read_run_file(Path(path), checkpoint)
            result = train(run, ranks, device)
            if ranks.is_first:
                (run.run_dir / "result.json").write_text(json.dumps(result))


def train(run, ranks, device):
    from deepspeed.accelerator import get_accelerator
    from megatron.core.models.gpt import gpt_layer_specs

    from launch.train_loop.deepspeed_adapter import DeepSpeedAdapter, num_local_parameters
    from launch.train_loop.loop import iterate
    from launch.train_loop.runtime import seed_everything

    if device.type == "cpu":
        # DeepSpeed's CPU accelerator says no to fp16 on most processors, and torch computes in it
        # on all of them. The runs of other types are to be right where there is none.
        type(get_accelerator()).is_fp16_supported = lambda _: run.point.dtype == "fp16"
    seed_everything(run.point.seed)
    try:
        with Recorder(run, ranks) as recorder:
            adapter = DeepSpeedAdapter(run, device, recorder)
            iterate(run, adapter, recorder)
    except Exception as error:
        if run.point.num_ranks > 1:
            raise
        return {"error": f"{type(error).__name__}: {error}"}
    module = adapter.engine.module
    result = {
        "digests": adapter.digests(),
        "parameters": num_local_parameters(module),
        "dtype": str(next(module.parameters()).dtype),
        "apex": gpt_layer_specs.HAVE_APEX,
    }
    if run.point.save_interval and run.point.tp == 1:
        leave_logits(adapter, ranks, run.run_dir / "logits.pt")
    adapter.engine.destroy()
    return result


def leave_logits(adapter, ranks, path):
    import torch

    model = adapter.point.model
    size = (adapter.point.micro_batch_size, model.seq_length)
    tokens = torch.randint(model.vocab_size, size, generator=torch.Generator().manual_seed(7))
    positions = torch.arange(model.seq_length).expand(size)
    with torch.no_grad():  # on every rank, since under ZeRO-3 they gather the weights together
        logits = adapter.engine(tokens, positions, adapter.mask)
    if ranks.is_first:
        torch.save({"tokens": tokens, "logits": logits}, path)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
