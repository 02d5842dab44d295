"""What each session runs: a program's command line, the presets, and errors that are expected."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

from presets import ACCELERATE_3, CPU, NO_OFFLOAD, OWN_ADAM, PRESETS, changed
from train import HAS_GPU, ON_DEVICE

import deep_optimizer_states

TRAIN, FILES = str(Path(__file__).with_name("train.py")), ("inputs", "ds.json", "out")
STEPS = 6
RUN = [sys.executable, "-m", "deep_optimizer_states", "run"]
HUGGING_FACE = {
    "deepspeed": "ds.json",
    "output_dir": "out",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": STEPS,
    "learning_rate": 1e-2,
    "max_grad_norm": 0.5,
    "logging_steps": 1,
    "save_steps": STEPS,
    "bf16": True,
    "report_to": "none",
    **ON_DEVICE,
}
"""What LLaMA-Factory, ms-swift and TRL hand on to Transformers."""


@dataclasses.dataclass
class Run:
    """One start of a program, in a folder that holds ``inputs`` and the config ``ds.json``."""

    ranks: int
    with_plugin: bool
    folder: Path

    def write(self, name, **values):
        (self.folder / name).write_text(json.dumps(values))  # JSON is YAML

    def launch_yaml(self):
        config = {"deepspeed_config_file": "ds.json", "zero3_init_flag": True}
        ranks = {"num_machines": 1, "num_processes": self.ranks}
        self.write("launch.yaml", distributed_type="DEEPSPEED", deepspeed_config=config, **ranks)

    def by_run(self, words):
        return [*RUN, *words] if self.with_plugin else words

    @property
    def by_line(self):
        return {"WITH_PLUGIN": "1"} if self.with_plugin else {}


def options(given):
    return [text for name, value in given.items() for text in (f"--{name}", str(value))]


def llamafactory(run):
    own = {"stage": "sft", "do_train": True, "finetuning_type": "full", "template": "default"}
    data = {"dataset_dir": "inputs", "dataset": "ours", "cutoff_len": 64}
    run.write("train.yaml", model_name_or_path="inputs/model", **own, **data, **HUGGING_FACE)
    words = run.by_run(["llamafactory-cli", "train", "train.yaml"])
    return words, {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(run.ranks)}


def axolotl(run):
    text = {"path": "inputs/text/train.jsonl", "ds_type": "json", "type": "completion"}
    own = {"base_model": "inputs/model", "datasets": [text], "dataset_prepared_path": "prepared"}
    sizes = {"sequence_len": 64, "micro_batch_size": 2, "val_set_size": 0}
    optimizer = {"optimizer": "adamw_torch", "lr_scheduler": "cosine"}
    not_its = (*ON_DEVICE, "report_to", "per_device_train_batch_size")
    given = {name: value for name, value in HUGGING_FACE.items() if name not in not_its}
    if run.with_plugin:
        own["plugins"] = ["deep_optimizer_states.axolotl.DeepOptimizerStatesPlugin"]
    run.write("train.yaml", **own, **sizes, **optimizer, **given)
    launcher = ["--launcher", "torchrun", "--", f"--nproc-per-node={run.ranks}"]
    return ["axolotl", "train", "train.yaml", *launcher], {"AXOLOTL_DO_NOT_TRACK": "1"}


def ms_swift(run):
    words = "swift sft --model inputs/model --model_type llama --template default --tuner_type full"
    words += " --torch_dtype bfloat16 --dataset inputs/text/train.jsonl --add_version false"
    file = Path(deep_optimizer_states.__file__).with_name("installed.py")
    by_file = ["--external_plugins", str(file)] if run.with_plugin else []
    words = [*words.split(), *options(HUGGING_FACE), *by_file]
    return words, {"NPROC_PER_NODE": str(run.ranks)}


def trl(run):
    run.launch_yaml()
    words = "trl sft --accelerate_config launch.yaml --model_name_or_path inputs/model"
    words += " --dataset_name inputs/text --max_length 64"
    given = {name: value for name, value in HUGGING_FACE.items() if name != "deepspeed"}
    return run.by_run([*words.split(), *options(given)]), {}


def transformers(run):
    words = ["torchrun", "--nproc-per-node", str(run.ranks), TRAIN, "transformers", *FILES]
    return words, run.by_line


def accelerate(run):
    run.launch_yaml()
    words = ["accelerate", "launch", "--config_file", "launch.yaml", TRAIN, "accelerate", *FILES]
    return run.by_run(words), {}


def lightning(run):
    words = [sys.executable, TRAIN, "lightning", *FILES]
    return words, {"RANKS": str(run.ranks), **run.by_line}


@dataclasses.dataclass(frozen=True)
class Program:
    """A program's command line, and the presets that its users have.

    ``shipped`` says where the installed package has a preset's file. Of the others
    tests/support/presets.py has the text and names its source.
    """

    command: Callable
    presets: dict
    shipped: dict = dataclasses.field(default_factory=dict)


def those(*names):
    return {name: PRESETS[name].config for name in names}


def without_offload_param(name):
    return {f"{name}, parameters not offloaded": changed(PRESETS[name].config, ("offload_param",))}


def in_bf16(config):
    return changed(config, ("fp16",)) | {"bf16": {"enabled": True}}


LF, SWIFT, HF = "LLaMA-Factory z3 offload", "ms-swift zero3_offload", "Transformers ZeRO-3"
AXOLOTL = "axolotl zero3_bf16_cpuoffload_all, DeepSpeed's Adam"
TRL, TEMPLATE = "TRL zero3, optimizer on the CPU", "Accelerate stage3 offload"
LIGHTNING = "Lightning deepspeed_stage_3_offload"
PROGRAMS = {
    "llamafactory": Program(
        llamafactory,
        those(LF, f"{LF}, parameters on the GPU", "LLaMA-Factory z2 offload"),
    ),
    "axolotl": Program(
        axolotl,
        those("axolotl zero3_bf16_cpuoffload_all", AXOLOTL, "axolotl zero2")
        | without_offload_param(AXOLOTL),
    ),
    "ms-swift": Program(
        ms_swift,
        those(SWIFT, "ms-swift zero2_offload") | without_offload_param(SWIFT),
        {
            SWIFT: "swift/config/zero3_offload.json",
            "ms-swift zero2_offload": "swift/config/zero2_offload.json",
        },
    ),
    "trl": Program(
        trl,
        those("TRL zero3", TRL)
        | {
            "TRL zero3, both on the CPU": changed(PRESETS[TRL].config, offload_param=CPU),
            "TRL zero2, optimizer on the CPU": changed(
                PRESETS[TRL].config,
                ("offload_param", "stage3_gather_16bit_weights_on_model_save"),
                stage=2,
            ),
        },
    ),
    "transformers": Program(
        transformers,
        those(HF, "Transformers ZeRO-2") | without_offload_param(HF),
    ),
    "accelerate": Program(
        accelerate,
        those(TEMPLATE)
        | {
            f"{TEMPLATE}, in bf16": in_bf16(ACCELERATE_3),
            f"{TEMPLATE}, in bf16, parameters not offloaded": in_bf16(
                changed(ACCELERATE_3, ("offload_param",))
            ),
            "Accelerate stage2 offload, DeepSpeed's Adam, in bf16": in_bf16(
                PRESETS["Accelerate stage2 offload, DeepSpeed's Adam"].config
            ),
        },
    ),
    "lightning": Program(
        lightning,
        those(LIGHTNING, "Lightning deepspeed_stage_2_offload")
        | {
            f"{LIGHTNING}, parameters not offloaded": PRESETS[LIGHTNING].config
            | {"offload_parameters": False}
        },
    ),
}

NO_DEVICE = "RuntimeError: Cannot access accelerator device when none is available."
NO_FP16 = "ValueError: Type fp16 is not supported on your device."
DROPS = (
    "UnsupportedDeepSpeedError: DeepSpeed 0.18.9 at zero_optimization.stage = 2: with the "
    "optimizer on the CPU, its stages 1 and 2 drop gradients of all micro-batches of a window but "
    "one (DeepSpeed's pull requests 7967 and 7981); install 0.19.5 or newer, or set the stage to 3"
)
REFUSES = 'ConfigError: "deep_optimizer_states"'
EXPECTED = {
    ("trl", "TRL zero3"): ("", f"{REFUSES} does not work with {NO_OFFLOAD}"),
    ("axolotl", "axolotl zero3_bf16_cpuoffload_all"): (
        "",
        f"{REFUSES} works on DeepSpeedCPUAdam; {OWN_ADAM}",
    ),
    ("axolotl", "axolotl zero2"): ("", DROPS),
}
"""Program, preset and, where they differ in it, number of ranks -> the last line of the error under
stock and under the plugin; empty where there is none. Everything else has to train with equal bits.
"""
if not HAS_GPU:
    EXPECTED[("axolotl", "axolotl zero2", 2)] = (NO_DEVICE, NO_DEVICE)  # wants a GPU
    EXPECTED[("accelerate", TEMPLATE)] = (NO_FP16, NO_FP16)
