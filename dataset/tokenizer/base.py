"""What the pipeline asks of a tokenizer."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

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
