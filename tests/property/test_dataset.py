import json
import tempfile
from pathlib import Path

from hypothesis import given, settings, strategies as st

from dataset import indexed, readers
from dataset.readers import Reading, blocks
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


@settings(deadline=None, max_examples=300)
@given(text)
def test_both_encoders_give_the_same_ids_for_every_text(text):
    assert TOKENIZER.is_fast
    slow = TOKENIZER._slow.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.encode(text).tolist() == slow


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.text(st.characters(codec="utf-8")), max_size=5), min_size=1, max_size=3),
    st.integers(1, 60),
)
def test_blocks_hold_all_texts_in_order_and_are_the_same_each_time(files, block_bytes):
    with tempfile.TemporaryDirectory() as folder:
        for number, texts in enumerate(files):
            content = "\n".join(json.dumps({"text": one}) for one in texts)
            (Path(folder) / f"{number}.json").write_text(content)
        found = readers.find([f"{folder}/*.json"])
        reading = Reading(found, block_bytes=block_bytes)
        whole = list(blocks(reading))
        again = list(blocks(reading))
    assert texts_of(whole) == [one for texts in files for one in texts]
    assert again == whole
    assert [block.number for block in whole] == list(range(len(whole)))


def texts_of(some):
    bad = []
    found = [one.texts["text"][0] for block in some for one in block.records(("text",), bad)]
    assert bad == []
    return found
