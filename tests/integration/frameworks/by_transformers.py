"""Training under Hugging Face's Trainer. Not a test itself."""

import os

import comparison
import tiny_llama
import torch
from transformers import TrainerCallback, TrainingArguments

# Not a multiple of micro-batch x accumulation: an epoch ends with a short window.
NUM_SAMPLES = 11 * int(os.environ["WORLD_SIZE"])
SAVE_AFTER = 5


class KeepEngine(TrainerCallback):
    """Reads the result before Trainer lets go of the engine."""

    def __init__(self):
        self.trainer, self.result, self.losses = None, None, []

    def on_train_end(self, args, state, control, **kwargs):
        norms = [entry["grad_norm"] for entry in state.log_history if "grad_norm" in entry]
        self.result = comparison.result_of(self.trainer.model_wrapped, self.losses, norms)


def train(args, num_samples=4 * tiny_llama.NUM_STEPS, hidden_size=16, resume_from=None):
    """Train a tiny Llama; the result."""
    torch.manual_seed(comparison.SEED)
    keep = KeepEngine()
    keep.trainer = trainer = tiny_llama.trainer_of(args, keep, num_samples, hidden_size)
    trainer.model.register_forward_hook(
        lambda _module, _args, out: keep.losses.append(out.loss.item())
    )
    trainer.train(resume_from_checkpoint=resume_from)
    return keep.result


def run(block, save_to, resume_from):
    automatic = (
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    config = comparison.ds_config(block, **dict.fromkeys(automatic, "auto"))
    config["zero_optimization"]["reduce_bucket_size"] = "auto"
    args = TrainingArguments(
        output_dir=str(save_to or resume_from.with_name("resumed")),
        deepspeed=config,
        use_cpu=comparison.ON_CPU,
        bf16=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_grad_norm=0.5,
        num_train_epochs=3,
        learning_rate=1e-2,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=SAVE_AFTER,
        logging_steps=1,
        seed=comparison.SEED,
        report_to="none",
        disable_tqdm=True,
    )
    checkpoint = resume_from and str(resume_from / f"checkpoint-{SAVE_AFTER}")
    return train(args, NUM_SAMPLES, hidden_size=32, resume_from=checkpoint)
