"""Near-duplicates, by MinHash: of texts that are much alike, the first is kept."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SCHEME = "affine32"
# Above it the library finds no two bands to propose duplicates by.
MOST_PROPOSED = 0.99
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Sketch:
    """How texts are sketched; sketches made otherwise cannot be compared."""

    permutations: int = 128
    shingle_words: int = 5
    seed: int = 1

    def of(self, text: str) -> NDArray[np.uint32]:
        """Sketch of a text's stretches of words, (permutations,).

        Equal shares of two sketches estimate the Jaccard index of the texts.
        """
        words = _WORD.findall(text.lower())
        last = max(1, len(words) - self.shingle_words + 1)
        shingles = {" ".join(words[at : at + self.shingle_words]) for at in range(last)}
        sketch = self._min_hash()
        sketch.update_batch([shingle.encode() for shingle in shingles])
        values: NDArray[np.uint32] = sketch.hashvalues.astype(np.uint32)
        return values

    def min_hash(self, values: NDArray[np.uint32]) -> Any:  # noqa: ANN401 - it has no types
        """What the library wants instead of values."""
        return self._min_hash(hashvalues=values)

    def _min_hash(self, **more: Any) -> Any:  # noqa: ANN401
        from datasketch import MinHash  # type: ignore[import-untyped]

        return MinHash(self.permutations, self.seed, scheme=SCHEME, **more)


class Alike(NamedTuple):
    """The text kept before that another is most like."""

    number: int
    """From 0, in the order in which texts were kept."""
    similarity: float


class Seen:
    """The texts kept so far.

    Args:
        threshold: Share of equal values from which a text is a duplicate.
        sketch: How they are sketched.
    """

    def __init__(self, threshold: float, sketch: Sketch = Sketch()) -> None:
        from datasketch import MinHashLSH

        self._threshold = threshold
        self._sketch = sketch
        # Few misses rather than few candidates: what it proposes is compared in full. A band's
        # values take several times the eight bytes of their digest.
        self._lsh: Any = MinHashLSH(
            min(threshold, MOST_PROPOSED),
            sketch.permutations,
            weights=(0.2, 0.8),
            hashfunc=lambda values: blake2b(values, digest_size=8).digest(),
        )
        self._kept: list[NDArray[np.uint32]] = []

    @property
    def kept(self) -> Sequence[NDArray[np.uint32]]:
        """The sketches of the texts kept."""
        return self._kept

    def alike(self, values: NDArray[np.uint32]) -> Alike | None:
        """The kept text that one is a duplicate of; None when there is none, and it is kept."""
        sketch = self._sketch.min_hash(values)
        proposed = sorted(self._lsh.query(sketch))  # the first of equals, not any
        found = [Alike(one, float((self._kept[one] == values).mean())) for one in proposed]
        best = max(found, key=lambda one: one.similarity, default=None)
        if best and best.similarity >= self._threshold:
            return best
        self._add(values, sketch)
        return None

    def add(self, values: NDArray[np.uint32]) -> None:
        """Keep a text of an earlier run, whatever it is like."""
        self._add(values, self._sketch.min_hash(values))

    def _add(self, values: NDArray[np.uint32], sketch: Any) -> None:  # noqa: ANN401
        self._lsh.insert(len(self._kept), sketch, check_duplication=False)
        self._kept.append(values)
