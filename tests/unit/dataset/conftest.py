import pytest

from dataset.embedded import Corpus

TEXTS = [f"the cat number {n} sat on the mat and said {'meow ' * (n % 7)}.." for n in range(40)]


@pytest.fixture
def make_corpus(tmp_path):
    """Make a corpus of some texts, in a cache of the test's own."""

    def make(texts=TEXTS, vocab_size=300, cache="cache"):
        library = tmp_path / "library"
        (library / "pydoc_data").mkdir(parents=True, exist_ok=True)
        topics = {f"{number:03}": text for number, text in enumerate(texts)}
        (library / "pydoc_data" / "topics.py").write_text(f"topics = {topics!r}")
        (library / "abc.py").write_text("x = 1\n")
        return Corpus(tmp_path / cache, library, vocab_size)

    return make


@pytest.fixture
def source(make_corpus):
    return make_corpus()
