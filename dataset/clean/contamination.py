"""Evaluation texts, found in a document and cut out of it.

As GPT-3 and Megatron's OpenWebText recipe do it: what shares 13 words in a row with an evaluation
text goes, with 200 characters on either side; stretches too short to be of use go as well, and a
document that falls into many pieces goes whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

NGRAM_WORDS = 13
# Shorter evaluation texts count as a whole from here; below, they could be in any text.
FEWEST_WORDS = 8
MARGIN_CHARACTERS = 200
SHORTEST_PIECE_CHARACTERS = 200
MOST_MATCHES = 10
_WORD = re.compile(r"\w+")


class Contamination:
    """The word sequences of evaluation texts.

    Args:
        texts: The evaluation texts.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._sequences: dict[int, set[str]] = {}
        for text in texts:
            words = _WORD.findall(text.lower())
            size = min(NGRAM_WORDS, len(words))
            if size >= FEWEST_WORDS:
                known = self._sequences.setdefault(size, set())
                known.update(_windows(words, size))
        self._sizes = sorted(self._sequences, reverse=True)

    def __len__(self) -> int:
        """Sequences known."""
        return sum(map(len, self._sequences.values()))

    def clean(self, text: str) -> list[str]:
        """What is left of a text: itself when it is clean, pieces of it, or nothing."""
        matches = list(self._matches(text))
        if not matches:
            return [text]
        if len(matches) > MOST_MATCHES:
            return []
        pieces, start = [], 0
        for begin, end in matches:
            pieces.append(text[start : max(start, begin - MARGIN_CHARACTERS)])
            start = max(start, min(len(text), end + MARGIN_CHARACTERS))
        pieces.append(text[start:])
        return [piece for piece in pieces if len(piece) >= SHORTEST_PIECE_CHARACTERS]

    def _matches(self, text: str) -> Iterator[tuple[int, int]]:
        """Where sequences begin and end, without overlaps."""
        # Lower case word by word: of a whole text it can change positions.
        found = list(_WORD.finditer(text))
        words = [match[0].lower() for match in found]
        at = 0
        while at < len(words):
            size = next(
                (
                    size
                    for size in self._sizes
                    if at + size <= len(words)
                    and " ".join(words[at : at + size]) in self._sequences[size]
                ),
                0,
            )
            if size:
                yield found[at].start(), found[at + size - 1].end()
            at += size or 1


def _windows(words: list[str], size: int) -> Iterator[str]:
    for at in range(len(words) - size + 1):
        yield " ".join(words[at : at + size])
