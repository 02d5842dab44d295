import json
import lzma
from pathlib import Path

import pytest
import sentencepiece

from dataset.files import DatasetError
from dataset.tokenizer import BYTES, END_OF_DOCUMENT, ByteLevelBpe, SentencePiece, load

SHARED = Path(__file__).resolve().parents[3] / ".." / "shared" / "data"
TEXTS = ["the cat sat on the mat", "the hat of the cat", "don't  panic\n\n", "Ünïcode 東京 42!"] * 5


@pytest.fixture(scope="module")
def learnt():
    return ByteLevelBpe.learn(TEXTS, 290)


def gpt2_files(folder, tokenizer):
    """Write a tokenizer as GPT-2's two files."""
    model = json.loads(tokenizer._json)["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "".join(f"{a} {b}\n" for a, b in model["merges"])
    (folder / "merges.txt").write_text("#version: 0.2\n" + merges)
    return folder / "vocab.json", folder / "merges.txt"


def test_a_text_cannot_end_its_own_document(learnt):
    text = f"before {END_OF_DOCUMENT} after"
    ids = learnt.encode(text).tolist()
    assert learnt.eod not in ids
    assert learnt._slow.encode(text).ids == ids
    assert learnt.decode(ids) == text


def test_gpt2s_two_files_give_the_same_ids(learnt, tmp_path):
    read = ByteLevelBpe.from_gpt2_files(*gpt2_files(tmp_path, learnt))
    assert read.is_fast
    assert (read.eod, read.vocab_size) == (0, 290)
    assert [read.encode(t).tolist() for t in TEXTS] == [learnt.encode(t).tolist() for t in TEXTS]


def test_a_vocabulary_that_tiktoken_would_encode_otherwise_is_left_to_tokenizers(learnt, tmp_path):
    vocab, merges = gpt2_files(tmp_path, learnt)
    lines = merges.read_text().splitlines()
    merges.write_text("\n".join([lines[0], *reversed(lines[1:])]) + "\n")
    read = ByteLevelBpe.from_gpt2_files(vocab, merges)
    assert not read.is_fast
    text = "the cat sat on the hat"
    assert read.encode(text).tolist() == read._slow.encode(text).ids


def test_a_token_its_own_text_does_not_give_is_noticed(tmp_path):
    # 'abc' is made of 'a' and 'bc', but 'ab' comes first, so that no text gives it.
    letters = dict(BYTES)
    vocab = letters | {"ab": 256, "bc": 257, "abc": 258, END_OF_DOCUMENT: 259}
    (tmp_path / "v.json").write_text(json.dumps(vocab))
    (tmp_path / "m.txt").write_text("#version: 0.2\na b\nb c\na bc\n")
    read = ByteLevelBpe.from_gpt2_files(tmp_path / "v.json", tmp_path / "m.txt")
    assert not read.is_fast
    assert read.encode("abc").tolist() == [256, letters["c"]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no tokenizer"),
        ("{", "not a tokenizer"),
        (b"\xdd", "UnicodeDecodeError: 'utf-8' codec"),
    ],
)
def test_a_missing_or_broken_tokenizer_is_named(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DatasetError, match=message):
        load(path)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the texts are not there")
def test_gpt2s_ids_equal_those_of_tokenizers_on_every_document():
    read = ByteLevelBpe.from_gpt2_files(
        SHARED / "gpt2" / "vocab.json", SHARED / "gpt2" / "merges.txt"
    )
    assert (read.vocab_size, read.eod) == (50257, 50256)
    assert read.is_fast
    with lzma.open(next((SHARED / "text").glob("*.jsonl.xz")), "rt", encoding="utf-8") as lines:
        documents = [json.loads(line)["text"] for line in lines]
    assert len(documents) == 122
    slow = read._slow.encode_batch_fast(documents, add_special_tokens=False)
    for text, other in zip(documents, slow, strict=True):
        assert read.encode(text).tolist() == other.ids


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "x.model"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(path.with_suffix("")), vocab_size=320,
        model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, num_threads=1, minloglevel=2,
    )  # fmt: skip
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


def test_a_model_without_end_of_sentence_has_no_end_of_document(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=str(tmp_path / "x"), vocab_size=24,
        eos_id=-1, minloglevel=2,
    )  # fmt: skip
    assert load(tmp_path / "x.model").eod is None
