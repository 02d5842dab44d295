"""Sentiment of film reviews under Lightning and ZeRO-3, with this project's plugin.

From the repository's root, on IMDB with RoBERTa's tokenizer (a GPU, a network) or small and
synthetic (neither)::

    python -m examples.imdb_lightning
    python -m examples.imdb_lightning --tiny
    torchrun --standalone --nproc-per-node 2 -m examples.imdb_lightning --tiny
"""

from __future__ import annotations

import argparse
import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import TQDMProgressBar

import deep_optimizer_states
from launch.frameworks.imdb import reviews
from launch.frameworks.imdb.module import (
    ReviewsData,
    SentimentEncoder,
    SentimentModule,
    Shape,
    strategy_of,
)

# The one line: without it DeepSpeed ignores the block below and runs as it comes.
deep_optimizer_states.install()

CONFIG = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    # Lightning reads this key when it tests a model that ZeRO-3 has trained.
    "zero_allow_untested_optimizer": True,
    "deep_optimizer_states": {"enabled": True},
}
TINY = Shape(hidden=64, ffn=128, layers=2, heads=4, max_length=128, dropout=0.1)


class ShowOptimizer(pl.Callback):
    """Shows that the plugin's optimizer is the one that trains."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print its class."""
        if trainer.is_global_zero:
            print("optimizer:", type(trainer.optimizers[0]).__name__)


def main() -> None:
    """Train, and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small model, synthetic reviews")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--max-steps", type=int, default=-1, help="end after so many iterations")
    given = parser.parse_args()

    pl.seed_everything(1, workers=True, verbose=False)
    on_gpu = torch.cuda.is_available()
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    found = reviews.read(reviews.prepared(reviews.SYNTHETIC if given.tiny else reviews.IMDB))
    shape = TINY if given.tiny else Shape()
    encoder = SentimentEncoder(found.vocab_size, found.pad_id, shape)
    # DeepSpeed asks for its Adam for CPUs where the optimizer's state is offloaded.
    module = SentimentModule(encoder, lr=2e-3 if given.tiny else 2e-4, on_host=True)
    data = ReviewsData(found, batch_size=32, max_length=shape.max_length)
    trainer = pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=num_ranks,
        # On a GPU this is Lightning's DeepSpeedStrategy(config=CONFIG).
        strategy=strategy_of(CONFIG, on_gpu=on_gpu, num_ranks=num_ranks),
        max_epochs=given.epochs,
        max_steps=given.max_steps,
        callbacks=[ShowOptimizer(), TQDMProgressBar(refresh_rate=10)],
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        logger=False,
    )
    trainer.fit(module, data)
    results = dict(trainer.callback_metrics)
    trainer.test(module, data, verbose=False)
    results |= trainer.callback_metrics
    if trainer.is_global_zero:
        print("data:", found.source)
        for name, value in results.items():
            print(f"{name}: {value:.4f}")


if __name__ == "__main__":
    main()
