import tempfile
from pathlib import Path

from hypothesis import given, settings, strategies as st

from dataset import indexed
from dataset.tokenizer import END_OF_DOCUMENT, ByteLevelBpe

TOKENIZER = ByteLevelBpe.learn(["the cat sat on the mat, said the cat", "aaa aab abab"] * 3, 290)

# All that UTF-8 can hold; now and then with the end-of-document token spelt out.
text = st.one_of(
    st.text(st.characters(codec="utf-8")),
    st.text("ab ct'sn\n", max_size=40),
    st.text(st.characters(codec="utf-8"), max_size=5).map(
        lambda text: text + END_OF_DOCUMENT + text
    ),
)


@settings(deadline=None)
@given(st.lists(text, max_size=6))
def test_texts_come_back_from_the_files_each_closed_once(documents):
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "x_text_document"
        ids = (TOKENIZER.encode(text) for text in documents)
        counts = indexed.write(prefix, ids, 0, TOKENIZER.vocab_size)
        index = indexed.read(prefix)
        written = [index.document(n).tolist() for n in range(index.num_documents)]
    assert [TOKENIZER.decode(ids[:-1]) for ids in written] == [text for text in documents if text]
    assert all(ids.index(0) == len(ids) - 1 for ids in written)
    assert counts == indexed.Counts(len(written), sum(map(len, written)))


@settings(deadline=None, max_examples=100)
@given(text)
def test_both_encoders_give_the_same_ids_for_every_text(text):
    assert TOKENIZER.is_fast
    slow = TOKENIZER._slow.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.encode(text).tolist() == slow
