"""Evaluation texts, found in a document and cut out of it.

As GPT-3 and Megatron's OpenWebText recipe do it: what shares 13 words in a row with an evaluation
text goes, with 200 characters on either side; stretches too short to be of use go as well, and a
document that falls into many pieces goes whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

LEAD_WORDS = 3
_WORD = re.compile(r"\w+")
_LAST_SENTENCE_END = re.compile(r".*[.!?]", re.DOTALL)
_SENTENCE_END = re.compile(r"[.!?]")


@dataclass(frozen=True)
class Ngrams:
    """What counts as shared, and what goes with it; the defaults are the recipe's."""

    words: int = 13
    fewest_words: int = 8
    """Shorter evaluation texts count as a whole from here; below, they could be in any text."""
    margin_characters: int = 200
    shortest_characters: int = 200
    """What is left between two cuts goes below this."""
    most_pieces: int = 10
    whole_sentences: bool = False
    """Cut on to the next end of a sentence on either side, as the recipe's program does."""
    max_matches: int | None = None
    """What the input holds this many times or more is a common phrase and stays."""


class Contamination:
    """The word sequences of evaluation texts.

    Args:
        texts: The evaluation texts.
        ngrams: What counts as shared.
        common: Sequences that are none of the evaluation's alone and stay.
    """

    def __init__(
        self, texts: Iterable[str], ngrams: Ngrams = Ngrams(), common: frozenset[str] = frozenset()
    ) -> None:
        self._ngrams = ngrams
        self._sequences: dict[int, set[str]] = {}
        for text in texts:
            words = _WORD.findall(text.lower())
            size = min(ngrams.words, len(words))
            if size >= ngrams.fewest_words:
                known = self._sequences.setdefault(size, set())
                known.update(set(_windows(words, size)) - common)
        # Most places of a text begin no sequence, which three words tell faster than all sizes.
        self._lead = min(LEAD_WORDS, *self._sequences) if self._sequences else 0
        begins: dict[tuple[str, ...], set[int]] = {}
        for size, known in self._sequences.items():
            for sequence in known:
                begins.setdefault(tuple(sequence.split(" ", self._lead)[: self._lead]), set()).add(
                    size
                )
        self._begins = {lead: sorted(sizes, reverse=True) for lead, sizes in begins.items()}

    def __len__(self) -> int:
        """Sequences known."""
        return sum(map(len, self._sequences.values()))

    def count(self, text: str) -> Counter[str]:
        """How often a text holds each known sequence, those that overlap as well."""
        # Without these, of a common phrase of 20 words only the first 13 would be common.
        return Counter(sequence for _, _, sequence in self._matches(text, overlapping=True))

    def clean(self, text: str) -> list[str]:
        """What is left of a text: itself when it is clean, pieces of it, or nothing."""
        matches = list(self._matches(text))
        if not matches:
            return [text]
        pieces, start = [], 0
        for begin, end, _ in matches:
            pieces.append(text[start : self._cut_from(text, start, begin)])
            start = max(start, self._cut_to(text, end))
        pieces.append(text[start:])
        left = [piece for piece in pieces if len(piece) >= self._ngrams.shortest_characters]
        return left if len(left) <= self._ngrams.most_pieces else []

    def _cut_from(self, text: str, start: int, begin: int) -> int:
        """Where the piece from ``start`` ends that comes before a match."""
        last = max(start, begin - self._ngrams.margin_characters)
        if not self._ngrams.whole_sentences:
            return last
        found = _LAST_SENTENCE_END.match(text, start, last)
        return found.end() if found else start

    def _cut_to(self, text: str, end: int) -> int:
        """Where the text goes on after a match."""
        first = min(len(text), end + self._ngrams.margin_characters)
        if not self._ngrams.whole_sentences:
            return first
        found = _SENTENCE_END.search(text, first)
        return found.end() if found else len(text)

    def _matches(self, text: str, overlapping: bool = False) -> Iterator[tuple[int, int, str]]:
        """Where sequences begin and end, and which they are."""
        # Lower case word by word: of a whole text it can change positions.
        found = list(_WORD.finditer(text))
        words = [match[0].lower() for match in found]
        at = 0
        while at < len(words):
            for size in self._begins.get(tuple(words[at : at + self._lead]), ()):
                sequence = " ".join(words[at : at + size])
                if sequence in self._sequences[size]:
                    yield found[at].start(), found[at + size - 1].end(), sequence
                    at += 1 if overlapping else size
                    break
            else:
                at += 1


def _windows(words: list[str], size: int) -> Iterator[str]:
    for at in range(len(words) - size + 1):
        yield " ".join(words[at : at + size])
