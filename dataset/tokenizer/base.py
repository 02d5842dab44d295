"""What the pipeline asks of a tokenizer, and how a stored one is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray

from dataset.errors import DatasetError

END_OF_DOCUMENT = "<|endoftext|>"


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""

    @property
    def eod(self) -> int | None:
        """The id that ends a document; None when the vocabulary has none."""

    def encode(self, text: str) -> NDArray[Any]:
        """Ids of a text, (tokens,) of an integer type; a text cannot spell a special token."""

    def decode(self, ids: list[int]) -> str:
        """Text of some ids."""


def load(path: Path) -> Tokenizer:
    """Open a tokenizer's file: ``.json`` is byte-level BPE, ``.model`` SentencePiece.

    Raises:
        DatasetError: There is none, or it cannot be read.
    """
    if not path.is_file():
        raise DatasetError(f"no tokenizer at {path}")
    if path.suffix == ".model":
        from dataset.tokenizer.sentence_piece import SentencePiece

        return SentencePiece(path)
    from dataset.tokenizer.bpe import ByteLevelBpe

    return ByteLevelBpe.load(path)
