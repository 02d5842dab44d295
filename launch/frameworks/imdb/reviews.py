"""Film reviews with their sentiment: IMDB from the Hugging Face hub, or a synthetic set.

Train, validation and test never share a review: the validation split is taken out of what the hub
calls ``train``, and the hub's ``test`` is left as it is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from launch.frameworks.imdb.errors import ImdbError
from launch.frameworks.imdb.grammar import compose

NEGATIVE, POSITIVE = 0, 1
SPLITS = ("train", "validation", "test")
REPOSITORY = "stanfordnlp/imdb"
"""Data set of 25,000 reviews for training and 25,000 for tests, half of each kind positive."""
VALIDATION_SHARE = 0.1
"""Share of the hub's training reviews that is held out for validation."""
SPLIT_SEED = 42
"""Chooses the reviews that are held out, the same ones in every run."""
SYNTHETIC_SIZES = {"train": 1280, "validation": 320, "test": 640}


class Review(NamedTuple):
    """A text and whether it recommends the film."""

    text: str
    label: int
    """``NEGATIVE`` or ``POSITIVE``."""


@dataclass(frozen=True)
class Reviews:
    """Three splits that share no review."""

    train: Sequence[Review]
    validation: Sequence[Review]
    test: Sequence[Review]
    source: str
    """Where they come from, in words."""


def synthetic_reviews(seed: int = 7) -> Reviews:
    """Reviews composed from a grammar, for machines without a network.

    They look like the real set (two balanced classes, texts of very different lengths) and are no
    substitute for it: accuracy on them says nothing about IMDB.
    """
    random_numbers = random.Random(seed)
    seen: set[str] = set()
    splits = {}
    for split, size in SYNTHETIC_SIZES.items():
        found: list[Review] = []
        while len(found) < size:
            label = len(found) % 2
            text = compose(random_numbers, positive=label == POSITIVE)
            if text not in seen:  # A review of another split would leak its label.
                seen.add(text)
                found.append(Review(text, label))
        random_numbers.shuffle(found)
        splits[split] = tuple(found)
    return Reviews(**splits, source="synthetic reviews, composed from a grammar (not IMDB)")


def hub_reviews(endpoint: str | None = None) -> Reviews:
    """IMDB from the Hugging Face hub, downloaded once into the hub's own cache.

    Args:
        endpoint: address of the hub; None for ``HF_ENDPOINT`` or the public one.

    Raises:
        ImdbError: the files cannot be had, or do not hold reviews with labels 0 and 1.
    """
    train = read_parquet(fetch("plain_text/train-00000-of-00001.parquet", endpoint))
    test = read_parquet(fetch("plain_text/test-00000-of-00001.parquet", endpoint))
    random.Random(SPLIT_SEED).shuffle(train)
    num_held_out = round(len(train) * VALIDATION_SHARE)
    return Reviews(
        train=tuple(train[num_held_out:]),
        validation=tuple(train[:num_held_out]),
        test=tuple(test),
        source=f"{REPOSITORY} from the Hugging Face hub",
    )


def fetch(name: str, endpoint: str | None, repository: str = REPOSITORY) -> Path:
    """A file of a repository of the hub, from the cache or the network.

    Raises:
        ImdbError: it is neither in the cache nor to be had.
    """
    # Loading the client takes a second, and the synthetic set needs none of it.
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    kind = "dataset" if repository == REPOSITORY else None
    try:
        return Path(hf_hub_download(repository, name, repo_type=kind, endpoint=endpoint))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ImdbError(
            f"{repository}/{name} cannot be downloaded from the Hugging Face hub "
            f"({type(error).__name__}); check the network or HF_ENDPOINT, or take the synthetic "
            "reviews with data_prefix = 'synthetic-reviews'"
        ) from None


def read_parquet(path: Path) -> list[Review]:
    """Reviews of a Parquet file with columns ``text`` and ``label``.

    Raises:
        ImdbError: a column is missing, or a label is neither 0 nor 1.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.read_table(path, columns=["text", "label"]).to_pydict()
    except (OSError, pa.ArrowException) as error:
        raise ImdbError(
            f"{path}: no Parquet file with columns text and label ({error}); download it anew"
        ) from None
    strange = set(table["label"]) - {NEGATIVE, POSITIVE}
    if strange:
        raise ImdbError(f"{path}: label = {min(strange)}: only 0 and 1 mean a sentiment")
    return [Review(*pair) for pair in zip(table["text"], table["label"], strict=True)]
