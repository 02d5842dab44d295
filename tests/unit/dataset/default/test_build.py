from dataclasses import replace

import pytest

from dataset import indexed
from dataset.default import build as module, cache
from dataset.default.build import prepare
from dataset.errors import DatasetError
from dataset.tokenizer.choose import load


@pytest.fixture
def lines():
    return []


@pytest.fixture
def run(source, tmp_path, lines):
    return lambda vocab_size=300: prepare(source, tmp_path, lines.append, vocab_size)


def contents(prepared):
    return {path.name: path.read_bytes() for path in prepared.prefix.parent.iterdir()}


def test_every_text_comes_back_from_the_files(run, source):
    done = run()
    tokenizer = load(done.prefix.parent / done.manifest.tokenizer)
    index = indexed.read(done.prefix)
    decoded = [tokenizer.decode(index.document(n)[:-1].tolist()) for n in range(len(source.texts))]
    assert decoded == source.texts


def test_the_manifest_counts_what_is_in_the_files(run, source):
    done = run()
    index = indexed.read(done.prefix)
    assert done.prefix.name == "listed_text_document"
    assert done.manifest.documents == index.num_documents == len(source.texts)
    assert done.manifest.tokens == len(index.ids)
    assert done.manifest.vocab_size == 300
    assert (index.ids == done.manifest.eod).sum() == len(source.texts)
    assert done.manifest.text_bytes == sum(len(text) for text in source.texts)


def test_the_second_call_reads_no_text_and_writes_nothing(run, source, lines):
    first = run()
    before = contents(first)
    second = run()
    assert (first.is_new, second.is_new) == (True, False)
    assert replace(second, is_new=True) == first
    assert contents(second) == before
    assert source.reads == 1
    assert len(lines) == 1


def test_two_builds_give_the_same_bytes(run, source, tmp_path, lines):
    elsewhere = prepare(source, tmp_path / "elsewhere", lines.append, 300)
    assert contents(run()) == contents(elsewhere)


def test_changed_text_is_built_beside_the_old(run, source):
    old = run()
    source.texts[3] += " changed"
    new = run()
    assert new.is_new
    assert new.prefix != old.prefix
    assert old.prefix.parent.exists()


def test_another_vocabulary_is_built_anew(run):
    assert run().prefix != run(310).prefix


@pytest.mark.parametrize("what", ["version", "FORMAT_VERSION"])
def test_versions_that_decide_the_bytes_are_part_of_the_key(run, monkeypatch, what):
    old = run()
    monkeypatch.setattr(module, what, {"version": lambda name: "99", "FORMAT_VERSION": 99}[what])
    assert run().prefix != old.prefix


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_damaged_pair_is_rebuilt_and_one_line_says_so(run, lines, suffix):
    first = run()
    before = contents(first)
    path = first.prefix.with_name(first.prefix.name + suffix)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    second = run()
    assert second.is_new
    assert contents(second) == before
    _, line, _ = lines
    assert f"checksum of {path.name}" in line
    assert "building it again" in line


def test_a_source_without_text_is_refused_and_leaves_nothing(run, source, tmp_path):
    source.texts.clear()
    with pytest.raises(DatasetError, match="'listed' holds no text"):
        run()
    assert list(tmp_path.glob("*")) == list(tmp_path.glob(f"{cache.WORK_PREFIX}*")) == []
