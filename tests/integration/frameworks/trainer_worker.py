"""Train under Hugging Face's Trainer, stock and with each policy. Not a test itself."""

import comparison
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import deep_optimizer_states

# Not a multiple of micro-batch x accumulation: an epoch ends with a short window.
NUM_SAMPLES = 22
SAVE_AFTER = 5


class KeepEngine(TrainerCallback):
    """Reads the result before Trainer lets go of the engine."""

    def __init__(self):
        self.trainer = None
        self.result = None
        self.losses = []

    def on_train_end(self, args, state, control, **kwargs):
        norms = [entry["grad_norm"] for entry in state.log_history if "grad_norm" in entry]
        self.result = comparison.result_of(self.trainer.model_wrapped, self.losses, norms)


def arguments(block, folder):
    config = comparison.ds_config(
        block,
        train_micro_batch_size_per_gpu="auto",
        gradient_accumulation_steps="auto",
        gradient_clipping="auto",
    )
    config["zero_optimization"]["reduce_bucket_size"] = "auto"
    return TrainingArguments(
        output_dir=str(folder),
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


def run(block, save_to, resume_from):
    torch.manual_seed(comparison.SEED)
    args = arguments(block, save_to or resume_from.with_name("resumed"))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=67,
            hidden_size=32,
            intermediate_size=44,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    tokens = torch.randint(67, (NUM_SAMPLES, 12), generator=torch.Generator().manual_seed(5))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    keep = KeepEngine()
    model.register_forward_hook(lambda _module, _args, out: keep.losses.append(out.loss.item()))
    keep.trainer = trainer = Trainer(
        model=model, args=args, train_dataset=data, eval_dataset=data[:4], callbacks=[keep]
    )
    checkpoint = resume_from and str(resume_from / f"checkpoint-{SAVE_AFTER}")
    trainer.train(resume_from_checkpoint=checkpoint)
    return keep.result


if __name__ == "__main__":
    comparison.make_quick()
    deep_optimizer_states.install()
    comparison.compare(run)
