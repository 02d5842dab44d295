"""Adversarial models: real classes at tiny size, adapters, experts, odd sizes, shared weights."""

import functools

import deepspeed
import torch
from adversary_trial import NOTHING_PERSISTS, WIDTH, Net, Registry
from deepspeed.utils import set_z3_leaf_modules
from equality_cases import Case
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

CASES = Registry()
VOCAB_SIZE, LENGTH = 64, 12
MODEL = Case(zero={"sub_group_size": 1000, "reduce_bucket_size": 8000})


def llama():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def gpt2():
    """With dropout: random numbers that the user draws must be stock's too."""
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, **sizes, **special))


def mixtral():
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
        )
    )


def t5():
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCAB_SIZE, decoder_start_token_id=0, **sizes)
    )


def vit():
    return ViTForImageClassification(
        ViTConfig(
            image_size=16,
            patch_size=4,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_labels=5,
        )
    )


def predict_tokens(engine, generator):
    tokens = torch.randint(1, VOCAB_SIZE, (2, LENGTH), generator=generator).to(engine.device)
    return engine(input_ids=tokens, labels=tokens).loss.float()


def name_images(engine, generator):
    images = torch.randn(2, 3, 16, 16, generator=generator).to(engine.device, torch.bfloat16)
    labels = torch.randint(5, (2,), generator=generator).to(engine.device)
    return engine(pixel_values=images, labels=labels).loss.float()


def train_model(trial, make, loss_of=predict_tokens):
    trial.train(trial.open(make(), MODEL, tile_numel=2048), loss_of)


for name, make, loss_of, ranks in (
    ("Llama", llama, predict_tokens, (1,)),
    ("GPT-2", gpt2, predict_tokens, (1, 2)),
    ("Mixtral", mixtral, predict_tokens, (1, 2)),
    ("T5", t5, predict_tokens, (1,)),
    ("ViT", vit, name_images, (1,)),
):
    CASES.add(name, ranks)(functools.partial(train_model, make=make, loss_of=loss_of))


@CASES.add("Llama, recomputed")
def recomputed(trial):
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    trial.train(trial.open(model, MODEL, tile_numel=2048), predict_tokens)


class Adapted(torch.nn.Module):
    """A frozen linear layer beside a low-rank one that learns."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = torch.nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + (x @ self.down.t()) @ self.up.t()

    def parameters_of_all(self):
        return [self.base.weight, self.up, self.down]


def adapted_net():
    model = Net()
    model.requires_grad_(False)
    model.layers = torch.nn.ModuleList(Adapted(layer, 3) for layer in model.layers)
    return model


SMALL_GROUPS = Case(zero={"sub_group_size": 50})


@CASES.add("LoRA, merged into the frozen weights after a step", (1, 2))
def lora(trial):
    """The merge stays: no master weights write over a frozen parameter."""

    def merge(engine, micro_step):
        if micro_step != 3:
            return
        for layer in engine.module.layers:
            weights = layer.parameters_of_all()
            with deepspeed.zero.GatheredParameters(weights, modifier_rank=0), torch.no_grad():
                weights[0].add_(weights[1] @ weights[2])

    trial.train(trial.open(adapted_net(), SMALL_GROUPS), steps=4, after=merge)


@CASES.add("LoRA on Llama, base in eval mode")
def lora_on_llama(trial):
    model = llama().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj, 2)
        layer.mlp.down_proj = Adapted(layer.mlp.down_proj, 3)
    trial.train(trial.open(model, SMALL_GROUPS), predict_tokens)


class Experts(torch.nn.Module):
    """Each sample goes to one expert of those allowed; the choice is the router's."""

    def __init__(self, num_experts=4):
        super().__init__()
        self.router = torch.nn.Linear(WIDTH, num_experts)
        self.experts = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH) for _ in range(num_experts)
        )
        self.allowed = range(num_experts)

    def forward(self, x):
        weights = self.router(x).softmax(-1)[:, list(self.allowed)]
        best, choice = weights.max(-1)
        out = torch.zeros_like(x)
        for position, idx in enumerate(self.allowed):
            chosen = choice == position
            if chosen.any():
                out[chosen] = best[chosen, None] * torch.tanh(self.experts[idx](x[chosen]))
        return x + out


class ExpertNet(Net):
    """One layer of experts among the others."""

    def __init__(self):
        super().__init__(num_layers=3)
        self.layers[1] = Experts()


@CASES.add("experts by turns", (1, 2))
def experts_by_turns(trial):
    """An expert is used in all micro-batches of a window and on every rank, or in none."""

    def choose(engine, micro_step):
        engine.module.layers[1].allowed = ((0,), (1,), (0,), (3,), (1,))[micro_step // 2]

    trial.train(trial.open(ExpertNet()), steps=5, before=choose)


@CASES.add("experts in a leaf module", (1, 2))
def leaf_experts(trial):
    """What the router does not choose gets zeros, on each rank others."""
    model = ExpertNet()
    set_z3_leaf_modules(model, [Experts])
    trial.train(trial.open(model), steps=4)


class OddSizes(torch.nn.Module):
    """Parameters of 1, 3 and 17 elements beside larger ones: a rank may hold padding alone."""

    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(1))
        self.first = torch.nn.Linear(WIDTH, 17)
        self.three = torch.nn.Parameter(torch.linspace(0.5, 1.5, 3))
        self.second = torch.nn.Linear(17, WIDTH, bias=False)
        self.last = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        hidden = torch.tanh(self.first(x)) * self.gain
        head = hidden[:, :3] * self.three
        return self.second(torch.cat((head, hidden[:, 3:]), -1)) + self.last


def train_odd_sizes(trial, tile_numel, **zero):
    trial.train(trial.open(OddSizes(), Case(zero=zero), tile_numel=tile_numel))


for name, tile_numel, zero, ranks in (
    ("a subgroup for each parameter", 16, {"sub_group_size": 2}, (1, 2)),
    ("nothing persists", 48, {"sub_group_size": 4, **NOTHING_PERSISTS}, (1,)),
    (
        "a bucket below every parameter",
        112,
        {"sub_group_size": 3, "reduce_bucket_size": 5},
        (1, 2),
    ),
):
    CASES.add(f"odd sizes, {name}", ranks)(
        functools.partial(train_odd_sizes, tile_numel=tile_numel, **zero)
    )


class UsesOthersWeights(Net):
    """Computes with weights of modules that it does not call."""

    def __init__(self, registers):
        super().__init__()
        if registers:
            deepspeed.zero.register_external_parameter(self, self.layers[2].weight)
            deepspeed.zero.register_external_parameter(self, self.layers[3].bias)

    def forward(self, x):
        x = torch.nn.functional.linear(x, self.layers[2].weight, self.layers[3].bias)
        x = self.layers[0](x) + x
        x = torch.tanh(self.layers[2](x)) @ self.layers[1].weight.t()
        return self.layers[3](x) + self.layers[1].bias


@CASES.add("external parameters, registered", (1, 2))
def external_registered(trial):
    trial.train(trial.open(UsesOthersWeights(True), Case(zero=NOTHING_PERSISTS)))


@CASES.add("external parameters, found by DeepSpeed")
def external_found(trial):
    trial.train(trial.open(UsesOthersWeights(False), Case(zero=NOTHING_PERSISTS)))
