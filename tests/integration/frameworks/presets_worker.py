"""Train presets under the frameworks that they are for, stock and with the plugin.

``presets_worker.py OUT.json``, as the only rank, writes what became of each preset. Not a test
itself.
"""

import contextlib
import copy
import json
import os
import sys
import tempfile
from pathlib import Path

import comparison
import lightning.pytorch as pl
import lightning_worker
import tiny_llama
import torch
import trainer_worker
from accelerate.state import AcceleratorState
from deepspeed.accelerator import get_accelerator
from presets import EQUAL, PRESETS

import deep_optimizer_states
from deep_optimizer_states.config import BLOCK
from deep_optimizer_states.errors import DeepOptimizerStatesError

OUR_BLOCK = {"enabled": True, "policy": "dynamic", "tile_numel": 256}
"""Tiles so small that both lanes have several of this model."""
CONFIG_FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
USE_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"


@contextlib.contextmanager
def as_accelerate_launch_does(config, folder):
    """Hand a config over in the variables that ``accelerate launch`` sets for the ranks."""
    path = Path(folder) / "ds_config.json"
    path.write_text(json.dumps(config))
    os.environ |= {USE_DEEPSPEED: "true", CONFIG_FILE: str(path)}
    try:
        yield
    finally:
        for name in (USE_DEEPSPEED, CONFIG_FILE):
            os.environ.pop(name, None)  # Trainer takes the first away itself


def train_with_trainer(preset, block, folder):
    """The result of a few steps of Hugging Face's Trainer."""
    config = copy.deepcopy(preset.config) | ({BLOCK: block} if block else {})
    AcceleratorState._reset_state()
    with contextlib.ExitStack() as stack:
        given = {"deepspeed": config}
        if preset.door == "accelerate":
            stack.enter_context(as_accelerate_launch_does(config, folder))
            given = {}
        return _train(preset, given, folder)


def _train(preset, given, folder):
    torch.manual_seed(comparison.SEED)
    precision = "fp16" if preset.fp16 else "bf16"
    args = tiny_llama.arguments(folder, seed=comparison.SEED, **{precision: True}, **given)
    keep = trainer_worker.KeepEngine()
    keep.trainer = tiny_llama.trainer_of(args, keep)
    keep.trainer.model.register_forward_hook(
        lambda _module, _args, out: keep.losses.append(out.loss.item())
    )
    keep.trainer.train()
    return keep.result


def train_with_lightning(preset, block, folder):
    """The result of a few steps of Lightning's Trainer."""
    pl.seed_everything(comparison.SEED)
    kind = (
        lightning_worker.CpuDeepSpeedStrategy
        if comparison.ON_CPU
        else lightning_worker.DeepSpeedStrategy
    )
    strategy = kind(**preset.config)
    if block:
        strategy.config[BLOCK] = block
    keep = lightning_worker.KeepResult()
    trainer = pl.Trainer(
        accelerator="cpu" if comparison.ON_CPU else "gpu",
        devices=1,
        strategy=strategy,
        precision="bf16-mixed",
        max_steps=tiny_llama.NUM_STEPS,
        gradient_clip_val=0.5,
        callbacks=[keep],
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
    )
    samples = torch.randn(20, 2, 37, generator=torch.Generator().manual_seed(5))
    trainer.fit(lightning_worker.Module(), torch.utils.data.DataLoader(samples, batch_size=2))
    return keep.result


def outcome_of(preset):
    """``EQUAL``, what is not equal, or the line by which the plugin refuses."""
    train = train_with_lightning if preset.door == "lightning" else train_with_trainer
    with tempfile.TemporaryDirectory() as folder:
        try:
            ours = train(preset, OUR_BLOCK, folder)
        except DeepOptimizerStatesError as error:
            return f"{type(error).__name__}: {error}"
        stock = train(preset, None, folder)
    assert ours.optimizer.startswith("Interleaved"), ours.optimizer
    assert stock.optimizer.startswith("DeepSpeed"), stock.optimizer
    assert min(len(set(stock.losses)), len(set(stock.norms))) > 3, (stock.losses, stock.norms)
    # Of an update that was never made, as where fp16 skips every one, nothing would be shown.
    assert any(moment.any() for name, moment in stock.state.items() if name.startswith("exp_avg/"))
    return comparison.differences(ours, stock) or EQUAL


if __name__ == "__main__":
    comparison.make_quick()
    if get_accelerator().device_name() == "cpu":
        # DeepSpeed's CPU accelerator says no to fp16 on most processors, and torch computes in it
        # on all of them.
        type(get_accelerator()).is_fp16_supported = lambda _: True
    deep_optimizer_states.install()
    chosen = sys.argv[2:] or PRESETS
    report = {name: outcome_of(PRESETS[name]) for name in chosen}
    Path(sys.argv[1]).write_text(json.dumps(report, indent=1))
    # Without the end of the interpreter, in which some jobs abort, stock or not.
    os._exit(0)
