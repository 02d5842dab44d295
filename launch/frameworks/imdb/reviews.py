"""Film reviews with their sentiment as tokens: IMDB from the Hugging Face hub, or synthetic.

Train, validation and test never share a review: the validation split is taken out of what the hub
calls ``train``, and the hub's ``test`` is left as it is.

Synthetic reviews come from a small grammar. A review's label is the sign of what most of its
opinions say. What makes it hard to read off single words: opinions against the verdict, negated
adjectives, and sentences about the story that hold adjectives without meaning an opinion. Some
verdicts are wrong on purpose, so that no model that has learned the grammar gets everything right.

``PREFIX.bin`` and ``PREFIX.idx`` have the layout of Megatron's indexed data sets, so that the
harness counts and fingerprints them like any other data. A document is one review: its split, its
label, then its tokens. ``PREFIX.manifest.json`` says what a reader must know of the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from configs.errors import ConfigError
from configs.files import ROOT, write_json
from dataset import indexed
from dataset.files import DatasetError

SYNTHETIC, IMDB = "synthetic-reviews", "imdb-reviews"
CACHE = ROOT / "dataset" / "cache"
SPLITS = ("train", "validation", "test")
IMDB_REPOSITORY = "stanfordnlp/imdb"
"""Data set of 25,000 reviews for training and 25,000 for tests, half of each kind positive."""
VALIDATION_SHARE = 0.1
"""Share of the hub's training reviews that is held out for validation."""
SPLIT_SEED = 42
"""Chooses the reviews that are held out, the same ones in every run."""
SYNTHETIC_SIZES = {"train": 1280, "validation": 320, "test": 640}
TOKENIZER_REPOSITORY = "FacebookAI/roberta-base"
PAD, END = "<pad>", "</s>"
SPECIAL_TOKENS = ("<s>", PAD, END, "<unk>", "<mask>")
"""In RoBERTa's order, so that padding has id 1 as it has there, and not 0."""
TRAINED_VOCABULARY = 1024
"""Largest vocabulary of a tokenizer that is trained on the synthetic reviews."""
NOISE = 0.06
"""Share of reviews whose label is not what their opinions say."""
AGREES = 0.85
"""Share of a review's opinions that are on the side of its label."""
NEGATED = 0.15
"""Share of opinions that negate an adjective of the other side."""

_GOOD = (
    *("brilliant", "moving", "gripping", "charming", "inventive", "tender", "hilarious"),
    *("convincing", "graceful", "sharp", "haunting", "warm", "fresh", "dazzling", "clever"),
)
_BAD = (
    *("dull", "clumsy", "tedious", "shallow", "lifeless", "predictable", "grating", "muddled"),
    *("wooden", "stale", "pointless", "sloppy", "dreary", "forced", "hollow"),
)
_ASPECTS = (
    *("the acting", "the script", "the camera work", "the pacing", "the score", "the ending"),
    *("the dialogue", "the lead", "the editing", "the humour", "the opening", "the villain"),
)
_OPINIONS = (
    "{aspect} is {adverb} {adjective}",
    "i found {aspect} {adverb} {adjective}",
    "{aspect} felt {adjective} from start to finish",
    "everybody told me that {aspect} would be {adjective}, and it is",
    "there is something {adjective} about {aspect}",
)
_NEGATED = (
    "{aspect} is not {adjective} at all",
    "i would never call {aspect} {adjective}",
    "nothing about {aspect} is {adjective}",
)
_ADVERBS = ("really", "quite", "rather", "truly", "somewhat", "oddly", "simply")
_PEOPLE = ("a retired sailor", "two sisters", "a young clerk", "an old painter", "a lonely judge")
_PLACES = ("a harbour town", "the far north", "a crowded city", "an empty hotel", "the desert")
_EVENTS = (
    "finds a letter that was never sent",
    "must choose between a friend and a promise",
    "loses everything in a single night",
    "waits for a train that does not come",
    "hides a secret from the whole family",
)
_STORY = (
    "the story follows {person} in {place}",
    "in {place}, {person} {event}",
    "it begins when {person} {event}",
    "critics argued over a {adjective} scene with {person}",
    "i saw it with a friend who once lived in {place}",
)
_JOINTS = (". ", ". ", ". ", ", and ", "; ", ". still, ", ". then again, ")


class Review(NamedTuple):
    """A text, and 1 if it recommends the film, else 0."""

    text: str
    label: int


Texts = dict[str, list[Review]]
"""Reviews of each split."""
Split = list[tuple[NDArray[np.int32], int]]
"""Tokens, without truncation or padding, and label of each review."""


def synthetic_reviews(seed: int = 7) -> Texts:
    """Compose reviews from the grammar, for machines without a network.

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
            text = _compose(random_numbers, positive=label == 1)
            if text not in seen:  # A review of another split would leak its label.
                seen.add(text)
                found.append(Review(text, label))
        random_numbers.shuffle(found)
        splits[split] = found
    return splits


def _compose(numbers: Random, positive: bool) -> str:
    says = positive != (numbers.random() < NOISE)
    num_opinions = numbers.choice((1, 3, 3, 3, 5))
    # An odd number of opinions with fewer than half against the verdict never leaves it open.
    against = sum(numbers.random() > AGREES for _ in range(num_opinions))
    sides = [says] * num_opinions
    for place in range(min(against, num_opinions // 2)):
        sides[place] = not says
    sentences = [_opinion(numbers, good) for good in sides]
    sentences += [_story(numbers) for _ in range(numbers.choice((0, 0, 1, 1, 3)))]
    numbers.shuffle(sentences)
    text = sentences[0]
    for sentence in sentences[1:]:
        text += numbers.choice(_JOINTS) + sentence
    return f"{text}."


def _opinion(numbers: Random, good: bool) -> str:
    negated = numbers.random() < NEGATED
    words = _GOOD if good != negated else _BAD
    return numbers.choice(_NEGATED if negated else _OPINIONS).format(
        aspect=numbers.choice(_ASPECTS),
        adverb=numbers.choice(_ADVERBS),
        adjective=numbers.choice(words),
    )


def _story(numbers: Random) -> str:
    return numbers.choice(_STORY).format(
        person=numbers.choice(_PEOPLE),
        place=numbers.choice(_PLACES),
        event=numbers.choice(_EVENTS),
        adjective=numbers.choice(_GOOD + _BAD),
    )


def hub_reviews(endpoint: str | None = None) -> Texts:
    """Read IMDB from the hub, by default that of ``HF_ENDPOINT`` or the public one.

    Raises:
        ConfigError: the files cannot be had, or do not hold reviews with labels 0 and 1.
    """
    from pyarrow import parquet

    found: list[list[Review]] = []
    for split in ("train", "test"):
        path = _fetch(IMDB_REPOSITORY, f"plain_text/{split}-00000-of-00001.parquet", endpoint)
        try:
            table = parquet.read_table(path, columns=["text", "label"]).to_pydict()
        except (OSError, ValueError) as error:  # pyarrow's own errors are among them
            raise ConfigError(
                f"{path}: no Parquet file with columns text and label ({error}); download it anew"
            ) from None
        if unknown := set(table["label"]) - {0, 1}:
            raise ConfigError(f"{path}: label = {min(unknown)}: only 0 and 1 mean a sentiment")
        found.append(list(map(Review, table["text"], table["label"])))
    train, test = found
    random.Random(SPLIT_SEED).shuffle(train)
    num_held_out = round(len(train) * VALIDATION_SHARE)
    return {"train": train[num_held_out:], "validation": train[:num_held_out], "test": test}


def _fetch(repository: str, name: str, endpoint: str | None) -> Path:
    """Return a file of the hub, which is downloaded once into the hub's own cache."""
    # Loading the client takes a second, and the synthetic set needs none of it.
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    kind = "dataset" if repository == IMDB_REPOSITORY else None
    try:
        return Path(hf_hub_download(repository, name, repo_type=kind, endpoint=endpoint))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"{repository}/{name} cannot be downloaded from the Hugging Face hub "
            f"({type(error).__name__}); check the network or HF_ENDPOINT, or take the synthetic "
            "reviews with data_prefix = 'synthetic-reviews'"
        ) from None


def trained_tokenizer(texts: Iterable[str], vocab_size: int = TRAINED_VOCABULARY) -> Tokenizer:
    """Train a byte-level BPE tokenizer like RoBERTa's.

    Only training reviews may go in: what validation and test consist of is not to be known.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    end, begin = ((word, SPECIAL_TOKENS.index(word)) for word in (END, "<s>"))
    tokenizer.post_processor = processors.RobertaProcessing(end, begin, add_prefix_space=False)
    return tokenizer


def _synthetic() -> tuple[Texts, Tokenizer, str]:
    texts = synthetic_reviews()
    tokenizer = trained_tokenizer(review.text for review in texts["train"])
    return texts, tokenizer, "synthetic reviews, composed from a grammar (not IMDB)"


def imdb(endpoint: str | None = None) -> tuple[Texts, Tokenizer, str]:
    """Return IMDB, the tokenizer of ``roberta-base``, and where both come from.

    Raises:
        ConfigError: they cannot be had.
    """
    tokenizer = Tokenizer.from_file(str(_fetch(TOKENIZER_REPOSITORY, "tokenizer.json", endpoint)))
    return hub_reviews(endpoint), tokenizer, f"{IMDB_REPOSITORY} from the Hugging Face hub"


SOURCES: dict[str, Callable[[], tuple[Texts, Tokenizer, str]]] = {
    SYNTHETIC: _synthetic,
    IMDB: imdb,
}
"""Name of data to what makes its texts, their tokenizer and the words for where they come from."""


def prepared(name: str) -> str:
    """Return the absolute prefix of tokenized reviews, which are made if they are not there yet.

    Raises:
        ConfigError: the hub's files cannot be had.
    """
    folder = _folder(name)
    if prefix_if_made(name) is None:
        texts, tokenizer, source = SOURCES[name]()
        CACHE.mkdir(parents=True, exist_ok=True)
        # The folder appears with all of its files at once, whoever else is making it.
        with tempfile.TemporaryDirectory(dir=CACHE, prefix=f".{folder.name}-") as made:
            write(Path(made) / name, texts, tokenizer, source)
            if not folder.exists():
                Path(made).replace(folder)
    return str(folder / name)


def prefix_if_made(name: str) -> str | None:
    """Return the absolute prefix of tokenized reviews; None if they are not there yet."""
    prefix = _folder(name) / name
    return str(prefix) if prefix.with_suffix(".manifest.json").is_file() else None


def _folder(name: str) -> Path:
    # Another code or package makes other files, which lie elsewhere.
    recipe = hashlib.sha256(metadata.version("tokenizers").encode())
    recipe.update(Path(__file__).read_bytes())
    return CACHE / f"{name}-{recipe.hexdigest()[:8]}"


def write(prefix: Path, texts: Texts, tokenizer: Tokenizer, source: str) -> None:
    """Tokenize three splits into ``PREFIX.bin``, ``PREFIX.idx`` and a manifest."""
    end_id: Any = tokenizer.token_to_id(END)

    def documents() -> Iterator[NDArray[np.int32]]:
        for number, split in enumerate(SPLITS):
            encoded = tokenizer.encode_batch([review.text for review in texts[split]])
            for review, encoding in zip(texts[split], encoded, strict=True):
                # Every review ends in the token that is written behind it.
                yield np.array([number, review.label, *encoding.ids[:-1]], dtype=np.int32)

    indexed.write(prefix, documents(), end_id, tokenizer.get_vocab_size())
    manifest = {
        "prefix": prefix.name,
        "source": source,
        "vocab_size": tokenizer.get_vocab_size(),
        # Nothing may be assumed: RoBERTa's is 1.
        "pad_id": tokenizer.token_to_id(PAD),
        "end_id": end_id,
    }
    write_json(prefix.with_suffix(".manifest.json"), manifest)


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
        splits[SPLITS[number]].append((tokens[2:], int(label)))
    return TokenizedReviews(splits, **known)
