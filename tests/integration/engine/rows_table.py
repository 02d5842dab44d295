"""Rows of the table of equality: every stage, setting and kind of model, under every policy.

Weights of `transformers`' models are random. Stock itself fails with DeepSpeed's own MoE layers at
stage 3 ("Native DeepSpeed MoE is not supported with ZeRO Stage 3"), with AutoEP on a whole Mixtral
of transformers 5.23 (its table of outputs to record has another ``get``), with experts that are not
leaf modules on several ranks (they reduce different gradients at the same time), and with
``Embedding(sparse=True)``.
"""

import contextlib
import functools
import sys

import deepspeed
import models
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_update_full_grad_vectorized,
    set_z3_leaf_modules,
)
from engines import NUM_RANKS, WIDTH, Case, Net, ds_config, make_folder, mean_square
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

# Calls between the steps.


def keep(engine, value):
    engine.seen = [*getattr(engine, "seen", []), value.detach().clone()]


def freeze_midway(engine, micro_step):
    if micro_step == 4:
        engine.module.layers[2].weight.requires_grad_(False)


def evaluate_between(engine, micro_step):
    engine.eval()
    with torch.no_grad():
        engine(torch.ones(4, WIDTH, device=engine.device, dtype=torch.bfloat16))
    engine.train()


def read_state_between(engine, micro_step):
    for parameter in engine.module.parameters():
        keep(engine, safe_get_full_fp32_param(parameter))
        if micro_step >= 2:  # stock has no moments before its first step
            keep(engine, safe_get_full_optimizer_state(parameter, "exp_avg"))


def save_16bit_between(engine, micro_step):
    """Weights as a user saves them, right after a step; losses alone would not show them."""
    if micro_step % 2 == 0:
        weights = engine._zero3_consolidated_16bit_state_dict()
        if engine.global_rank == 0:
            for weight in weights.values():
                keep(engine, weight)


def save_midway(engine, micro_step):
    """Once: saving waits for the update, and the forward after it races with none."""
    if micro_step == 4:
        save_16bit_between(engine, micro_step)


def offload_midway(engine, micro_step):
    if micro_step == 4:
        engine.offload_states(include=[OffloadStateTypeEnum.lp_params])
        engine.reload_states()


def throw_away_midway(engine, micro_step):
    """A bad batch: what its window has gathered so far is thrown away."""
    if micro_step in (5, 9):
        engine.optimizer.zero_grad()


def set_masters_midway(engine, micro_step):
    if micro_step == 4:
        weight = engine.module.layers[3].weight
        safe_set_full_fp32_param(weight, safe_get_full_fp32_param(weight) * 0.5)


def set_weights_midway(engine, micro_step):
    """As a user sets weights by hand; stock writes them to their home, and not to the masters."""
    weight = engine.module.layers[3].weight
    if micro_step in (4, 6):
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            weight.data.mul_(0.5)


def look_at_gradients(engine, micro_step):
    """As a user does between steps: after an update they are scaled, old ones several times."""
    if micro_step in (4, 5, 8):
        for parameter in engine.module.parameters():
            gradient = safe_get_full_grad(parameter)
            keep(engine, torch.zeros(0) if gradient is None else gradient)


def change_gradients(engine, micro_step):
    """Write gradients of a parameter that takes no part; the next update goes by them."""
    weight = engine.module.layers[2].weight
    if micro_step == 4:
        safe_set_full_grad(weight, torch.full_like(weight, 0.01, dtype=torch.float32))
    if micro_step == 8:
        safe_update_full_grad_vectorized([weight], lambda gradient, _: gradient * 0.5)


def save_and_load_midway(engine, micro_step):
    """Loading leaves moments in the type of the master weights, in stock as well."""
    if micro_step == 6:
        with contextlib.redirect_stdout(sys.stderr):
            folder = make_folder()
            engine.save_checkpoint(folder)
            engine.load_checkpoint(folder)


# Models and their parameter groups.


def two_groups(model):
    second = {"lr": 1e-2, "weight_decay": 0.2, "betas": (0.8, 0.99)}
    return [
        {"params": list(model.layers[:3].parameters()), "lr": 3e-3, "weight_decay": 0.0},
        {"params": list(model.layers[3:].parameters()), **second},
    ]


def frozen_net():
    model = Net()
    model.layers[1].weight.requires_grad_(False)
    model.layers[4].bias.requires_grad_(False)
    return model


def tiny_net():
    """Fewer elements than two ranks could share without padding; sizes that nothing divides."""
    model = Net(num_layers=3)
    model.scale = torch.nn.Parameter(torch.ones(5))
    return model


def net_in_zero_init(zero=None, **of_init):
    """A model whose parameters are partitioned as they are made."""
    by_config = {"config_dict_or_path": ds_config(Case(zero=zero or {}), None)}
    with deepspeed.zero.Init(**(of_init or by_config)):
        return Net()


def llama_from_config():
    """As ``from_pretrained`` makes it under ZeRO-3: cut as it is made, recomputed in backward."""
    with deepspeed.zero.Init(config_dict_or_path=ds_config(Case(), None)):
        config = models.llama_config(tie_word_embeddings=True)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def mixtral_of_leaves():
    model = models.mixtral()
    set_z3_leaf_modules(model, [MixtralSparseMoeBlock])
    return model


class ExpertLayers(torch.nn.Module):
    """Mixtral's experts alone, with what AutoEP looks for in a model."""

    def __init__(self):
        super().__init__()
        self.config = models.mixtral_config()
        width = self.config.hidden_size
        self.first = torch.nn.Linear(width, width)
        self.layers = torch.nn.ModuleList(MixtralSparseMoeBlock(self.config) for _ in "ab")
        for parameter in self.layers.parameters():
            torch.nn.init.normal_(parameter, std=0.3)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def draw_few_tokens(generator):
    """Fewer than there are experts: some get no token, and others on each rank and step."""
    return [torch.randint(1, models.VOCAB_SIZE, (1, 3), generator=generator)]


def draw_images(generator):
    size = models.IMAGE_SIZE
    images = torch.randn(2, 3, size, size, generator=generator)
    return [images, torch.randint(models.NUM_LABELS, (2,), generator=generator)]


def draw_hidden_states(generator):
    width = models.mixtral_config().hidden_size
    return [torch.randn(1, 3, width, generator=generator) for _ in "xy"]


def name_images(engine, batch):
    images, labels = batch
    return engine(pixel_values=images, labels=labels).loss.float()


def expert_parallel_loss(engine, batch):
    assert engine.has_moe_layers, "AutoEP has replaced nothing"
    return mean_square(engine, batch)


# Settings.

FIRST_CASE = "bf16, clipping, accumulation 2"
THRICE = ((0,), (1,), (2,), (1,), (3,), (1, 4), (5,))
"""Segments that use layer 1 in three of them, as a model does that shares its layers."""
# Stock fails where two gradients of a parameter meet in one bucket.
ONE_LAYER_A_BUCKET = {"reduce_bucket_size": 1500}
SCALING = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1}
FP16 = {
    "dtype": torch.float16,
    "config": {"bf16": {"enabled": False}, "fp16": SCALING},
    "steps": 12,
}
FP32 = {"dtype": torch.float32, "config": {"bf16": {"enabled": False}}}
ADAM_L2 = {"type": "Adam", "params": {"adam_w_mode": False}}
DECAY = {"total_num_steps": 6, "warmup_num_steps": 3, "warmup_max_lr": 1e-2}
WARMUP = {"type": "WarmupDecayLR", "params": DECAY}
UNUSED_BY_TURNS = {"skips": lambda n: (2, 3) if n // 2 % 2 else ()}
LAYERS_LEFT_OUT = {
    # Micro-steps 1, 3, 5, ... end a window. Layer 2 is dropped twice and comes late after it once;
    # layer 4 is dropped before it was ever part of an update.
    "early alone": {3: (2,), 4: (2,), 7: (2,), 1: (4,), 8: (2, 4), 9: (2, 4)},
    # In windows that follow one without overflow: the older gradient, which stock goes by, is
    # infinite otherwise, and the weights are NaN.
    "early alone, fp16": {9: (2,), 10: (2,), 15: (2,), 17: (4,)},
    "caller ends": {3: (2,), 4: (2,), 7: (4,)},
    "thrown away": {5: (2,), 9: (2,)},
}
EARLY, EARLY_FP16, CALLER_ENDS, THROWN_AWAY = (
    {"skips": lambda n, left_out=left_out: left_out.get(n, ())}
    for left_out in LAYERS_LEFT_OUT.values()
)


def at(stages, **given):
    """A feature, and the stages at which it is a row of its own."""
    return stages, given


BY_CALLER = {"managed_gradient_accumulation": False}
SUMS_IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
FEATURES = {
    FIRST_CASE: at("321"),
    "bf16, gradients summed in fp32": at("321", config=SUMS_IN_FP32),
    "fp32": at("321", **FP32),
    "fp16, dynamic scale, overflows": at("3", **FP16),
    "fp16, unused after an overflow": at("3", **FP16, **UNUSED_BY_TURNS),
    "no clipping, accumulation 1": at("32", accumulation=1, config={"gradient_clipping": 0.0}),
    "Adam with L2": at("3", config={"optimizer": ADAM_L2}),
    "two parameter groups, own betas": at("321", groups=two_groups),
    "learning-rate scheduler": at("3", config={"scheduler": WARMUP}),
    "DeepSpeedCPUAdam passed in": at(
        "32", own_optimizer=functools.partial(DeepSpeedCPUAdam, lr=2e-3)
    ),
    "all-reduce instead of reduce-scatter": at("32", zero={"reduce_scatter": False}),
    "contiguous_gradients off": at("321", zero={"contiguous_gradients": False}),
    "overlap_comm": at("321", zero={"overlap_comm": True}),
    "round_robin_gradients": at("2", zero={"round_robin_gradients": True}),
    "sizes that nothing divides": at("2", make=tiny_net, zero={"sub_group_size": 300}),
    "buckets smaller than a gradient": at("2", zero={"reduce_bucket_size": 500}),
    "one subgroup": at("32", zero={"sub_group_size": 1_000_000}, is_cut=False),
    "checkpointing": at("3", make=functools.partial(Net, reentrant=False)),
    "checkpointing, reentrant": at("3", make=functools.partial(Net, reentrant=True)),
    "checkpointing, reentrant, a layer thrice": at(
        "3", make=functools.partial(Net, reentrant=True, segments=THRICE), zero=ONE_LAYER_A_BUCKET
    ),
    "zero.Init": at("3", make=net_in_zero_init),
    "frozen parameters": at("321", make=frozen_net),
    "parameters frozen midway": at("32", before=freeze_midway),
    "unused in every other window": at("321", **UNUSED_BY_TURNS),
    "first used late in a window": at("3", skips=lambda n: (2,) if n == 0 else ()),
    "never used": at("32", skips=lambda n: (2,)),
    "used early in a window alone": at("321", **EARLY),
    "used early alone, fp16, overflows": at("3", **FP16, **EARLY_FP16),
    "windows thrown away by zero_grad()": at("32", before=throw_away_midway, **THROWN_AWAY),
    "windows that the caller ends": at("321", config=BY_CALLER, **CALLER_ENDS, since="0.19"),
    "gradients looked at": at("21", before=look_at_gradients, **UNUSED_BY_TURNS),
    "gradients changed": at("2", before=change_gradients, skips=lambda n: (2,) if n >= 4 else ()),
    "eval between steps": at("3", before=evaluate_between),
    "16-bit weights saved between steps": at("3", before=save_16bit_between),
    # Stock of 0.19.5 locks pages for it below stage 3, which it cannot on a CPU.
    "offload_states and back": at("32", before=offload_midway, since="0.19.6"),
    "safe_get_* between steps": at("32", before=read_state_between),
    # Stock itself fails here at stage 3 on a parameter whose elements the ranks do not divide.
    "safe_set_full_fp32_param": at("32", before=set_masters_midway),
}
"""Name -> the stages at which it is a row of its own, and the case. Below stage 3 rows are those
that have a way of their own there: at stage 1 backward reduces at the end of a window."""
FLAT_POLICIES = ("all-host", "stride 1", "stride 2", "stride 3", "all-device", "dynamic")
"""Policies that have a meaning where the state of a parameter group is one tensor."""


def at_stage(stage, given):
    """A case below stage 3."""
    zero = {"stage": stage, **given.get("zero", {})}
    return Case(**{"policies": FLAT_POLICIES, **given, "zero": zero})


def zero_3_rows():
    rows = {name: Case(**given) for name, (stages, given) in FEATURES.items() if "3" in stages}
    name = "safe_set_full_fp32_param"
    return rows | {name: rows[name].changed(most_ranks=1)}


def zero_12_rows():
    rows = {
        f"ZeRO-{stage}: {name}": at_stage(stage, given)
        for stage in (2, 1)
        for name, (stages, given) in FEATURES.items()
        if str(stage) in stages
    }
    # After a window without overflow: an older gradient that overflowed makes stock's weights NaN.
    late = {"skips": lambda n: (2, 3) if n >= 8 and n // 2 % 2 == 0 else ()}
    for stage in (2, 1):
        rows[f"ZeRO-{stage}: fp16, dynamic scale, overflows"] = at_stage(stage, FP16)
        rows[f"ZeRO-{stage}: unused in windows that overflow"] = at_stage(stage, {**FP16, **late})
    rows["ZeRO-2: used early alone, fp16, overflows"] = at_stage(2, {**FP16, **EARLY_FP16})
    return rows


ON_HOST = {"offload_param": {"device": "cpu"}}
PAGEABLE = {"offload_param": {"device": "cpu", "pin_memory": False}}
LIMITS = (
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
)
on_host = functools.partial(Case, zero=ON_HOST)
remote_net = functools.partial(
    net_in_zero_init, remote_device="cpu", pin_memory=True, dtype=torch.bfloat16
)
pageable_net = functools.partial(net_in_zero_init, PAGEABLE)
OFFLOAD_PARAM = {
    "offload_param": on_host(),
    "offload_param, fp16, overflows": on_host(**FP16),
    "offload_param, fp32": on_host(**FP32),
    # Each group has host memory of its own.
    "offload_param, two groups, frozen parameters": on_host(make=frozen_net, groups=two_groups),
    "offload_param, unused in every other window": on_host(**UNUSED_BY_TURNS),
    "offload_param, pageable, zero.Init": Case(zero=PAGEABLE, make=pageable_net, accumulation=1),
    "offload_param, zero.Init(remote_device)": on_host(make=remote_net),
    "offload_param, nothing live or persistent": Case(
        zero=ON_HOST | dict.fromkeys(LIMITS, 0), before=evaluate_between
    ),
    "offload_param, limits of 1": Case(zero=ON_HOST | dict.fromkeys(LIMITS, 1)),
    "offload_param, all live and persistent": Case(zero=ON_HOST | dict.fromkeys(LIMITS, 10**9)),
    "offload_param, weights set by hand": on_host(before=set_weights_midway),
}
"""The CPU writes such weights where they are, and the device sends its own back."""

BF16_MASTERS = {"enabled": True, "bf16_master_weights_and_grads": True}
BF16_ALL = {**BF16_MASTERS, "bf16_optimizer_states": True}
FP16_MASTERS = {"fp16_master_weights_and_grads": True}
NARROW_MOMENTS = {"fp32_optimizer_states": False}
SCALED_MASTERS = {"bf16": {"enabled": False}, "fp16": {**SCALING, **FP16_MASTERS}}
STATES_16 = {
    "bf16 states, unused in two windows of three": Case(
        config={"bf16": BF16_ALL}, skips=lambda n: (2, 3) if n // 2 % 3 else (), states="bf16"
    ),
    "bf16 states, gradients summed in fp32, Adam with L2": Case(
        config={
            "bf16": BF16_MASTERS,
            "data_types": {"grad_accum_dtype": "fp32"},
            "optimizer": {**ADAM_L2, "params": {**ADAM_L2["params"], **NARROW_MOMENTS}},
        },
        groups=two_groups,
        states="bf16",
    ),
    "bf16 masters, fp32 moments, loaded midway": Case(
        config={"bf16": BF16_MASTERS},
        before=save_and_load_midway,
        states="bf16 (moments fp32)",
        policies=("stride 2", "dynamic"),
    ),
    "fp16 states, overflows": Case(
        **FP16
        | {"config": {**SCALED_MASTERS, "optimizer": {"type": "AdamW", "params": NARROW_MOMENTS}}},
        states="fp16",
        policies=("stride 2", "ratio 0.5"),
    ),
    "fp16 masters, fp32 moments, loaded before a step": Case(
        **FP16 | {"config": SCALED_MASTERS},
        before=save_and_load_midway,
        states="fp16 (moments fp32)",
        policies=("dynamic",),
    ),
    "bf16 masters of fp32 weights": Case(
        dtype=torch.float32,
        config={"bf16": {**BF16_ALL, "enabled": False}},
        states="bf16",
        policies=("stride 2",),
    ),
    "fp16 masters of bf16 weights": Case(
        config={"fp16": {"enabled": False, **FP16_MASTERS}},
        states="fp16 (moments fp32)",
        policies=("ratio 0.5",),
    ),
}

SIZES = {"sub_group_size": 1000 // NUM_RANKS, "reduce_bucket_size": 8000}
SWITCH = "transformers.models.switch_transformers.modeling_switch_transformers"
LEAVES_BY_CONFIG = {"leaf_module": {"classes": [f"{SWITCH}.SwitchTransformersSparseMLP"]}}
# A whole Mixtral is found by itself; here its layers have to be described.
AUTO_EP = {
    "enabled": True,
    "autoep_size": min(2, NUM_RANKS),
    "use_grouped_mm": False,
    "moe_layer_pattern": r"layers\.\d+",
    "expert_pattern": "experts",
    "router_pattern": "gate",
    "expert_w1": "gate_up_proj",
    "expert_w2": "down_proj",
    "expert_w3": None,
    "num_experts_attr": "num_local_experts",
    "top_k_attr": "num_experts_per_tok",
    "score_func": "softmax",
    "score_apply": "post",
    "route_norm": True,
}
PARTLY_RESIDENT = ("stride 2", "ratio 0.5")
model_case = functools.partial(
    Case,
    zero=SIZES,
    batch=models.draw_tokens,
    loss=models.predict_tokens,
    steps=3,
    policies=("stride 2", "dynamic"),
)
MODELS = {
    "Llama, from_config in zero.Init, checkpointing": model_case(make=llama_from_config),
    "Llama, LoRA on a frozen base": model_case(
        make=models.lora_llama,
        zero={"sub_group_size": 100 // NUM_RANKS},
        policies=PARTLY_RESIDENT,
    ),
    "GPT-2, tied head, fp16": model_case(
        make=models.gpt2,
        dtype=torch.float16,
        config={"bf16": {"enabled": False}, "fp16": {**SCALING, "initial_scale_power": 19}},
        steps=4,
        policies=PARTLY_RESIDENT,
    ),
    "Mixtral, leaf modules, idle experts": model_case(
        make=mixtral_of_leaves, batch=draw_few_tokens
    ),
    "Switch, leaf modules by config, idle experts": model_case(
        make=models.switch, batch=draw_few_tokens, zero={**SIZES, **LEAVES_BY_CONFIG}
    ),
    # Stock itself fails here on more ranks, which reduce gradients of different experts.
    "Switch, unused experts": model_case(
        make=models.switch, batch=draw_few_tokens, most_ranks=1, policies=PARTLY_RESIDENT
    ),
    "T5, tied embeddings, saved midway": model_case(make=models.t5, before=save_midway),
    "ViT, images": model_case(
        make=models.vit, batch=draw_images, loss=name_images, policies=("all-device", "ratio 0.5")
    ),
    "Mixtral's experts under AutoEP": model_case(
        make=ExpertLayers,
        batch=draw_hidden_states,
        loss=expert_parallel_loss,
        config={"expert_parallel": AUTO_EP},
        policies=PARTLY_RESIDENT,
        since="0.19",
    ),
}
CASES = {
    **zero_3_rows(),
    **OFFLOAD_PARAM,
    **STATES_16,
    **zero_12_rows(),
    **MODELS,
}


def columns_of(case):
    """Return the cells of the table that describe a feature."""
    zero = ds_config(case, None)["zero_optimization"]
    parameters = zero.get("offload_param", {}).get("device", "device")
    return {"stage": str(zero["stage"]), "parameters": parameters, "states": case.states}
