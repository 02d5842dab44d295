"""RoBERTa's tokenizer from the hub, or one of the same form trained here."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from launch.frameworks.imdb.errors import ImdbError
from launch.frameworks.imdb.reviews import fetch

REPOSITORY = "FacebookAI/roberta-base"
PAD = "<pad>"
SPECIAL_TOKENS = ("<s>", PAD, "</s>", "<unk>", "<mask>")
"""In RoBERTa's order, so that padding has id 1 as it has there, and not 0."""
TRAINED_VOCABULARY = 1024
"""Largest vocabulary of a tokenizer that is trained on the synthetic reviews."""


def roberta_tokenizer(endpoint: str | None = None) -> Tokenizer:
    """The tokenizer of ``roberta-base``, downloaded once into the hub's own cache.

    Raises:
        ImdbError: it cannot be had.
    """
    return Tokenizer.from_file(str(fetch("tokenizer.json", endpoint, REPOSITORY)))


def trained_tokenizer(texts: Iterable[str], vocab_size: int = TRAINED_VOCABULARY) -> Tokenizer:
    """A byte-level BPE tokenizer like RoBERTa's, learned from texts.

    Only training reviews may go in: what validation and test consist of is not to be known.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    ends = {word: (word, SPECIAL_TOKENS.index(word)) for word in ("<s>", "</s>")}
    tokenizer.post_processor = processors.RobertaProcessing(
        ends["</s>"], ends["<s>"], add_prefix_space=False
    )
    return tokenizer


def pad_id(tokenizer: Tokenizer) -> int:
    """The tokenizer's own id of padding; nothing may be assumed, RoBERTa's is 1.

    Raises:
        ImdbError: the tokenizer has no padding token.
    """
    found = tokenizer.token_to_id(PAD)
    if found is None:
        raise ImdbError(f"the tokenizer has no token {PAD!r}; give one that pads with it")
    return int(found)
