"""A few steps of Hugging Face's Trainer on a Llama of two layers, in a program's own words.

As a program, ``tiny_llama.py FOLDER`` under ``accelerate launch``, it does not know the plugin, and
writes which optimizer it found. Not a test itself.
"""

import json
import os
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

NUM_STEPS = 6
ON_CPU = not torch.cuda.is_available()


def arguments(folder, **more):
    return TrainingArguments(
        output_dir=str(folder),
        use_cpu=ON_CPU,
        per_device_train_batch_size=2,
        max_steps=NUM_STEPS,
        learning_rate=1e-2,
        weight_decay=0.1,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **more,
    )


def trainer_of(args, callback, num_samples=4 * NUM_STEPS, hidden_size=16):
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=67,
            hidden_size=hidden_size,
            intermediate_size=44,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    tokens = torch.randint(67, (num_samples, 8), generator=torch.Generator().manual_seed(5))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return Trainer(
        model=model, args=args, train_dataset=data, eval_dataset=data[:4], callbacks=[callback]
    )


class TellOptimizer(TrainerCallback):
    """Trainer lets go of the engine at the end of training."""

    def __init__(self, folder):
        self.folder = folder
        self.trainer = None

    def on_train_end(self, args, state, control, **kwargs):
        path = Path(self.folder) / f"told.{os.environ['RANK']}.json"
        path.write_text(json.dumps(type(self.trainer.model_wrapped.optimizer).__name__))


if __name__ == "__main__":
    if ON_CPU:
        import deepspeed.ops

        # gloo does without it, and building it takes minutes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    tell = TellOptimizer(sys.argv[1])
    tell.trainer = trainer_of(arguments(sys.argv[1], bf16=True), tell)
    tell.trainer.train()
    torch.distributed.barrier()
    # Without the end of the interpreter, in which some jobs of several ranks abort, stock or not.
    os._exit(0)
