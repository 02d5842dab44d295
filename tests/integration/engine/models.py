"""Models of `transformers` at tiny size, and adapters for them; not a test itself."""

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

VOCAB_SIZE, LENGTH = 64, 12
IMAGE_SIZE, NUM_LABELS = 16, 8
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def draw_tokens(generator):
    return [torch.randint(1, VOCAB_SIZE, (2, LENGTH), generator=generator)]


def predict_tokens(engine, batch):
    (tokens,) = batch
    return engine(input_ids=tokens, labels=tokens).loss.float()


def llama_config(**options):
    return LlamaConfig(**_SIZES, hidden_size=24, intermediate_size=40, **options)


def llama():
    return LlamaForCausalLM(llama_config())


def gpt2():
    """Its head is its embedding. With dropout: random numbers drawn must be stock's too."""
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, **sizes, **special))


def mixtral_config():
    routing = {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": True}
    return MixtralConfig(**_SIZES, hidden_size=16, intermediate_size=8, **routing)


def mixtral():
    return MixtralForCausalLM(mixtral_config())


def switch():
    """A mixture of experts each of which is a module of its own."""
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_heads": 4, "num_experts": 6}
    layers = ("num_layers", "num_decoder_layers")
    sparse = ("num_sparse_encoder_layers", "num_sparse_decoder_layers")
    return SwitchTransformersForConditionalGeneration(
        SwitchTransformersConfig(
            vocab_size=VOCAB_SIZE,
            decoder_start_token_id=0,
            router_dtype="bfloat16",
            router_jitter_noise=0.0,  # it is added in place, which leaf modules forbid
            **sizes,
            **dict.fromkeys((*layers, *sparse), 1),
        )
    )


def t5():
    """Encoder, decoder and head share one embedding."""
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCAB_SIZE, decoder_start_token_id=0, **sizes)
    )


def vit():
    return ViTForImageClassification(
        ViTConfig(
            image_size=IMAGE_SIZE,
            patch_size=4,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_labels=NUM_LABELS,
        )
    )


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


def lora_llama():
    """Llama, frozen, with adapters on two projections of every layer."""
    model = llama().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj, 2)
        layer.mlp.down_proj = Adapted(layer.mlp.down_proj, 3)
    return model
