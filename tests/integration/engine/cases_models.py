"""Rows of the equality table: classes of `transformers`, experts and adapters.

Not a test itself, see ``equality_worker``. All weights are random. Stock itself fails with
DeepSpeed's own MoE layers at stage 3 ("Native DeepSpeed MoE is not supported with ZeRO Stage 3"),
with AutoEP on a whole Mixtral of transformers 5.23 (its table of outputs to record has another
``get``), with experts that are not leaf modules on several ranks (they reduce different gradients
at the same time), and with ``Embedding(sparse=True)``.
"""

import functools
import os

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_modules
from equality_cases import FP16, Case, ds_config, mean_square, save_16bit_between
from small_models import (
    IMAGE_SIZE,
    LENGTH,
    NUM_LABELS,
    VOCAB_SIZE,
    gpt2,
    llama_config,
    lora_llama,
    mixtral,
    mixtral_config,
    switch,
    t5,
    vit,
)
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def draw_tokens(generator):
    return [torch.randint(1, VOCAB_SIZE, (2, LENGTH), generator=generator)]


def draw_few_tokens(generator):
    """Fewer than there are experts: some get no token, and others on each rank and step."""
    return [torch.randint(1, VOCAB_SIZE, (1, 3), generator=generator)]


def draw_images(generator):
    images = torch.randn(2, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    return [images, torch.randint(NUM_LABELS, (2,), generator=generator)]


def draw_vectors(generator):
    width = mixtral_config().hidden_size
    return [torch.randn(1, 3, width, generator=generator) for _ in "xy"]


def predict_tokens(engine, batch):
    (tokens,) = batch
    return engine(input_ids=tokens, labels=tokens).loss.float()


def name_images(engine, batch):
    images, labels = batch
    return engine(pixel_values=images, labels=labels).loss.float()


def save_midway(engine, micro_step):
    """Once: saving waits for the update, and the forward after it races with none."""
    if micro_step == 4:
        save_16bit_between(engine, micro_step)


def llama_from_config():
    """As ``from_pretrained`` makes it under ZeRO-3: cut as it is made, recomputed in backward."""
    with deepspeed.zero.Init(config_dict_or_path=ds_config(Case(), None)):
        config = llama_config(tie_word_embeddings=True)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def mixtral_of_leaves():
    model = mixtral()
    set_z3_leaf_modules(model, [MixtralSparseMoeBlock])
    return model


class ExpertLayers(torch.nn.Module):
    """Mixtral's experts alone, with what AutoEP looks for in a model."""

    def __init__(self):
        super().__init__()
        self.config = mixtral_config()
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


def expert_parallel_loss(engine, batch):
    assert engine.has_moe_layers, "AutoEP has replaced nothing"
    return mean_square(engine, batch)


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
TILES, SHARED, PARTLY_RESIDENT = "stride 2", "dynamic", "ratio 0.5"
model_case = functools.partial(
    Case, zero=SIZES, batch=draw_tokens, loss=predict_tokens, steps=3, policies=(TILES, SHARED)
)
CASES = {
    "Llama, from_config in zero.Init, checkpointing": model_case(make=llama_from_config),
    "Llama, LoRA on a frozen base": model_case(
        make=lora_llama,
        zero={"sub_group_size": 100 // NUM_RANKS},
        policies=(TILES, PARTLY_RESIDENT),
    ),
    "GPT-2, tied head, fp16": model_case(
        make=gpt2,
        dtype=torch.float16,
        config={"bf16": {"enabled": False}, "fp16": {**FP16, "initial_scale_power": 19}},
        steps=4,
        policies=(TILES, PARTLY_RESIDENT),
    ),
    "Mixtral, leaf modules, idle experts": model_case(
        make=mixtral_of_leaves, batch=draw_few_tokens
    ),
    "Switch, leaf modules by config, idle experts": model_case(
        make=switch, batch=draw_few_tokens, zero={**SIZES, **LEAVES_BY_CONFIG}
    ),
    # Stock itself fails here on more ranks, which reduce gradients of different experts.
    "Switch, unused experts": model_case(
        make=switch, batch=draw_few_tokens, most_ranks=1, policies=(TILES, PARTLY_RESIDENT)
    ),
    "T5, tied embeddings, saved midway": model_case(make=t5, before=save_midway),
    "ViT, images": model_case(
        make=vit, batch=draw_images, loss=name_images, policies=("all-device", PARTLY_RESIDENT)
    ),
    "Mixtral's experts under AutoEP": model_case(
        make=ExpertLayers,
        batch=draw_vectors,
        loss=expert_parallel_loss,
        config={"expert_parallel": AUTO_EP},
        policies=(TILES, PARTLY_RESIDENT),
        since="0.19",
    ),
}
