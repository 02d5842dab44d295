"""Train presets under the frameworks that they are for. Not a test itself."""

import contextlib
import json
import os
import tempfile
from pathlib import Path

import by_lightning
import by_transformers
import comparison
import tiny_llama
from accelerate.state import AcceleratorState
from deepspeed.accelerator import get_accelerator
from presets import EQUAL, PRESETS

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


def train(preset, block, folder):
    """The result of a few steps."""
    if preset.door == "lightning":
        return by_lightning.run_preset(preset.config, block, folder)
    config = json.loads(json.dumps(preset.config)) | ({BLOCK: block} if block else {})
    AcceleratorState._reset_state()
    given = {"seed": comparison.SEED, "fp16" if preset.fp16 else "bf16": True}
    if preset.door == "accelerate":
        with as_accelerate_launch_does(config, folder):
            return by_transformers.train(tiny_llama.arguments(folder, **given))
    return by_transformers.train(tiny_llama.arguments(folder, deepspeed=config, **given))


def outcome_of(preset):
    """``EQUAL``, what is not equal, or the line by which the plugin refuses."""
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


def outcomes():
    if get_accelerator().device_name() == "cpu":
        # DeepSpeed's CPU accelerator says no to fp16 on most processors, and torch computes in it
        # on all of them.
        type(get_accelerator()).is_fp16_supported = lambda _: True
    return {name: outcome_of(preset) for name, preset in PRESETS.items()}
