"""What the pipeline asks of a corpus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


class Source(Protocol):
    """A corpus: a name for files, a digest to cache by, and documents in a fixed order."""

    @property
    def name(self) -> str:
        """Short name, fit for file names; the prefix is ``<name>_text_document``."""

    def fingerprint(self) -> str:
        """Digest of everything `documents` depends on; quick, as every call computes it."""

    def documents(self) -> Iterator[str]:
        """The texts, none of them empty, in the same order on every call."""
