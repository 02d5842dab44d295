"""Reviews and their tokens: three splits that share nothing, from a grammar or from the hub."""

import collections
import re

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from configs.errors import ConfigError
from launch.frameworks.imdb import reviews as module
from launch.frameworks.imdb.reviews import (
    PAD,
    SPECIAL_TOKENS,
    SPLITS,
    SYNTHETIC,
    Review,
    hub_reviews,
    synthetic_reviews,
    trained_tokenizer,
)


@pytest.fixture(scope="module")
def synthetic():
    return synthetic_reviews()


def texts_of(reviews):
    return [{review.text for review in reviews[split]} for split in SPLITS]


def test_synthetic_splits_share_no_review_are_balanced_and_the_same_every_time(synthetic):
    texts = texts_of(synthetic)
    assert not texts[0] & texts[1] | texts[0] & texts[2] | texts[1] & texts[2]
    assert [len(text) for text in texts] == list(module.SYNTHETIC_SIZES.values())
    for split in SPLITS:
        labels = collections.Counter(review.label for review in synthetic[split])
        assert labels[0] == labels[1]
    assert synthetic_reviews() == synthetic
    assert synthetic_reviews(seed=8)["train"] != synthetic["train"]


def test_counting_good_and_bad_words_does_not_solve_them(synthetic):
    """Else accuracy would say nothing of what the encoder has learned."""
    good, bad = (re.compile("|".join(words)) for words in (module._GOOD, module._BAD))
    test = synthetic["test"]
    balances = [len(good.findall(r.text)) - len(bad.findall(r.text)) for r in test]
    hits = np.mean([(b > 0) == r.label for b, r in zip(balances, test, strict=True)])
    assert 0.55 < hits < 0.85


def table(path, count, start=0, **changed):
    labels = [number % 2 for number in range(count)]
    columns = {"text": [f"review {start + number}" for number in range(count)], "label": labels}
    parquet.write_table(pa.table({**columns, **changed}), path)
    return path.read_bytes()


@pytest.fixture
def imdb(hub, tmp_path, monkeypatch):
    """A hub with a small IMDB in the form of the real one, and its tokenizer."""
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    base = "datasets/stanfordnlp/imdb/resolve/main/plain_text"
    for number, split in enumerate(("train", "test")):
        content = table(tmp_path / "x.parquet", 40, 1000 * number)
        hub.files[f"{base}/{split}-00000-of-00001.parquet"] = content
    tokenizer = trained_tokenizer(["a review of a film"], 300)
    name = "FacebookAI/roberta-base/resolve/main/tokenizer.json"
    hub.files[name] = tokenizer.to_str().encode()
    return hub


def test_imdb_is_read_from_the_hub_with_validation_held_out_of_training(imdb):
    found = hub_reviews(imdb.url)
    train, validation, test = texts_of(found)
    assert [len(train), len(validation), len(test)] == [36, 4, 40]
    assert train | validation == {f"review {number}" for number in range(40)}
    assert test == {f"review {number}" for number in range(1000, 1040)}
    assert hub_reviews(imdb.url) == found
    assert module.imdb(imdb.url)[1].token_to_id(PAD) == 1


def test_a_hub_that_does_not_answer_is_told_in_a_sentence(imdb):
    imdb.files.clear()
    with pytest.raises(ConfigError, match=r"stanfordnlp/imdb/.* cannot be downloaded .* take the"):
        hub_reviews(imdb.url)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"label": [-1] * 40}, "label = -1: only 0 and 1"),
        (None, "columns text and label"),
    ],
)
def test_a_file_of_other_labels_or_without_reviews_is_refused(imdb, tmp_path, columns, message):
    content = b"no parquet" if columns is None else table(tmp_path / "y.parquet", 40, **columns)
    for name in imdb.files:
        if name.endswith("test-00000-of-00001.parquet"):
            imdb.files[name] = content
    with pytest.raises(ConfigError, match=message):
        hub_reviews(imdb.url)


def test_the_trained_tokenizer_has_robertas_special_tokens_and_gives_texts_back():
    tokenizer = trained_tokenizer(["a moving film", "a dull film"] * 5, 400)
    assert [tokenizer.token_to_id(word) for word in SPECIAL_TOKENS] == list(range(5))
    assert tokenizer.token_to_id(PAD) == 1
    encoded = tokenizer.encode("a dull film, naïve 🎬")
    assert (encoded.tokens[0], encoded.tokens[-1]) == ("<s>", "</s>")
    assert tokenizer.decode(encoded.ids) == "a dull film, naïve 🎬"


REVIEWS = {
    "train": [Review("a moving film", 1), Review("a dull, dull film", 0)],
    "validation": [Review("a film", 0)],
    "test": [Review("moving", 1)],
}


@pytest.fixture
def written(tmp_path):
    tokenizer = trained_tokenizer([review.text for review in REVIEWS["train"]], 300)
    module.write(tmp_path / "x", REVIEWS, tokenizer, "a test")
    return tokenizer, str(tmp_path / "x")


def test_what_was_written_is_read_back(written):
    tokenizer, prefix = written
    found = module.read(prefix)
    for split in SPLITS:
        expected = [(tokenizer.encode(r.text).ids, r.label) for r in REVIEWS[split]]
        assert [(tokens.tolist(), label) for tokens, label in found.splits[split]] == expected
    assert (found.pad_id, found.end_id, found.source) == (1, 2, "a test")


@pytest.mark.parametrize(
    ("ending", "lost"), [(".bin", 1), (".bin", 2), (".idx", 5), (".manifest.json", 5)]
)
def test_a_damaged_file_is_refused(written, ending, lost):
    _, prefix = written
    path = module.Path(prefix + ending)
    path.write_bytes(path.read_bytes()[:-lost])
    with pytest.raises(ConfigError, match="holds no tokenized reviews"):
        module.read(prefix)


def test_prepared_reviews_are_made_once_and_anew_when_the_recipe_changes(tmp_path, monkeypatch):
    made = []

    def source():
        made.append(1)
        return REVIEWS, trained_tokenizer(["a film"], 300), "a test"

    monkeypatch.setattr(module, "CACHE", tmp_path)
    monkeypatch.setitem(module.SOURCES, SYNTHETIC, source)
    assert module.prefix_if_made(SYNTHETIC) is None
    first = module.prepared(SYNTHETIC)
    assert module.prepared(SYNTHETIC) == module.prefix_if_made(SYNTHETIC) == first
    assert len(made) == 1
    monkeypatch.setattr(module.metadata, "version", lambda _package: "another")
    assert module.prepared(SYNTHETIC) != first
    assert len(made) == 2
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_failure_leaves_no_half_made_reviews(tmp_path, monkeypatch):
    class BreaksOff:
        token_to_id = get_vocab_size = lambda *_: 2

        def encode_batch(self, _texts):
            raise OSError("the disk is full")

    monkeypatch.setattr(module, "CACHE", tmp_path)
    monkeypatch.setitem(module.SOURCES, SYNTHETIC, lambda: (REVIEWS, BreaksOff(), "a test"))
    with pytest.raises(OSError, match="full"):
        module.prepared(SYNTHETIC)
    assert list(tmp_path.iterdir()) == []
