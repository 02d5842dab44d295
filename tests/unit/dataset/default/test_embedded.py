import pytest

from dataset.default.embedded import EmbeddedSource
from dataset.errors import DatasetError

FILES = {
    "pydoc_data/topics.py": "topics = {'with': 'The with statement', 'assert': 'The assert one'}",
    "pydoc_data/__init__.py": '"""skipped"""',
    "abc.py": '"""About abc."""\nraise RuntimeError("imported")\n',
    "json/__init__.py": "x = 1\n",
    "json/decoder.py": (
        "class Decoder(Base, Other):\n"
        '    """Decodes."""\n'
        "    def decode(self, text, *, strict=True):\n"
        '        """From\n\n           text."""\n'
        "if True:\n"
        "    async def late():\n"
        '        """Comes late."""\n'
    ),
    "json/tests/test_it.py": '"""a test"""',
    "test/support.py": '"""a test"""',
    "idlelib/editor.py": '"""an editor"""',
    "site-packages/foreign.py": '"""foreign"""',
    "foreign.py": '"""foreign"""',
}


@pytest.fixture
def stdlib(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_topics_come_first_then_one_document_a_module_in_order(stdlib):
    assert list(EmbeddedSource(stdlib).documents()) == [
        "The assert one",
        "The with statement",
        "module abc\n\nAbout abc.",
        "class json.decoder.Decoder(Base, Other)\n\nDecodes.\n\n"
        "def json.decoder.Decoder.decode(self, text, *, strict=True)\n\nFrom\n\ntext.\n\n"
        "def json.decoder.late()\n\nComes late.",
    ]


def test_definitions_are_found_in_every_statement_that_can_hold_one(tmp_path):
    holders = {
        "a": "if x:\n pass\nelif y:\n {}",
        "b": "try:\n pass\nexcept* Error:\n {}",
        "c": "try:\n pass\nfinally:\n {}",
        "d": "match x:\n case [1, *_] if y:\n  {}",
        "e": "for x in y:\n pass\nelse:\n while z:\n  {}",
        "f": "with x:\n def outer():\n  {}",
    }
    for name, text in FILES.items():
        if name.startswith("pydoc_data"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
    code = "\n".join(text.format(f"def {name}(): 'doc {name}'") for name, text in holders.items())
    (tmp_path / "abc.py").write_text(code + "\n")
    *_, document = EmbeddedSource(tmp_path).documents()
    assert [line for line in document.split("\n") if line.startswith("doc")] == [
        f"doc {name}" for name in holders
    ]


@pytest.mark.parametrize("name", ["pydoc_data/topics.py", "abc.py", "json/decoder.py"])
def test_fingerprint_follows_every_file_that_is_read(stdlib, name):
    before = EmbeddedSource(stdlib).fingerprint()
    (stdlib / name).write_text((stdlib / name).read_text() + "\n# changed\n")
    assert EmbeddedSource(stdlib).fingerprint() != before


def test_fingerprint_follows_the_names_of_files(stdlib):
    before = EmbeddedSource(stdlib).fingerprint()
    (stdlib / "abc.py").rename(stdlib / "ast.py")
    assert EmbeddedSource(stdlib).fingerprint() != before


@pytest.mark.parametrize("name", ["foreign.py", "site-packages/foreign.py", "test/support.py"])
def test_fingerprint_does_not_follow_the_packages_of_others(stdlib, name):
    before = EmbeddedSource(stdlib).fingerprint()
    (stdlib / name).write_text("")
    assert EmbeddedSource(stdlib).fingerprint() == before


def test_invalid_escapes_in_the_library_do_not_warn(stdlib):
    (stdlib / "abc.py").write_text('"""A \\d digit."""\n')
    assert "module abc\n\nA \\d digit." in EmbeddedSource(stdlib).documents()


def test_text_without_utf8_bytes_is_replaced(stdlib):
    (stdlib / "abc.py").write_text('"""half \\ud800 pair"""\n')
    assert "module abc\n\nhalf ? pair" in EmbeddedSource(stdlib).documents()


def test_a_library_without_topics_is_refused(stdlib):
    (stdlib / "pydoc_data/topics.py").unlink()
    with pytest.raises(DatasetError, match=r"no pydoc_data/topics\.py under .*another Python"):
        EmbeddedSource(stdlib).fingerprint()


def test_topics_of_another_shape_are_refused(stdlib):
    (stdlib / "pydoc_data/topics.py").write_text("# nothing\n")
    with pytest.raises(DatasetError, match="holds no documentation topics"):
        list(EmbeddedSource(stdlib).documents())


def test_a_library_without_sources_is_refused(tmp_path):
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data/topics.py").write_text("topics = {}")
    with pytest.raises(DatasetError, match=r"no source files.*installed as \.py"):
        EmbeddedSource(tmp_path).fingerprint()


def test_a_broken_module_is_named(stdlib):
    (stdlib / "abc.py").write_text("def (")
    with pytest.raises(DatasetError, match=r"abc\.py cannot be parsed"):
        list(EmbeddedSource(stdlib).documents())


def test_the_running_library_gives_a_few_megabytes():
    source = EmbeddedSource()
    documents = list(source.documents())
    assert 2_000_000 < sum(len(text.encode()) for text in documents) < 8_000_000
    assert all(documents)
    assert source.fingerprint() == EmbeddedSource().fingerprint()
    assert not any(text.startswith(("module test.", "module idlelib")) for text in documents)
