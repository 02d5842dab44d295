import pytest
import sentencepiece

from dataset.errors import DatasetError
from dataset.tokenizer.choose import load
from dataset.tokenizer.sentence_piece import SentencePiece, learn

TEXTS = ["the cat sat on the mat", "the hat of the cat", "ein Haus für den Hund"] * 20


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "x.model"
    path.write_bytes(learn(TEXTS, 320))
    return path


def test_the_ids_are_those_of_the_library(path):
    ours = load(path)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert isinstance(ours, SentencePiece)
    assert (ours.vocab_size, ours.eod) == (320, theirs.eos_id())
    assert ours.encode("the cat 東").tolist() == theirs.encode("the cat 東")


def test_every_text_comes_back(path):
    model = load(path)
    for text in (*TEXTS[:3], "unseen 東京 🙂", "two  blanks"):
        assert model.decode(model.encode(text).tolist()) == text


def test_training_twice_gives_the_same_model():
    assert learn(TEXTS, 300) == learn(TEXTS, 300)


def test_long_lines_are_learnt_from(tmp_path):
    (tmp_path / "x.model").write_bytes(learn(["zebra " * 5000], 280))
    assert len(load(tmp_path / "x.model").encode("zebra zebra")) < 8


@pytest.mark.parametrize("vocab_size", [10, 5000])
def test_a_size_the_texts_cannot_give_is_named(vocab_size):
    with pytest.raises(DatasetError, match=f"--vocab-size {vocab_size}: "):
        learn(TEXTS, vocab_size)


def test_what_is_no_model_is_named(tmp_path):
    (tmp_path / "x.model").write_bytes(b"no")
    with pytest.raises(DatasetError, match=r"x.model is not a SentencePiece model"):
        load(tmp_path / "x.model")


def test_a_model_without_end_of_sentence_has_no_end_of_document(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(tmp_path / "x"), vocab_size=24,
        eos_id=-1, minloglevel=2,
    )  # fmt: skip
    assert load(tmp_path / "x.model").eod is None
