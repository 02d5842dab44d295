"""Sentiment of film reviews under Hugging Face's Trainer and ZeRO-3, with this project's plugin.

From the repository's root; ``torchrun`` also for one process, which then needs no MPI::

    torchrun --standalone --nproc-per-node 1 -m examples.hf_trainer
    torchrun --standalone --nproc-per-node 2 -m examples.hf_trainer --tiny

``"auto"`` values of the config are filled in by Trainer from its arguments, and are shown.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

import torch
from transformers import (
    RobertaConfig,
    RobertaForSequenceClassification,
    Trainer,
    TrainingArguments,
)

import deep_optimizer_states
from launch.frameworks.imdb import reviews
from launch.frameworks.imdb.module import collate

# The one line: without it DeepSpeed ignores the block below and runs as it comes.
deep_optimizer_states.install()

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    # Inside this block there is no "auto": it is the plugin's, and Trainer leaves it alone.
    "deep_optimizer_states": {"enabled": True},
}
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
TINY_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def auto_values(asked: Any, used: Any, path: str = "") -> dict[str, Any]:
    """What stands where a config said ``"auto"``, by its path: ``zero_optimization.stage``."""
    if asked == "auto":
        return {path: used}
    if not isinstance(asked, dict):
        return {}
    found: dict[str, Any] = {}
    for key, value in asked.items():
        inner = used.get(key) if isinstance(used, dict) else None
        found |= auto_values(value, inner, f"{path}.{key}".lstrip("."))
    return found


def main() -> None:
    """Train, and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small model, synthetic reviews")
    parser.add_argument("--epochs", type=float, default=5)
    parser.add_argument("--max-steps", type=int, default=-1, help="end after so many iterations")
    given = parser.parse_args()

    torch.manual_seed(1)
    data = reviews.read(reviews.prepared(reviews.SYNTHETIC if given.tiny else reviews.IMDB))
    max_length = 128 if given.tiny else 1024
    # Trainer reads the config here, before the model is made: ZeRO-3 then partitions it at once.
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(prefix="hf-trainer-"),
        deepspeed=json.loads(json.dumps(CONFIG)),
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        num_train_epochs=given.epochs,
        max_steps=given.max_steps,
        learning_rate=2e-3 if given.tiny else 2e-4,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=20,
        remove_unused_columns=False,
    )
    config = RobertaConfig(
        vocab_size=data.vocab_size,
        pad_token_id=data.pad_id,
        num_attention_heads=4 if given.tiny else 8,
        # RoBERTa counts positions from the padding's id on.
        max_position_embeddings=max_length + data.pad_id + 1,
        num_labels=2,
        **(TINY_SIZES if given.tiny else SIZES),
    )

    def batch_of(some: reviews.Split) -> dict[str, Any]:
        batch = collate(some, pad_id=data.pad_id, end_id=data.end_id, max_length=max_length)
        return {
            "input_ids": batch.tokens,
            "attention_mask": batch.mask.long(),
            "labels": batch.labels,
        }

    def accuracy(prediction: Any) -> dict[str, float]:
        hits = prediction.predictions.argmax(-1) == prediction.label_ids
        return {"accuracy": float(hits.mean())}

    trainer = Trainer(
        model=RobertaForSequenceClassification(config),
        args=arguments,
        data_collator=batch_of,
        train_dataset=data.splits["train"],
        eval_dataset=data.splits["test"],
        compute_metrics=accuracy,
    )
    trainer.train()
    found = trainer.evaluate()
    if trainer.is_world_process_zero():
        engine: Any = trainer.model_wrapped
        used = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
        print("data:", data.source)
        print("optimizer:", type(engine.optimizer).__name__)
        for path, value in auto_values(CONFIG, used).items():
            print(f"auto {path} = {value}")
        print(f"test accuracy: {found['eval_accuracy']:.4f}")


if __name__ == "__main__":
    main()
