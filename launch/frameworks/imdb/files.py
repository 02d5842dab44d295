"""Tokenized reviews on disk: made once, read by every run, told apart by their checksums.

``PREFIX.bin`` and ``PREFIX.idx`` have the layout of Megatron's indexed data sets, so that the
harness counts and fingerprints them like any other data. A document is one review: its split, its
label, then its tokens. Split and label lie in the file itself because they decide the result as
much as the tokens do. ``PREFIX.manifest.json`` says what a reader must know of the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from configs.errors import ConfigError
from configs.files import ROOT, write_json
from dataset import indexed
from dataset.files import DatasetError
from launch.frameworks.imdb.reviews import (
    END,
    PAD,
    SPLITS,
    Reviews,
    hub_reviews,
    roberta_tokenizer,
    synthetic_reviews,
    trained_tokenizer,
)

SYNTHETIC, IMDB = "synthetic-reviews", "imdb-reviews"
CACHE = ROOT / "dataset" / "cache"
_NUM_MARKS = 2
"""Numbers of a document before its tokens: split and label."""

Split = list[tuple[NDArray[np.int32], int]]
"""Tokens, without truncation or padding, and label of each review."""


@dataclass(frozen=True)
class TokenizedReviews:
    """What the data module reads."""

    splits: dict[str, Split]
    pad_id: int
    end_id: int
    """Token that ends a review, be it truncated."""
    vocab_size: int
    source: str
    """Where the reviews come from, in words."""

    def __getitem__(self, split: str) -> Split:
        """Return the reviews of ``train``, ``validation`` or ``test``."""
        return self.splits[split]


def prepared(name: str) -> str:
    """Return the absolute prefix of tokenized reviews, which are made if they are not there yet.

    Args:
        name: ``synthetic-reviews``, or ``imdb-reviews`` which come from the hub.

    Raises:
        ConfigError: the hub's files cannot be had.
    """
    folder = _folder(name)
    if prefix_if_made(name) is None:
        reviews, tokenizer = _SOURCES[name]()
        CACHE.mkdir(parents=True, exist_ok=True)
        # The folder appears with all of its files at once, whoever else is making it.
        with tempfile.TemporaryDirectory(dir=CACHE, prefix=f".{folder.name}-") as made:
            write(Path(made) / name, reviews, tokenizer)
            if not folder.exists():
                Path(made).replace(folder)
    return str(folder / name)


def prefix_if_made(name: str) -> str | None:
    """Return the absolute prefix of tokenized reviews; None if they are not there yet."""
    prefix = _folder(name) / name
    return str(prefix) if prefix.with_suffix(".manifest.json").is_file() else None


def _folder(name: str) -> Path:
    return CACHE / f"{name}-{_recipe()}"


def _synthetic() -> tuple[Reviews, Tokenizer]:
    reviews = synthetic_reviews()
    return reviews, trained_tokenizer(review.text for review in reviews.train)


_SOURCES: dict[str, Callable[[], tuple[Reviews, Tokenizer]]] = {
    SYNTHETIC: _synthetic,
    IMDB: lambda: (hub_reviews(), roberta_tokenizer()),
}


def _recipe() -> str:
    """Digest the code and the package that the files are made by, so that others lie elsewhere."""
    found = hashlib.sha256(metadata.version("tokenizers").encode())
    for name in ("reviews.py", "files.py"):
        found.update(Path(__file__).with_name(name).read_bytes())
    return found.hexdigest()[:8]


def write(prefix: Path, reviews: Reviews, tokenizer: Tokenizer) -> None:
    """Tokenize three splits into ``PREFIX.bin``, ``PREFIX.idx`` and a manifest."""
    end_id: Any = tokenizer.token_to_id(END)

    def documents() -> Iterator[NDArray[np.int32]]:
        for number, split in enumerate(SPLITS):
            found = getattr(reviews, split)
            encoded = tokenizer.encode_batch([review.text for review in found])
            for review, encoding in zip(found, encoded, strict=True):
                # Every review ends in the token that is written behind it.
                yield np.array([number, review.label, *encoding.ids[:-1]], dtype=np.int32)

    indexed.write(prefix, documents(), end_id, tokenizer.get_vocab_size())
    tokenizer.save(f"{prefix}.tokenizer.json")
    manifest = {
        "prefix": prefix.name,
        "source": reviews.source,
        "vocab_size": tokenizer.get_vocab_size(),
        # Nothing may be assumed: RoBERTa's is 1.
        "pad_id": tokenizer.token_to_id(PAD),
        "end_id": end_id,
        "reviews": {split: len(getattr(reviews, split)) for split in SPLITS},
    }
    write_json(prefix.with_suffix(".manifest.json"), manifest)


def read(prefix: str) -> TokenizedReviews:
    """Read what :func:`write` wrote.

    Raises:
        ConfigError: a file is missing or is of another form.
    """
    try:
        manifest = json.loads(Path(f"{prefix}.manifest.json").read_bytes())
        known = {key: manifest[key] for key in ("pad_id", "end_id", "vocab_size", "source")}
        index = indexed.read(Path(prefix))
        if index.num_indexed != len(index.ids):
            raise ValueError(f"{index.num_indexed} tokens indexed, {len(index.ids)} in the file")
    except (OSError, ValueError, KeyError, DatasetError) as error:
        raise ConfigError(
            f"data_prefix: {prefix} holds no tokenized reviews ({error}); give data_prefix = "
            f"{SYNTHETIC!r} or {IMDB!r}"
        ) from None
    splits: dict[str, Split] = {split: [] for split in SPLITS}
    for position in range(index.num_documents):
        number, label, *_ = tokens = index.document(position).astype(np.int32)
        splits[SPLITS[number]].append((tokens[_NUM_MARKS:], int(label)))
    return TokenizedReviews(splits, **known)
