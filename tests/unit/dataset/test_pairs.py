import json

import numpy as np
import pytest

from dataset import indexed, manifest
from dataset.files import DatasetError
from dataset.pairs import inspect_pair
from dataset.tokenizer import END_OF_DOCUMENT, load

TEXTS = [f"the cat number {n} sat on the mat and said {'meow ' * (n % 7)}.." for n in range(40)]


@pytest.fixture
def prefix(source, tmp_path):
    source.prepare(lambda line: None)
    return source.prefix


def bless(prefix, **changes):
    """Make the manifest agree with the files as they are, so that only deeper checks can fail."""
    path = prefix.parent / manifest.NAME
    values = json.loads(path.read_text()) | changes
    values["files"] = {name: manifest.file_facts(prefix.parent / name) for name in values["files"]}
    path.write_text(json.dumps(values))


def change_ids(prefix, change):
    ids = np.fromfile(indexed.bin_path(prefix), np.uint16)
    change(ids).tofile(indexed.bin_path(prefix))


def test_a_sound_pair_passes_and_shows_its_text(prefix, source):
    found = inspect_pair(prefix, 7)
    assert found.problems == []
    assert found.index.num_documents == len(TEXTS)
    assert len(found.index.ids) == found.manifest.tokens
    assert found.sample == TEXTS[7] + END_OF_DOCUMENT


def test_a_pair_without_manifest_is_checked_in_structure(prefix, source):
    (prefix.parent / manifest.NAME).unlink()
    found = inspect_pair(prefix)
    assert (found.problems, found.manifest, found.sample) == ([], None, None)
    tokenizer = load(prefix.parent / "tokenizer.json")
    assert inspect_pair(prefix, 7, tokenizer).sample == TEXTS[7] + END_OF_DOCUMENT
    change_ids(prefix, lambda ids: ids[:-1])
    (problem,) = inspect_pair(prefix).problems
    assert "the index counts" in problem


def test_a_manifest_of_another_pair_is_not_used(prefix):
    for suffix in (".bin", ".idx"):
        path = prefix.with_name(prefix.name + suffix)
        path.rename(prefix.with_name("own" + suffix))
    assert inspect_pair(prefix.with_name("own")).manifest is None


def test_a_changed_file_fails_its_checksum(prefix):
    change_ids(prefix, lambda ids: ids[::-1].copy())
    (problem,) = inspect_pair(prefix).problems
    assert "checksum" in problem


def shift(prefix):
    index = indexed.read(prefix)
    lengths, ones = index.lengths - 1, np.ones_like(index.lengths)
    indexed.write_index(
        indexed.idx_path(prefix), index.ids.dtype, lambda: [lengths], lambda: [ones]
    )


def test_lengths_without_end_of_document_are_found(prefix):
    shift(prefix)
    bless(prefix)
    (problem,) = inspect_pair(prefix).problems
    assert "as Megatron-DeepSpeed's --append-eod writes it" in problem


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("offsets", lambda index: index.offsets + 2, "does not begin where"),
        ("boundaries", lambda index: index.boundaries[::-1], "do not share out"),
    ],
)
def test_an_index_that_disagrees_with_itself_is_found(prefix, field, value, message):
    index = indexed.read(prefix)
    parts = {name: getattr(index, name) for name in ("lengths", "offsets", "boundaries")}
    parts[field] = value(index)
    header = indexed.idx_path(prefix).read_bytes()[: indexed.HEADER.size]
    body = b"".join(np.ascontiguousarray(part).tobytes() for part in parts.values())
    indexed.idx_path(prefix).write_bytes(header + body)
    bless(prefix)
    (problem,) = inspect_pair(prefix).problems
    assert message in problem


def test_an_id_outside_the_vocabulary_is_found(prefix):
    def change(ids):
        ids[0] = 300
        return ids

    change_ids(prefix, change)
    bless(prefix)
    (problem,) = inspect_pair(prefix).problems
    assert "outside the vocabulary of 300" in problem


def test_an_end_of_document_in_the_middle_is_found(prefix):
    def change(ids):
        ids[0] = 0
        return ids

    change_ids(prefix, change)
    bless(prefix)
    (problem,) = inspect_pair(prefix).problems
    assert "40 of 40 documents end with end-of-document, which occurs 41 times" in problem


@pytest.mark.parametrize("moved_to", [None, 0])
def test_a_document_not_closed_is_found(prefix, moved_to):
    def change(ids):
        ids[-1] = 5
        if moved_to is not None:
            ids[moved_to] = 0  # as many as documents, one in the wrong place
        return ids

    change_ids(prefix, change)
    bless(prefix)
    (problem,) = inspect_pair(prefix).problems
    assert "39 of 40 documents end" in problem


def test_wrong_counts_in_the_manifest_are_found(prefix):
    bless(prefix, documents=3)
    (problem,) = inspect_pair(prefix).problems
    assert "counts 3 documents" in problem


@pytest.mark.parametrize("number", [-1, 40])
def test_a_document_that_is_not_there_is_named(prefix, number):
    with pytest.raises(DatasetError, match=f"document {number}: .* has documents 0 to 39"):
        inspect_pair(prefix, number)
