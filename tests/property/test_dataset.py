import tempfile
from pathlib import Path

from hypothesis import given, settings, strategies as st

from dataset import indexed, vocabulary

TOKENIZER = vocabulary.train(["the cat sat on the mat, said the cat"] * 3, 290)
EOD = vocabulary.end_of_document_id(TOKENIZER)

# All that UTF-8 can hold; now and then with the end-of-document token spelt out.
texts = st.lists(
    st.one_of(
        st.text(st.characters(codec="utf-8")),
        st.text(st.characters(codec="utf-8"), max_size=5).map(
            lambda text: text + vocabulary.END_OF_DOCUMENT + text
        ),
    ),
    max_size=6,
)


@settings(deadline=None)
@given(texts)
def test_texts_come_back_from_the_files_each_closed_once(documents):
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "x_text_document"
        counts = indexed.write(
            prefix, vocabulary.encode(TOKENIZER, documents), EOD, TOKENIZER.get_vocab_size()
        )
        index = indexed.read(prefix)
        written = [index.document(n).tolist() for n in range(index.num_documents)]
    texts_back = [TOKENIZER.decode(ids[:-1], skip_special_tokens=False) for ids in written]
    assert texts_back == [text for text in documents if text]
    assert all(ids.index(EOD) == len(ids) - 1 for ids in written)
    assert counts == indexed.Counts(len(written), sum(map(len, written)))
