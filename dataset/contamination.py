"""Find evaluation texts in a document and cut them out, as Megatron's OpenWebText recipe does.

What shares 13 words in a row with an evaluation text goes, with 200 characters on either side, up
to the next end of a sentence. Pieces that are too short to be of use go as well, and a document
that falls into many pieces goes whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

NGRAM_WORDS = 13
FEWEST_WORDS = 8
"""Shorter evaluation texts could be in any text. From here to 13 words, one counts as a whole."""
MARGIN_CHARACTERS = 200
SHORTEST_CHARACTERS = 200
MOST_PIECES = 10
COMMON_MATCHES = 10
"""A sequence that the input holds this often is a common phrase and stays."""
LEAD_WORDS = 3
_WORD = re.compile(r"\w+")
_LAST_SENTENCE_END = re.compile(r".*[.!?]", re.DOTALL)
_SENTENCE_END = re.compile(r"[.!?]")


class Contamination:
    """The word sequences of evaluation texts.

    Args:
        texts: The evaluation texts.
        common: Sequences that are common phrases and stay.
    """

    def __init__(self, texts: Iterable[str], common: frozenset[str] = frozenset()) -> None:
        self._sequences: dict[int, set[str]] = {}
        for text in texts:
            words = _WORD.findall(text.lower())
            size = min(NGRAM_WORDS, len(words))
            if size >= FEWEST_WORDS:
                windows = {" ".join(words[at : at + size]) for at in range(len(words) - size + 1)}
                self._sequences.setdefault(size, set()).update(windows - common)
        # Most places of a text begin no sequence, which three words tell faster than all sizes.
        begins: dict[tuple[str, ...], set[int]] = {}
        for size, known in self._sequences.items():
            for sequence in known:
                begins.setdefault(tuple(sequence.split(" ")[:LEAD_WORDS]), set()).add(size)
        self._sizes = {lead: sorted(sizes, reverse=True) for lead, sizes in begins.items()}

    def __len__(self) -> int:
        """Return how many sequences are known."""
        return sum(map(len, self._sequences.values()))

    def count(self, text: str) -> Counter[str]:
        """Count how often a text holds each known sequence."""
        # With those that overlap: of a common phrase of 20 words, all 13-word sequences are common.
        return Counter(sequence for _, _, sequence in self._matches(text, overlapping=True))

    def clean(self, text: str) -> list[str]:
        """Return what is left of a text: itself when it is clean, pieces of it, or nothing."""
        matches = list(self._matches(text))
        if not matches:
            return [text]
        pieces, start = [], 0
        for begin, end, _ in matches:
            pieces.append(text[start : _end_of_piece(text, start, begin)])
            start = max(start, _start_of_piece(text, end))
        pieces.append(text[start:])
        left = [piece for piece in pieces if len(piece) >= SHORTEST_CHARACTERS]
        return left if len(left) <= MOST_PIECES else []

    def _matches(self, text: str, overlapping: bool = False) -> Iterator[tuple[int, int, str]]:
        # Lower case word by word: the lower case of a whole text can have other positions.
        found = list(_WORD.finditer(text))
        words = [match[0].lower() for match in found]
        at = 0
        while at < len(words):
            for size in self._sizes.get(tuple(words[at : at + LEAD_WORDS]), ()):
                sequence = " ".join(words[at : at + size])
                if sequence in self._sequences[size]:
                    yield found[at].start(), found[at + size - 1].end(), sequence
                    at += 1 if overlapping else size
                    break
            else:
                at += 1


def _end_of_piece(text: str, start: int, match_begin: int) -> int:
    found = _LAST_SENTENCE_END.match(text, start, max(start, match_begin - MARGIN_CHARACTERS))
    return found.end() if found else start


def _start_of_piece(text: str, match_end: int) -> int:
    found = _SENTENCE_END.search(text, match_end + MARGIN_CHARACTERS)
    return found.end() if found else len(text)
