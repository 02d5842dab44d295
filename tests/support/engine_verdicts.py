"""Makes an engine of each configuration, and says what stopped it, what its buckets took and more.

A JSON array of configurations comes in, an array of ``[error, bytes, learning rates]`` goes out,
for one process that imports DeepSpeed once. The weights are few, so that whatever is large is a
buffer. The rates are those of the optimizer and of the one for a share on the GPU, after a step.
"""

import json
import logging
import os
import sys

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


class Looking:
    """The most that an optimizer's buckets held whenever they were looked at."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.most = 0

    def look(self, *_):
        held = 0
        for bucket in getattr(self.optimizer, "ipg_buckets", {}).values():
            buffers = bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
            held += sum(b.numel() * b.element_size() for b in buffers if b is not None)
        self.most = max(self.most, held)


def verdict(config):
    import deepspeed
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    try:
        engine, *_ = deepspeed.initialize(model=model, config=config)
    except Exception as error:  # noqa: BLE001 - whatever it raises
        return [str(error) or type(error).__name__, 0, []]
    looking = Looking(engine.optimizer)
    looking.look()
    try:
        step(engine, looking)
    except Exception as error:  # noqa: BLE001 - whatever it raises
        return [str(error) or type(error).__name__, 0, []]
    both = (engine.optimizer, getattr(engine.optimizer, "backup_optimizer", None))
    rates = [optimizer.param_groups[0]["lr"] for optimizer in both if optimizer]
    engine.destroy()
    return ["", looking.most, rates]


def step(engine, looking):
    import torch

    inputs = torch.ones(1, 8, dtype=next(engine.module.parameters()).dtype, requires_grad=True)
    # The first layer's input gets its gradient last, when every bucket was made.
    inputs.register_hook(looking.look)
    engine.backward(engine(inputs).float().sum())
    engine.step()


def main():
    configs = json.load(sys.stdin)
    import deepspeed

    logging.disable(logging.CRITICAL)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    print(f"\n{json.dumps([verdict(config) for config in configs])}", flush=True)


if __name__ == "__main__":
    main()
