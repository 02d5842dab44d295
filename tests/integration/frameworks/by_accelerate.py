"""Training under Accelerate. Not a test itself."""

import comparison
import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.state import AcceleratorState
from torch import nn

NUM_EPOCHS = 4
SAVE_AFTER = 1
WIDTH = 37


def make_accelerator(block):
    # Accelerate keeps one plugin for the whole process.
    AcceleratorState._reset_state()
    config = comparison.ds_config(
        block,
        gradient_accumulation_steps=2,
        gradient_clipping=0.1,
        train_micro_batch_size_per_gpu="auto",
    )
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    if comparison.ON_CPU:
        # The ranks of a job without a GPU are seen only this way, and Accelerator(cpu=True) would
        # drop the plugin without a word.
        PartialState(cpu=True)
    return Accelerator(mixed_precision="bf16", deepspeed_plugin=plugin)


def prepare(accelerator):
    """Model, optimizer, loader and schedule as a user writes them, without a word of DeepSpeed."""
    torch.manual_seed(comparison.SEED)
    model = nn.Sequential(
        *[layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    )
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.8, 0.95),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: 0.8**steps)
    samples = torch.randn(40, 2, WIDTH, generator=torch.Generator().manual_seed(5))
    loader = torch.utils.data.DataLoader(samples, batch_size=2, shuffle=True)
    return accelerator.prepare(model, optimizer, loader, schedule)


def train_epoch(accelerator, parts, losses, norms):
    model, optimizer, loader, schedule = parts
    model.train()
    for sample in loader:
        with accelerator.accumulate(model):
            x, y = sample.to(accelerator.device, torch.bfloat16).unbind(1)
            loss = (model(x) - y).float().square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())


def run(block, save_to, resume_from):
    accelerator = make_accelerator(block)
    parts = prepare(accelerator)
    first = 0
    if resume_from:
        accelerator.load_state(str(resume_from))
        first = SAVE_AFTER
    losses, norms = [], []
    for epoch in range(first, NUM_EPOCHS):
        train_epoch(accelerator, parts, losses, norms)
        if save_to and epoch + 1 == SAVE_AFTER:
            accelerator.save_state(str(save_to))
    result = comparison.result_of(parts[0], losses, norms)
    accelerator.free_memory()
    return result
