"""Byte-level BPE: training a vocabulary, and encoding with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dataset.errors import DatasetError

END_OF_DOCUMENT = "<|endoftext|>"

# The 256 bytes and the end-of-document token: below this nothing can be learnt.
SMALLEST_VOCABULARY = 257

# Documents encoded in one call: enough to keep all cores busy, few enough to stay small in memory.
BATCH_SIZE = 256


def train(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE vocabulary; the same documents give the same vocabulary.

    Every byte is in the vocabulary, so that every text can be encoded and comes back unchanged.

    Args:
        documents: Texts to learn from.
        vocab_size: Entries wanted, end-of-document (id 0) and the 256 bytes included. Fewer come
            out when the texts are too small to hold that many pairs.

    Raises:
        DatasetError: ``vocab_size`` is below 257.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise DatasetError(
            f"vocab_size = {vocab_size}: at least {SMALLEST_VOCABULARY} are needed, "
            "for the 256 bytes and the end-of-document token"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer=trainer)
    return tokenizer


def load(path: Path) -> Tokenizer:
    """Read a ``tokenizer.json``.

    Raises:
        DatasetError: The file is missing or is not a tokenizer.
    """
    if not path.is_file():
        raise DatasetError(f"no tokenizer at {path}")
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the package raises nothing narrower
        raise DatasetError(f"{path} is not a tokenizer: {error}") from error


def end_of_document_id(tokenizer: Tokenizer) -> int:
    """The id that closes a document.

    Raises:
        DatasetError: The vocabulary has no such token.
    """
    token_id = tokenizer.token_to_id(END_OF_DOCUMENT)
    if token_id is None:
        raise DatasetError(f"the vocabulary has no {END_OF_DOCUMENT} token to end a document with")
    return int(token_id)


def encode(tokenizer: Tokenizer, documents: Iterable[str]) -> Iterator[list[int]]:
    """Token ids of each document, in order, without the end-of-document token.

    A text that spells ``<|endoftext|>`` gets the ids of those characters: a document cannot end
    itself.
    """
    tokenizer.encode_special_tokens = True
    remaining = iter(documents)
    while batch := list(islice(remaining, BATCH_SIZE)):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield encoding.ids
