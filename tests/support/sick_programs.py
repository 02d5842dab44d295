"""Small training jobs that fall ill, or stay well: ``python sick_programs.py NAME``.

Each really causes what it is named after, on a CPU; ``sick_runs.py`` starts them, keeps the logs.
"""

import os
import resource
import signal
import sys
import time

STEPS = 24


def without_shared_memory_op():
    """DeepSpeed would compile it for a minute, and only for ranks on one machine."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def deepspeed_engine(config=None, make=None, lr=0.05):
    import deepspeed
    import torch
    from deepspeed.utils.logging import set_log_level_from_string

    set_log_level_from_string("info")
    without_shared_memory_op()
    torch.manual_seed(0)
    model = make() if make else torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 4))
    table = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 5,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "SGD", "params": {"lr": lr}},
    }
    table |= config or {}
    if "fp16" not in table:
        table["bf16"] = {"enabled": True}
    engine, *_ = deepspeed.initialize(model=model, config=table)
    return engine


def loop(engine, loss_of, steps=STEPS, norms=False):
    import torch

    generator = torch.Generator().manual_seed(1)
    fixed = torch.randn(64, 16, generator=generator)
    weight = torch.randn(16, 4, generator=generator)
    for step in range(1, steps + 1):
        at = (4 * step) % 60
        inputs = fixed[at : at + 4].to(next(engine.module.parameters()).dtype)
        targets = (inputs.float() @ weight).to(inputs.dtype)
        loss = loss_of(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        norm = engine.get_global_grad_norm() if norms else None
        more = "" if norm is None else f" grad norm: {float(norm):.4f}"
        print(f"step {step} loss: {loss.item():.6f}{more}", flush=True)


def mse(outputs, targets):
    return ((outputs.float() - targets.float()) ** 2).mean()


def ds_healthy():
    loop(deepspeed_engine({"gradient_clipping": 5.0}), mse, norms=True)


def fp16(power):
    return {"fp16": {"enabled": True, "initial_scale_power": power, "hysteresis": 1}}


def ds_healthy_fp16():
    """A scale that is too high at first: a part of fp16, not an illness."""
    loop(deepspeed_engine(fp16(24)), mse)


def ds_overflow_min():
    """Infinite gradients: the scale falls to its minimum, where DeepSpeed gives up."""
    loop(deepspeed_engine(fp16(4)), lambda outputs, _: outputs.float().exp().mean() * 1e30)


def ds_overflow_high():
    loop(deepspeed_engine(fp16(60)), mse)


def ds_norm_nan():
    """A loss that looks fine, the square root of 0 among it."""
    loop(
        deepspeed_engine(),
        lambda outputs, targets: mse(outputs, targets) + (outputs.float() * 0).sum().sqrt(),
        norms=True,
    )


def ds_loss_nan():
    loop(deepspeed_engine(lr=1e30), mse, steps=12)


def ds_frozen():
    import torch

    engine = deepspeed_engine(lr=0.0)
    inputs = torch.randn(4, 16).bfloat16()
    for step in range(1, STEPS + 1):
        loss = mse(engine(inputs), torch.ones(4, 4))
        engine.backward(loss)
        engine.step()
        print(f"step {step} loss: {loss.item():.6f}", flush=True)


def ds_diverging():
    loop(deepspeed_engine({"gradient_clipping": 20.0}, lr=0.6), mse)


def ds_clip_always():
    loop(deepspeed_engine({"gradient_clipping": 0.001}), mse, norms=True)


def ds_clip_never():
    loop(deepspeed_engine({"gradient_clipping": 1000.0}), mse, norms=True)


def ds_step_over_half():
    import torch

    engine = deepspeed_engine(
        {
            "wall_clock_breakdown": True,
            "steps_per_print": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": True},
        },
        lambda: torch.nn.Sequential(
            torch.nn.Linear(16, 4096), torch.nn.Linear(4096, 2048), torch.nn.Linear(2048, 4)
        ),
    )
    loop(engine, mse, steps=8)


def ds_buckets():
    zero = {"stage": 2, "reduce_bucket_size": 1e9, "contiguous_gradients": False}
    loop(deepspeed_engine({"zero_optimization": zero | {"overlap_comm": False}}), mse)


def ds_batch_sizes():
    """Sizes that do not agree: 10 is not 4 x 2 x 1."""
    deepspeed_engine({"train_batch_size": 10, "gradient_accumulation_steps": 2})


def ds_micro_batch_zero():
    """One sample an update cannot be shared out among two micro-batches."""
    sizes = {"train_batch_size": 1, "gradient_accumulation_steps": 2}
    deepspeed_engine({**sizes, "train_micro_batch_size_per_gpu": None})


def ds_cannot_allocate():
    import torch

    engine = deepspeed_engine()
    loop(engine, mse, steps=4)
    used = 4 << 30
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), used + (4 << 30)))
    print("Saving model checkpoint", flush=True)
    held = [torch.ones(1 << 28) for _ in range(64)]
    print(len(held))


def memory_error():
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    print("Loading checkpoint shards:   0%|          | 0/4 [00:00<?, ?it/s]", flush=True)
    bytearray(8 << 30)


def killed():
    """As the kernel does it when host memory is out."""
    engine = deepspeed_engine()
    loop(engine, mse, steps=6)
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at_setup():
    deepspeed_engine()
    os.kill(os.getpid(), signal.SIGKILL)


def abort_at_exit():
    loop(deepspeed_engine(), mse)
    print("[after training ends] datetime: 2026-01-01 00:00:00", flush=True)
    os.abort()


def gloo(seconds=5):
    import datetime

    import torch

    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))
    return torch.distributed.get_rank()


def collective_timeout():
    import torch

    rank = gloo()
    for step in range(1, 7):
        loss = torch.tensor(2.0 / step)
        if rank == 1 and step == 5:
            time.sleep(60)
        torch.distributed.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss: {loss.item():.6f}", flush=True)


def rank_missing():
    """A rank that never comes to the first meeting."""
    import datetime

    import torch

    torch.distributed.TCPStore("127.0.0.1", 29611, 2, True, datetime.timedelta(seconds=4))


def experts():
    """Each rank uses another expert: under ZeRO-3 they wait for each other's weights in vain."""
    import datetime

    import deepspeed
    import torch

    class TinySparseMoeBlock(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))

        def forward(self, inputs):
            return self.experts[torch.distributed.get_rank()](inputs)

    without_shared_memory_op()
    deepspeed.init_distributed("gloo", timeout=datetime.timedelta(seconds=8))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine = deepspeed_engine(
        {"zero_optimization": zero},
        lambda: torch.nn.Sequential(TinySparseMoeBlock(), torch.nn.Linear(16, 4)),
    )
    print(engine.module, flush=True)
    loop(engine, mse)


def recompiles():
    import torch

    @torch.compile(backend="eager", dynamic=False)
    def loss_of(inputs):
        return (inputs**2).mean()

    for step in range(1, 16):
        loss = loss_of(torch.ones(step + 2) / step)
        print(f"step {step} loss: {loss.item():.6f}", flush=True)


def ops_recompile():
    """The same op with other flags: torch builds it again under another name."""
    import tempfile
    from pathlib import Path

    from torch.utils.cpp_extension import load

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "tiny_op.cpp"
        source.write_text('extern "C" int tiny() { return 1; }')
        for flag in ("-O0", "-O1"):
            load("tiny_op", str(source), extra_cflags=[flag], build_directory=folder,
                 is_python_module=False, verbose=True)  # fmt: skip
    for step in range(1, 10):
        print(f"step {step} loss: {2 / step:.6f}", flush=True)


def threads_of_loader():
    import torch

    loader = torch.utils.data.DataLoader(torch.arange(8.0), num_workers=os.cpu_count() * 8)
    print(len(loader))
    for step in range(1, 10):
        print(f"step {step} loss: {2 / step:.6f}", flush=True)


def threads_of_openmp():
    import torch

    for step in range(1, 4):
        print(f"step {step} loss: {2 / step:.6f}", flush=True)
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    torch.set_num_threads(512)
    (torch.ones(1 << 22) * 2).sum()


def one_thread_for_offload():
    import torch

    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    adam = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}
    table = {"zero_optimization": zero, "optimizer": adam}
    table["zero_force_ds_cpu_optimizer"] = False
    loop(deepspeed_engine(table), mse)
    torch.distributed.destroy_process_group()


def dropped_gradients():
    """Needs a release that drops them; ``DEEPSPEED_0_18`` names its unpacked folder."""
    sys.path.insert(0, os.environ["DEEPSPEED_0_18"])
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    adam = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}
    table = {"zero_optimization": zero, "optimizer": adam, "gradient_accumulation_steps": 4}
    table["zero_force_ds_cpu_optimizer"] = False
    loop(deepspeed_engine(table), mse, norms=True)


def unknown_failure():
    engine = deepspeed_engine()
    loop(engine, mse, steps=4)
    {}["labels"]


def shared_memory():
    import torch

    class Large(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.ones(1 << 20)

    print("***** Running training *****", flush=True)
    for batch in torch.utils.data.DataLoader(Large(), batch_size=4, num_workers=1):
        print(batch.shape)


def hf_trainer(loss_of=None, steps=STEPS, data=None, **options):
    import tempfile

    import torch
    import transformers

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(16, 4)

        def forward(self, inputs, labels=None):
            outputs = self.layer(inputs)
            return {"loss": (loss_of or mse)(outputs, labels), "logits": outputs}

    generator = torch.Generator().manual_seed(1)
    rows = [{"inputs": torch.randn(16, generator=generator)} for _ in range(64)]
    weight = torch.randn(16, 4, generator=generator)
    rows = [row | {"labels": row["inputs"] @ weight} for row in rows]
    rows = [rows[0]] * 64 if data == "one" else rows
    defaults = {"learning_rate": 0.05, "optim": "sgd", "lr_scheduler_type": "constant"}
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=steps,
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            per_device_train_batch_size=4,
            **(defaults | options),
        )
        print(f"max_grad_norm={arguments.max_grad_norm}", flush=True)
        transformers.Trainer(Model(), arguments, train_dataset=rows).train()


def hf_healthy():
    hf_trainer(max_grad_norm=5.0)


def hf_nan():
    hf_trainer(
        lambda outputs, _: mse(outputs, outputs.detach() + 1) * (outputs.sum() * 0 - 1).sqrt()
    )


def hf_norm_nan():
    hf_trainer(lambda outputs, targets: mse(outputs, targets) + (outputs * 0).sum().sqrt())


def hf_nan_unfiltered():
    infinite = float("inf")
    hf_trainer(
        lambda outputs, _: outputs.sum() * infinite - outputs.sum() * infinite,
        logging_nan_inf_filter=False,
    )


def hf_frozen():
    hf_trainer(learning_rate=0.0, data="one")


def hf_diverging():
    hf_trainer(learning_rate=1.5, max_grad_norm=0.0)


def hf_clip_always():
    hf_trainer(max_grad_norm=0.01)


def hf_overflow(level="info"):
    from deepspeed.utils.logging import set_log_level_from_string

    set_log_level_from_string(level)
    table = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": True, "initial_scale_power": 60, "hysteresis": 1},
    }  # fmt: skip
    without_shared_memory_op()
    hf_trainer(deepspeed=table, log_level="info", fp16=True)


def hf_overflow_silent():
    """DeepSpeed says nothing below a warning unless it is told to."""
    hf_overflow("warning")


def lightning_run(loss_of, lr, data=None, rich=False):
    import lightning
    import torch

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(16, 4)

        def training_step(self, batch, index):
            inputs, targets = batch
            loss = loss_of(self.layer(inputs), targets)
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=lr)

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(96, 16, generator=generator)
    inputs = inputs[:1].expand(96, 16) if data == "one" else inputs
    targets = inputs @ torch.randn(16, 4, generator=generator)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), 4)
    from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        callbacks=[RichProgressBar() if rich else TQDMProgressBar()],
    )  # fmt: skip
    trainer.fit(Module(), loader)


def lightning_healthy():
    lightning_run(mse, 0.05)


def lightning_rich():
    lightning_run(mse, 0.05, rich=True)


def lightning_nan():
    lightning_run(lambda outputs, targets: mse(outputs, targets) * 1e30, 1e20)


def lightning_frozen():
    lightning_run(mse, 0.0, "one")


def lightning_diverging():
    lightning_run(mse, 1.2)


if __name__ == "__main__":
    globals()[sys.argv[-1]]()
