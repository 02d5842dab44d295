"""What each session runs: a program's command line, the presets, and errors that are expected."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

from presets import ACCELERATE_3, PRESETS, changed

CPU = {"device": "cpu"}
TRAIN = Path(__file__).with_name("train.py")
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
    "use_cpu": True,
    "report_to": "none",
}
"""What LLaMA-Factory, ms-swift and TRL hand on to Transformers."""


@dataclasses.dataclass
class Run:
    """One start of a program, in a folder that holds ``inputs`` and the config ``ds.json``."""

    ranks: int
    with_plugin: bool
    folder: Path

    def write(self, name, value):
        (self.folder / name).write_text(json.dumps(value))  # JSON is YAML

    def options(self, **more):
        """Command-line options of Transformers' kind."""
        given = (HUGGING_FACE | more).items()
        return [text for name, value in given for text in (f"--{name}", str(value))]


def by_run(run, words):
    return [*RUN, *words] if run.with_plugin else words


def llamafactory(run):
    own = {
        "model_name_or_path": "inputs/model",
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset_dir": "inputs",
        "dataset": "pairs",
        "template": "default",
        "cutoff_len": 64,
    }
    run.write("train.yaml", HUGGING_FACE | own)
    return by_run(run, ["llamafactory-cli", "train", "train.yaml"]), {
        "FORCE_TORCHRUN": "1",
        "NPROC_PER_NODE": str(run.ranks),
    }


def axolotl(run):
    own = {
        "base_model": "inputs/model",
        "datasets": [{"path": "inputs/text/train.jsonl", "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": "prepared",
        "sequence_len": 64,
        "val_set_size": 0,
        "optimizer": "adamw_torch",
        "lr_scheduler": "cosine",
        "attn_implementation": "sdpa",
        "micro_batch_size": 2,
    }
    given = {key: HUGGING_FACE[key] for key in HUGGING_FACE.keys() - {"use_cpu", "report_to"}}
    given["per_device_train_batch_size"] = None
    if run.with_plugin:
        own["plugins"] = ["deep_optimizer_states.axolotl.DeepOptimizerStatesPlugin"]
    run.write("train.yaml", {k: v for k, v in (given | own).items() if v is not None})
    return ["axolotl", "train", "train.yaml", "--", f"--num-processes={run.ranks}"], {}


def ms_swift(run):
    words = ["swift", "sft", "--model", "inputs/model", "--model_type", "llama"]
    words += ["--template", "default", "--tuner_type", "full", "--torch_dtype", "bfloat16"]
    words += ["--dataset", "inputs/messages.jsonl", "--add_version", "false"]
    words += run.options()
    if run.with_plugin:
        import deep_optimizer_states

        words += [
            "--external_plugins",
            f"{Path(deep_optimizer_states.__file__).parent}/installed.py",
        ]
    return words, {"NPROC_PER_NODE": str(run.ranks)}


def launch_yaml(run):
    config = {"deepspeed_config_file": "ds.json", "zero3_init_flag": True}
    machines = {"num_machines": 1, "num_processes": run.ranks, "use_cpu": False}
    run.write(
        "launch.yaml", {"distributed_type": "DEEPSPEED", "deepspeed_config": config, **machines}
    )


def trl(run):
    launch_yaml(run)
    words = ["trl", "sft", "--accelerate_config", "launch.yaml", "--dataset_name", "inputs/text"]
    options = run.options(model_name_or_path="inputs/model", max_length=64)
    options = options[2:]  # the DeepSpeed config is named in the YAML
    return by_run(run, words + options), {}


def transformers(run):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(run.ranks)]
    with_plugin = {"WITH_PLUGIN": "1"} if run.with_plugin else {}
    return [*launcher, str(TRAIN), "transformers", "inputs", "ds.json", "out"], with_plugin


def accelerate(run):
    launch_yaml(run)
    words = ["accelerate", "launch", "--config_file", "launch.yaml", str(TRAIN), "accelerate"]
    return by_run(run, [*words, "inputs", "ds.json", "out"]), {}


def lightning(run):
    words = [sys.executable, str(TRAIN), "lightning", "inputs", "ds.json", "out"]
    with_plugin = {"WITH_PLUGIN": "1"} if run.with_plugin else {}
    return words, {"RANKS": str(run.ranks), **with_plugin}


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, and the presets that its users have.

    Attributes:
        package: Its name in the registry.
        command: Returns the words and the variables of a run.
        presets: Words of a row of the table, and a DeepSpeed config.
        shipped: A preset's words, and where the installed package has the file; else the config is
            that of tests/support/presets.py, which names its source.
    """

    package: str
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
        "llamafactory",
        llamafactory,
        those(LF, f"{LF}, parameters on the GPU", "LLaMA-Factory z2 offload"),
    ),
    "axolotl": Program(
        "axolotl",
        axolotl,
        those("axolotl zero3_bf16_cpuoffload_all", AXOLOTL, "axolotl zero2")
        | without_offload_param(AXOLOTL),
    ),
    "ms-swift": Program(
        "ms-swift",
        ms_swift,
        those(SWIFT, "ms-swift zero2_offload") | without_offload_param(SWIFT),
        {
            SWIFT: "swift/config/zero3_offload.json",
            "ms-swift zero2_offload": "swift/config/zero2_offload.json",
        },
    ),
    "trl": Program(
        "trl",
        trl,
        those("TRL zero3", TRL)
        | {"TRL zero3, both on the CPU": changed(PRESETS[TRL].config, offload_param=CPU)},
    ),
    "transformers": Program(
        "transformers",
        transformers,
        those(HF, "Transformers ZeRO-2") | without_offload_param(HF),
    ),
    "accelerate": Program(
        "accelerate",
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
        "lightning",
        lightning,
        those(LIGHTNING, "Lightning deepspeed_stage_2_offload")
        | {
            f"{LIGHTNING}, parameters not offloaded": PRESETS[LIGHTNING].config
            | {"offload_parameters": False}
        },
    ),
}

NO_FP16 = "ValueError: Type fp16 is not supported on your device."
EXPECTED = {
    ("trl", "TRL zero3"): ("", "?"),
    ("axolotl", "axolotl zero3_bf16_cpuoffload_all"): ("", "?"),
    ("axolotl", "axolotl zero2"): ("", "?"),
    ("accelerate", TEMPLATE): (NO_FP16, NO_FP16),
}
"""Program, preset -> the last line of the error under stock and under the plugin, on every number
of ranks. Everything else has to train with equal bits."""
