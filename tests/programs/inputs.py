"""A model of two layers, its tokenizer and a text, as programs read them from a folder."""

import json

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAIRS = [
    (
        f"How much is {a} and {b}?",
        f"{a} and {b} make {a + b}, which is {a * b} less {a * b - a - b}.",
    )
    for a in range(2, 10)
    for b in range(2, 10)
]
SPECIAL = ["<pad>", "<s>", "</s>"]
CHAT = "{% for message in messages %}{{ message['content'] + '</s>' }}{% endfor %}"


def write(folder):
    """Write ``model``, ``text/train.jsonl`` and what LLaMA-Factory has to know of it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([" ".join(pair) for pair in PAIRS], trainer)
    pad, begin, end = SPECIAL
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=begin, eos_token=end
    )
    fast.chat_template = CHAT
    torch.manual_seed(11)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(fast),
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    for part in (model.to(torch.bfloat16), fast):
        part.save_pretrained(folder / "model")
    (folder / "text").mkdir(parents=True)
    lines = [{"query": q, "response": r, "text": f"{q} {r}"} for q, r in PAIRS]
    (folder / "text" / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    columns = {"prompt": "query", "response": "response"}
    info = {"ours": {"file_name": "text/train.jsonl", "columns": columns}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
