"""Training under Lightning. Not a test itself."""

import os

import comparison
import lightning.pytorch as pl
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn

from deep_optimizer_states.config import BLOCK
from launch.frameworks.imdb.module import CpuDeepSpeedStrategy

NUM_EPOCHS = 3
WIDTH = 37
NUM_RANKS = int(os.environ["WORLD_SIZE"])
"""Read here: Lightning takes the variable away when a trainer ends."""


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.losses, self.norms = [], []

    def loss_of(self, batch):
        x, y = batch.unbind(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x - y).float().square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.norms.append(self.trainer.model.get_global_grad_norm())

    def validation_step(self, batch, batch_idx):
        self.log("validation_loss", self.loss_of(batch), sync_dist=True)

    def configure_optimizers(self):
        optimizer = DeepSpeedCPUAdam(self.parameters(), lr=1e-2, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.6)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class SaveAfterFirstEpoch(pl.Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_end(self, trainer, module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.folder)


class KeepResult(pl.Callback):
    """Reads the result before Lightning takes the strategy down."""

    result = None

    def on_train_end(self, trainer, module):
        self.result = comparison.result_of(trainer.model, module.losses, module.norms)


def make_trainer(strategy, **given):
    return pl.Trainer(
        accelerator="cpu" if comparison.ON_CPU else "gpu",
        devices=NUM_RANKS,
        strategy=strategy,
        precision="bf16-mixed",
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        **given,
    )


STRATEGY = CpuDeepSpeedStrategy if comparison.ON_CPU else DeepSpeedStrategy


def batches(number):
    """Load so many batches of two samples."""
    samples = torch.randn(20, 2, WIDTH, generator=torch.Generator().manual_seed(5))
    return torch.utils.data.DataLoader(samples[: 2 * number], batch_size=2)


def run(block, save_to, resume_from):
    pl.seed_everything(comparison.SEED)
    keep = KeepResult()
    saving = [SaveAfterFirstEpoch(save_to)] if save_to else []
    trainer = make_trainer(
        STRATEGY(config=comparison.ds_config(block)),
        max_epochs=NUM_EPOCHS,
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
        callbacks=[keep, *saving],
        default_root_dir=save_to or resume_from,
    )
    trainer.fit(Module(), batches(10), batches(2), ckpt_path=resume_from)
    return keep.result


def run_preset(config, block, folder):
    """A few steps with the arguments of Lightning's strategy that a preset names."""
    pl.seed_everything(comparison.SEED)
    strategy, keep = STRATEGY(**config), KeepResult()
    if block:
        strategy.config[BLOCK] = block
    trainer = make_trainer(
        strategy, max_steps=6, gradient_clip_val=0.5, callbacks=[keep], default_root_dir=folder
    )
    trainer.fit(Module(), batches(10))
    return keep.result
