"""Near-duplicates, by MinHash: of texts that are much alike, the first is kept."""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_PERMUTATIONS = 128
SHINGLE_WORDS = 5
SCHEME = "affine32"
# Above it the library finds no two bands to propose duplicates by.
MOST_PROPOSED = 0.99
_WORD = re.compile(r"\w+")


def signature(text: str) -> NDArray[np.uint32]:
    """Sketch of a text's five-word stretches, (128,); equal shares estimate the Jaccard index."""
    from datasketch import MinHash  # type: ignore[import-untyped]

    words = _WORD.findall(text.lower())
    last = max(1, len(words) - SHINGLE_WORDS + 1)
    shingles = {" ".join(words[at : at + SHINGLE_WORDS]) for at in range(last)}
    sketch: Any = MinHash(NUM_PERMUTATIONS, scheme=SCHEME)
    sketch.update_batch([shingle.encode() for shingle in shingles])
    values: NDArray[np.uint32] = sketch.hashvalues.astype(np.uint32)
    return values


class Seen:
    """The texts kept so far.

    Args:
        threshold: Share of equal values from which a text is a duplicate.
    """

    def __init__(self, threshold: float) -> None:
        from datasketch import MinHashLSH

        self._threshold = threshold
        # Few misses rather than few candidates: what it proposes is compared in full. A band's
        # values take several times the eight bytes of their digest.
        self._lsh: Any = MinHashLSH(
            min(threshold, MOST_PROPOSED),
            NUM_PERMUTATIONS,
            weights=(0.2, 0.8),
            hashfunc=lambda values: blake2b(values, digest_size=8).digest(),
        )
        self._kept: list[NDArray[np.uint32]] = []

    def is_new(self, values: NDArray[np.uint32]) -> bool:
        """Whether nothing alike was kept; then this text is."""
        from datasketch import MinHash

        sketch = MinHash(NUM_PERMUTATIONS, hashvalues=values, scheme=SCHEME)
        candidates = self._lsh.query(sketch)
        if any((self._kept[one] == values).mean() >= self._threshold for one in candidates):
            return False
        self._lsh.insert(len(self._kept), sketch, check_duplication=False)
        self._kept.append(values)
        return True
