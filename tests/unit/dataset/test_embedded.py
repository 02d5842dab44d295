import contextlib
import re
from pathlib import Path

import pytest

from dataset import embedded, indexed, manifest
from dataset.embedded import Corpus, cache_folder
from dataset.files import DatasetError
from dataset.tokenizer import load

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


def corpus(stdlib):
    return Corpus(stdlib / "cache", stdlib)


@pytest.fixture
def stdlib(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_topics_come_first_then_one_document_a_module_in_order(stdlib):
    assert list(corpus(stdlib).documents()) == [
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
    *_, document = corpus(tmp_path).documents()
    assert [line for line in document.split("\n") if line.startswith("doc")] == [
        f"doc {name}" for name in holders
    ]


@pytest.mark.parametrize(
    ("name", "follows"),
    [
        ("pydoc_data/topics.py", True),
        ("abc.py", True),
        ("json/decoder.py", True),
        ("foreign.py", False),
        ("site-packages/foreign.py", False),
        ("test/support.py", False),
    ],
)
def test_fingerprint_follows_every_file_that_is_read_and_no_other(stdlib, name, follows):
    before = corpus(stdlib).key
    (stdlib / name).write_text((stdlib / name).read_text() + "\n# changed\n")
    assert (corpus(stdlib).key != before) is follows


def test_fingerprint_follows_the_names_of_files(stdlib):
    before = corpus(stdlib).key
    (stdlib / "abc.py").rename(stdlib / "ast.py")
    assert corpus(stdlib).key != before


@pytest.mark.parametrize(
    ("written", "read"), [("A \\d digit.", "A \\d digit."), ("half \\ud800 pair", "half ? pair")]
)
def test_invalid_escapes_do_not_warn_and_what_utf8_cannot_hold_is_replaced(stdlib, written, read):
    (stdlib / "abc.py").write_text(f'"""{written}"""\n')
    assert f"module abc\n\n{read}" in corpus(stdlib).documents()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("pydoc_data/topics.py", None, r"no pydoc_data/topics\.py under .*another Python"),
        ("pydoc_data/topics.py", "# nothing\n", "holds no documentation topics"),
        ("abc.py", "def (", r"abc\.py cannot be parsed"),
    ],
)
def test_a_library_that_is_not_whole_is_refused(stdlib, name, content, message):
    (stdlib / name).unlink() if content is None else (stdlib / name).write_text(content)
    with pytest.raises(DatasetError, match=message):
        list(corpus(stdlib).documents())


def test_a_library_without_sources_is_refused(tmp_path):
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data/topics.py").write_text("topics = {}")
    with pytest.raises(DatasetError, match=r"no source files.*installed as \.py"):
        corpus(tmp_path)


def contents(source):
    return {path.name: path.read_bytes() for path in source.prefix.parent.iterdir()}


def test_every_text_comes_back_from_the_files_that_the_manifest_describes(source):
    facts, is_new = source.prepare(lambda line: None)
    index, texts = indexed.read(source.prefix), list(source.documents())
    tokenizer = load(source.prefix.parent / facts.tokenizer)
    decoded = [tokenizer.decode(index.document(n)[:-1].tolist()) for n in range(len(texts))]
    assert (is_new, decoded) == (True, texts)
    assert (facts.documents, facts.tokens, facts.vocab_size) == (len(texts), len(index.ids), 300)
    assert (index.ids == facts.eod).sum() == len(texts)
    assert facts.text_bytes == sum(len(text) for text in texts)


def test_the_second_call_reads_no_text_and_writes_nothing(source, monkeypatch):
    lines = []
    made, _ = source.prepare(lines.append)
    before = contents(source)
    monkeypatch.setattr(Corpus, "documents", lambda self: 1 / 0)
    assert source.prepare(lines.append) == (made, False)
    assert (contents(source), len(lines)) == (before, 1)


@pytest.mark.parametrize("what", ["text", "vocabulary", "version", "FORMAT_VERSION"])
def test_what_decides_the_bytes_is_part_of_the_place(source, make_corpus, monkeypatch, what):
    if what == "text":
        other = make_corpus(["another text"])
    elif what == "vocabulary":
        other = make_corpus(vocab_size=310)
    else:
        monkeypatch.setattr(embedded, what, (lambda name: "99") if what == "version" else 99)
        other = make_corpus()
    assert other.prefix != source.prefix


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        (".bin", flip, "checksum of .*bin"),
        (".idx", Path.unlink, "idx is missing"),
        ("manifest.json", Path.unlink, "manifest.json: cannot be read"),
        ("manifest.json", lambda path: path.write_text("{"), "not valid JSON"),
        ("manifest.json", lambda p: p.write_text(p.read_text().replace('"key": "', '"key": "0')),
         "of other contents"),
    ],
)  # fmt: skip
def test_a_damaged_folder_is_built_again_and_a_line_says_so(source, name, damage, words):
    lines = []
    source.prepare(lines.append)
    before = contents(source)
    folder = source.prefix.parent
    damage(folder / (name if name == manifest.NAME else f"{source.prefix.name}{name}"))
    assert source.prepare(lines.append)[1]
    assert contents(source) == before
    assert re.search(f"is damaged .*{words}.*building it again", lines[1])


def test_a_build_that_fails_leaves_nothing(source, monkeypatch):
    monkeypatch.setattr(indexed, "write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        source.prepare(lambda line: None)
    assert [path.suffix for path in source.prefix.parents[1].iterdir()] == [".lock"]


def test_of_two_that_build_the_same_the_second_takes_the_firsts(source, make_corpus, monkeypatch):
    monkeypatch.setattr("filelock.FileLock", lambda path: FirstBuild(make_corpus()))
    before = source.prepare(lambda line: None)
    assert not before[1]


class FirstBuild:
    """A lock that is free once another process has built the corpus."""

    def __init__(self, other):
        self.other = other

    def __enter__(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("filelock.FileLock", contextlib.nullcontext)
            self.other.prepare(lambda line: None)

    def __exit__(self, *_):
        pass


def test_what_a_killed_build_left_is_no_obstacle(source):
    work = source.prefix.parents[1] / f"{embedded.WORK_PREFIX}{source.key[:16]}"
    work.mkdir(parents=True)
    (work / "half").touch()
    assert source.prepare(lambda line: None)[1]
    assert not work.exists()


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path, make_corpus):
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError, match=r"cannot write .*file.*--cache-dir DIR or DOS_DATASET"):
        make_corpus(cache="file").prepare(lambda line: None)


def test_the_folder_given_wins_over_the_environments_and_that_over_the_default(
    monkeypatch, tmp_path
):
    monkeypatch.delenv(embedded.CACHE_VARIABLE, raising=False)
    assert cache_folder(None) == Path(embedded.__file__).resolve().parent / "cache"
    monkeypatch.setenv(embedded.CACHE_VARIABLE, str(tmp_path / "env"))
    assert cache_folder(None) == tmp_path / "env"
    monkeypatch.chdir(tmp_path)
    assert cache_folder(Path("given")) == tmp_path / "given"
