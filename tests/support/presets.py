"""DeepSpeed configs that frameworks ship or document, and what the plugin makes of each.

Keys and values are theirs; ``source`` says where and from when. Not a test itself.
"""

import dataclasses

EQUAL = "equal"
"""Trains under the plugin with the bits of stock."""

TORCH_ADAM = "optimizer.params.torch_adam = true: take it out"
OWN_ADAM = (
    'the optimizer is AdamW. Give DeepSpeed an Adam or AdamW "optimizer" block, or pass it a '
    'DeepSpeedCPUAdam, or take "zero_force_ds_cpu_optimizer": false out'
)
NO_OFFLOAD = 'offload_optimizer.device = none: set it to "cpu"'


@dataclasses.dataclass(frozen=True)
class Preset:
    """One config.

    Attributes:
        source: Who has it where, and the date of that file or text.
        config: DeepSpeed's JSON, ``"auto"`` values included; through Lightning's door the
            arguments of its ``DeepSpeedStrategy``, which makes the JSON of them.
        outcome: ``EQUAL``, or words of the line by which the plugin refuses it.
        fp16: Whether the arguments ask for fp16, which a config that fixes it needs; else bf16.
        door: How the config reaches DeepSpeed: ``trainer`` (an argument of Trainer),
            ``accelerate`` (the variables that ``accelerate launch`` sets) or ``lightning``.
        users_have: An older DeepSpeed that users of the framework have, and why; empty where
            nothing keeps them from the newest.
    """

    source: str
    config: dict
    outcome: str = EQUAL
    fp16: bool = False
    door: str = "trainer"
    users_have: tuple[str, str] = ("", "")


CPU = {"device": "cpu"}
PINNED = {"device": "cpu", "pin_memory": True}
AUTO_BATCHES = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
QUIET = {"steps_per_print": 2000, "wall_clock_breakdown": False}
SCALING = {
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
AUTO_TYPES = {"fp16": {"enabled": "auto", **SCALING}, "bf16": {"enabled": "auto"}}
AUTO_ADAMW = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
AUTO_WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
WARMUP = {"type": "WarmupLR", "params": AUTO_WARMUP}
WARMUP_DECAY = {"type": "WarmupDecayLR", "params": {**AUTO_WARMUP, "total_num_steps": "auto"}}
AUTO_BUCKETS = {
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}
BILLIONS = {
    "sub_group_size": 1e9,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
}


def zero_2(bucket_size, **more):
    """The ZeRO-2 block with optimizer offload that most presets share."""
    return {
        "stage": 2,
        "offload_optimizer": PINNED,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8 if bucket_size == "auto" else bucket_size,
        "reduce_scatter": True,
        "reduce_bucket_size": bucket_size,
        "contiguous_gradients": True,
        **more,
    }


def zero_3(**more):
    """The ZeRO-3 block with both offloads that most presets share."""
    return {
        "stage": 3,
        "offload_optimizer": PINNED,
        "offload_param": PINNED,
        "contiguous_gradients": True,
        **AUTO_BUCKETS,
        **BILLIONS,
        **more,
    }


def changed(config, without=(), **zero):
    """Change a preset as a user does: keys left out, others in its ``zero_optimization``."""
    zero = {**config["zero_optimization"], **zero}
    found = {**config, "zero_optimization": {k: v for k, v in zero.items() if k not in without}}
    return {key: value for key, value in found.items() if key not in without}


LLAMA_FACTORY = {**AUTO_BATCHES, "zero_allow_untested_optimizer": True, **AUTO_TYPES}
LLAMA_FACTORY_3 = {
    **LLAMA_FACTORY,
    "zero_optimization": zero_3(overlap_comm=False, stage3_gather_16bit_weights_on_model_save=True),
}
AXOLOTL_3 = {
    **AUTO_BATCHES,
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": PINNED,
        "offload_param": PINNED,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 0,
        **AUTO_BUCKETS,
        "max_live_parameters": 0,
        "max_reuse_distance": 0,
        "gather_16bit_weights_on_model_save": True,
    },
    "bf16": {"enabled": True},
    "wall_clock_breakdown": False,
}
MS_SWIFT = {**AUTO_BATCHES, **AUTO_TYPES, **QUIET}
MS_SWIFT_3 = {
    **MS_SWIFT,
    "zero_optimization": zero_3(overlap_comm=False, stage3_gather_16bit_weights_on_model_save=True),
}
HF_DOCS = {
    **AUTO_BATCHES,
    **AUTO_TYPES,
    **QUIET,
    "optimizer": AUTO_ADAMW,
    "scheduler": WARMUP,
}
HF_DOCS_3 = {
    **HF_DOCS,
    "zero_optimization": zero_3(overlap_comm=True, stage3_gather_16bit_weights_on_model_save=True),
}
# What the templates leave to "auto" besides.
ACCELERATE = {
    **AUTO_BATCHES,
    **QUIET,
    "gradient_accumulation_steps": 1,
    "fp16": {"enabled": True, **SCALING},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": WARMUP_DECAY,
}
ACCELERATE_3 = {
    **ACCELERATE,
    "zero_optimization": zero_3(
        overlap_comm=True, stage3_gather_16bit_weights_on_model_save="auto"
    ),
}
ACCELERATE_2 = {
    **ACCELERATE,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True},
    },
    "zero_optimization": zero_2("auto", overlap_comm=True),
}
# What `accelerate config` asks, and TRL's zero3.yaml answers, written out as DeepSpeed's JSON: the
# YAML itself has no place for the plugin's block.
ANSWERS = {
    **AUTO_BATCHES,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none"},
        "offload_param": {"device": "none"},
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}

PRESETS = {
    "LLaMA-Factory z3 offload": Preset(
        "LLaMA-Factory, examples/deepspeed/ds_z3_offload_config.json, 2025-10-02",
        LLAMA_FACTORY_3,
    ),
    "LLaMA-Factory z3 offload, parameters on the GPU": Preset(
        "the same without offload_param", changed(LLAMA_FACTORY_3, without=("offload_param",))
    ),
    "LLaMA-Factory z2 offload": Preset(
        "LLaMA-Factory, examples/deepspeed/ds_z2_offload_config.json, 2025-10-02",
        {
            **LLAMA_FACTORY,
            "zero_optimization": zero_2(5e8, overlap_comm=False, round_robin_gradients=True),
        },
    ),
    "axolotl zero3_bf16_cpuoffload_all": Preset(
        "axolotl, deepspeed_configs/zero3_bf16_cpuoffload_all.json, 2025-07-22",
        AXOLOTL_3,
        OWN_ADAM,
        door="accelerate",
    ),
    "axolotl zero3_bf16_cpuoffload_all, DeepSpeed's Adam": Preset(
        "the same without zero_force_ds_cpu_optimizer",
        changed(AXOLOTL_3, without=("zero_force_ds_cpu_optimizer",)),
        door="accelerate",
    ),
    "axolotl zero2": Preset(
        "axolotl, deepspeed_configs/zero2.json, 2024-03-10",
        {
            **AUTO_BATCHES,
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": CPU,
                "contiguous_gradients": True,
                "overlap_comm": True,
            },
            "bf16": {"enabled": "auto"},
            "fp16": {"enabled": "auto", "auto_cast": False, **SCALING, "initial_scale_power": 32},
            "wall_clock_breakdown": False,
        },
        door="accelerate",
        users_have=("0.18.9", "the newest that axolotl 0.19.0 takes"),
    ),
    "ms-swift zero3_offload": Preset(
        "ms-swift, swift/config/zero3_offload.json, 2026-01-14", MS_SWIFT_3
    ),
    "ms-swift zero2_offload": Preset(
        "ms-swift, swift/config/zero2_offload.json, 2026-01-14",
        {**MS_SWIFT, "zero_optimization": zero_2(2e8, overlap_comm=False)},
        users_have=("0.18.9", "which ms-swift 4.6.0 recommends"),
    ),
    "Transformers ZeRO-3": Preset(
        "Transformers 4.49, page on DeepSpeed, with its optimizer and scheduler, 2025",
        HF_DOCS_3,
    ),
    "Transformers ZeRO-2": Preset(
        "Transformers 4.49, page on DeepSpeed, with its optimizer and scheduler, 2025",
        {
            **HF_DOCS,
            "zero_optimization": zero_2(5e8, overlap_comm=True, round_robin_gradients=True),
        },
    ),
    "Accelerate stage3 offload": Preset(
        "Accelerate, examples/deepspeed_config_templates/zero_stage3_offload_config.json, "
        "2022-06-07, unchanged in 2026",
        ACCELERATE_3,
        fp16=True,
    ),
    "Accelerate stage2 offload": Preset(
        "Accelerate, examples/deepspeed_config_templates/zero_stage2_offload_config.json, "
        "2022-06-07, unchanged in 2026",
        ACCELERATE_2,
        TORCH_ADAM,
        fp16=True,
    ),
    "Accelerate stage2 offload, DeepSpeed's Adam": Preset(
        "the same without torch_adam",
        {**ACCELERATE_2, "optimizer": ACCELERATE["optimizer"]},
        fp16=True,
    ),
    "TRL zero3": Preset(
        "TRL, trl/accelerate_configs/zero3.yaml, 2026-07-24, as a DeepSpeed config",
        ANSWERS,
        NO_OFFLOAD,
        door="accelerate",
    ),
    "TRL zero3, optimizer on the CPU": Preset(
        "the same with the optimizer offloaded",
        changed(ANSWERS, offload_optimizer=CPU),
        door="accelerate",
    ),
    "Lightning deepspeed_stage_3_offload": Preset(
        "Lightning 2.6.6, arguments of DeepSpeedStrategy behind this name",
        {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
        door="lightning",
    ),
    "Lightning deepspeed_stage_2_offload": Preset(
        "Lightning 2.6.6, arguments of DeepSpeedStrategy behind this name",
        {"stage": 2, "offload_optimizer": True},
        door="lightning",
    ),
}
