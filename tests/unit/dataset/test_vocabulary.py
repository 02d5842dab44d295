import pytest

from dataset import vocabulary
from dataset.errors import DatasetError

TEXTS = ["the cat sat on the mat", "the hat of the cat"] * 5


def test_training_twice_gives_the_same_vocabulary():
    first, second = (vocabulary.train(TEXTS, 300).to_str() for _ in range(2))
    assert first == second


def test_end_of_document_is_the_first_entry_and_the_size_is_kept():
    tokenizer = vocabulary.train(TEXTS, 270)
    assert vocabulary.end_of_document_id(tokenizer) == 0
    assert tokenizer.get_vocab_size() == 270


def test_training_learns_frequent_words():
    tokenizer = vocabulary.train(TEXTS, 300)
    assert len(next(vocabulary.encode(tokenizer, ["the cat"]))) == 2


def test_a_text_cannot_end_its_own_document():
    tokenizer = vocabulary.train(TEXTS, 300)
    text = f"before {vocabulary.END_OF_DOCUMENT} after"
    (ids,) = vocabulary.encode(tokenizer, [text])
    assert vocabulary.end_of_document_id(tokenizer) not in ids
    assert tokenizer.decode(ids) == text


def test_order_is_kept_over_batches(monkeypatch):
    monkeypatch.setattr(vocabulary, "BATCH_SIZE", 3)
    tokenizer = vocabulary.train(TEXTS, 300)
    texts = [f"cat {n}" for n in range(10)]
    assert [tokenizer.decode(ids) for ids in vocabulary.encode(tokenizer, texts)] == texts


def test_a_saved_tokenizer_loads_and_encodes_the_same(tmp_path):
    tokenizer = vocabulary.train(TEXTS, 300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = vocabulary.load(tmp_path / "tokenizer.json")
    texts = ["unseen Ünïcode\n\ttext"]
    assert list(vocabulary.encode(loaded, texts)) == list(vocabulary.encode(tokenizer, texts))


def test_a_vocabulary_too_small_for_the_bytes_is_refused():
    with pytest.raises(DatasetError, match="vocab_size = 256: at least 257"):
        vocabulary.train(TEXTS, 256)


def test_a_vocabulary_without_end_of_document_is_refused():
    from tokenizers import Tokenizer, models

    with pytest.raises(DatasetError, match=r"no <\|endoftext\|> token"):
        vocabulary.end_of_document_id(Tokenizer(models.BPE()))


@pytest.mark.parametrize(("content", "message"), [(None, "no tokenizer"), ("{", "not a tokenizer")])
def test_a_missing_or_broken_tokenizer_is_named(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DatasetError, match=message):
        vocabulary.load(path)
