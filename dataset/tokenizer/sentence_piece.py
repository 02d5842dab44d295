"""SentencePiece models: learnt, or read from a local file."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataset.errors import DatasetError

# The trainer leaves out longer ones, so longer lines are cut.
MAX_SENTENCE_BYTES = 4192


class SentencePiece:
    """A SentencePiece model; its end-of-sentence id ends a document, as in Megatron."""

    def __init__(self, path: Path) -> None:
        """Read a model.

        Raises:
            DatasetError: It is missing or is no model.
        """
        from sentencepiece import SentencePieceProcessor

        if not path.is_file():
            raise DatasetError(f"no tokenizer model {path}")
        try:
            self._model: Any = SentencePieceProcessor(model_proto=path.read_bytes())
        except (RuntimeError, OSError) as error:
            raise DatasetError(f"{path} is not a SentencePiece model") from error

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return int(self._model.vocab_size())

    @property
    def eod(self) -> int | None:
        """The end-of-sentence id."""
        found = int(self._model.eos_id())
        return found if found >= 0 else None

    def encode(self, text: str) -> NDArray[Any]:
        """Ids of a text; the model's own normalization (white space, as a rule) applies."""
        return np.asarray(self._model.encode(text, out_type=int), np.uint32)

    def decode(self, ids: list[int]) -> str:
        """Text of some ids."""
        return str(self._model.decode(ids))


def learn(texts: Iterable[str], vocab_size: int) -> bytes:
    """Learn a BPE model with byte fallback: every character can be encoded.

    Args:
        texts: What to learn from; their lines are the trainer's sentences.
        vocab_size: Entries wanted, the 256 bytes and the special ones included.

    Returns:
        The model file's contents.

    Raises:
        DatasetError: The texts cannot give that many entries, or need more.
    """
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(texts),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            max_sentence_length=MAX_SENTENCE_BYTES,
            num_threads=1,  # so that the same texts give the same model
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).rsplit("] ", 1)[-1].strip()
        raise DatasetError(f"--vocab-size {vocab_size}: {reason or 'too few texts'}") from error
    return model.getvalue()


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    cut = MAX_SENTENCE_BYTES // 4  # characters of at most four bytes
    for text in texts:
        for line in text.splitlines():
            for start in range(0, len(line), cut):
                yield line[start : start + cut]
