"""Scripts of a user of Transformers, Accelerate or Lightning: ``train.py NAME INPUTS CONFIG OUT``.

The plugin comes by the line in ``main``, or by ``deep_optimizer_states run``.
"""

import json
import os
import sys
from pathlib import Path

import torch

SEED, MICRO_BATCH, STEPS, RATE = 7, 2, 6, 1e-2
HAS_GPU = torch.cuda.is_available()
ON_DEVICE = {"full_determinism": True} if HAS_GPU else {"use_cpu": True}
"""For Transformers. Without determinism a GPU has other bits in every run."""


def samples(inputs):
    """Pieces of the text, 32 tokens each."""
    from transformers import AutoTokenizer

    lines = (inputs / "text" / "train.jsonl").read_text().splitlines()
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    tokens = tokenizer("\n".join(json.loads(line)["text"] for line in lines))["input_ids"]
    pieces = torch.tensor(tokens[: len(tokens) // 32 * 32]).view(-1, 32)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def model_of(inputs):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)


def transformers(inputs, config, out):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(out),
        deepspeed=str(config),
        bf16=True,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=RATE,
        max_grad_norm=0.5,
        logging_steps=1,
        save_steps=STEPS,
        report_to="none",
        seed=SEED,
        **ON_DEVICE,
    )
    # The model is made after the arguments: ZeRO-3 then cuts it while it is read.
    Trainer(model=model_of(inputs), args=arguments, train_dataset=samples(inputs)).train()


def accelerate(inputs, config, out):
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DummyOptim, DummyScheduler, set_seed

    PartialState(cpu=not HAS_GPU)  # Accelerator(cpu=True) would drop DeepSpeed
    accelerator = Accelerator()
    set_seed(SEED, deterministic=HAS_GPU)
    model = model_of(inputs)
    optimizer = DummyOptim(model.parameters(), lr=RATE, weight_decay=0.1)
    schedule = DummyScheduler(optimizer, total_num_steps=STEPS, warmup_num_steps=2)
    loader = torch.utils.data.DataLoader(samples(inputs), batch_size=MICRO_BATCH, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    history = []
    for _, batch in zip(range(STEPS), loader, strict=False):
        loss = model(**batch).loss
        accelerator.backward(loss)
        norm = model.get_global_grad_norm()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        history.append({"loss": loss.item(), "grad_norm": float(norm)})
    accelerator.save_state(str(out))
    if accelerator.is_main_process:
        (out / "trainer_state.json").write_text(json.dumps({"log_history": history}))


def lightning(inputs, config, out):
    import lightning.pytorch as pl
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from lightning.pytorch.loggers import CSVLogger

    if HAS_GPU:
        from lightning.pytorch.strategies import DeepSpeedStrategy as Strategy
    else:
        from launch.frameworks.imdb.module import CpuDeepSpeedStrategy as Strategy

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model_of(inputs)

        def training_step(self, batch, batch_idx):
            loss = self.model(**batch).loss
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.log("grad_norm", float(self.trainer.model.get_global_grad_norm()))

        def configure_optimizers(self):
            return DeepSpeedCPUAdam(self.parameters(), lr=RATE, weight_decay=0.1)

    pl.seed_everything(SEED)
    given = json.loads(config.read_text())
    block = given.pop("deep_optimizer_states")
    strategy = Strategy(**given)
    strategy.config["deep_optimizer_states"] = block
    trainer = pl.Trainer(
        accelerator="gpu" if HAS_GPU else "cpu",
        deterministic=HAS_GPU,
        devices=int(os.environ["RANKS"]),
        strategy=strategy,
        precision="bf16-mixed",
        max_steps=STEPS,
        gradient_clip_val=0.5,
        log_every_n_steps=1,
        logger=CSVLogger(out, name="log", version=0),
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    loader = torch.utils.data.DataLoader(samples(inputs), batch_size=MICRO_BATCH)
    trainer.fit(Module(), loader)
    trainer.save_checkpoint(out / "checkpoint")


if __name__ == "__main__":
    if os.environ.get("WITH_PLUGIN"):
        import deep_optimizer_states.installed  # noqa: F401
    name, *paths = sys.argv[1:]
    {"transformers": transformers, "accelerate": accelerate, "lightning": lightning}[name](
        *map(Path, paths)
    )
