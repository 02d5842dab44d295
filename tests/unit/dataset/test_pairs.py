import json

import numpy as np
import pytest

from dataset import indexed, manifest
from dataset.files import DatasetError
from dataset.pairs import inspect_pair
from dataset.tokenizer import END_OF_DOCUMENT

TEXTS = [f"the cat number {n} sat on the mat and said {'meow ' * (n % 7)}.." for n in range(40)]


@pytest.fixture
def prefix(source):
    source.prepare(lambda line: None)
    return source.prefix


def bless(prefix, **changes):
    """Make the manifest agree with the files as they are, so that only deeper checks can fail."""
    path = prefix.parent / manifest.NAME
    values = json.loads(path.read_text()) | changes
    values["files"] = {name: manifest.file_facts(prefix.parent / name) for name in values["files"]}
    path.write_text(json.dumps(values))


def change_ids(prefix, *changes):
    """Write ids, each ``(position, id)``."""
    ids = np.fromfile(indexed.bin_path(prefix), np.uint16)
    for position, value in changes:
        ids[position] = value
    ids.tofile(indexed.bin_path(prefix))


def cut(prefix):
    raw = indexed.bin_path(prefix).read_bytes()
    indexed.bin_path(prefix).write_bytes(raw[:-2])


def shift(prefix):
    index = indexed.read(prefix)
    lengths, ones = index.lengths - 1, np.ones_like(index.lengths)
    indexed.write_index(
        indexed.idx_path(prefix), index.ids.dtype, lambda: [lengths], lambda: [ones]
    )


def change_index(field, change):
    def changed(prefix):
        index = indexed.read(prefix)
        parts = {name: getattr(index, name) for name in ("lengths", "offsets", "boundaries")}
        parts[field] = change(parts[field])
        header = indexed.idx_path(prefix).read_bytes()[: indexed.HEADER.size]
        body = b"".join(np.ascontiguousarray(part).tobytes() for part in parts.values())
        indexed.idx_path(prefix).write_bytes(header + body)

    return changed


def test_a_sound_pair_passes_and_shows_its_text(prefix):
    found = inspect_pair(prefix, 7)
    assert found.problems == []
    assert found.index.num_documents == len(TEXTS)
    assert len(found.index.ids) == found.manifest.tokens
    assert found.sample == TEXTS[7] + END_OF_DOCUMENT


def test_a_pair_without_manifest_is_checked_in_structure(prefix):
    (prefix.parent / manifest.NAME).unlink()
    found = inspect_pair(prefix)
    assert (found.problems, found.manifest, found.sample) == ([], None, None)
    cut(prefix)
    (problem,) = inspect_pair(prefix).problems
    assert "the index counts" in problem


def test_a_manifest_of_another_pair_is_not_used(prefix):
    for suffix in (".bin", ".idx"):
        path = prefix.with_name(prefix.name + suffix)
        path.rename(prefix.with_name("own" + suffix))
    assert inspect_pair(prefix.with_name("own")).manifest is None


@pytest.mark.parametrize(
    ("damage", "changes", "message"),
    [
        (shift, {}, "as Megatron-DeepSpeed's --append-eod writes it"),
        (change_index("offsets", lambda offsets: offsets + 2), {}, "does not begin where"),
        (change_index("boundaries", lambda found: found[::-1]), {}, "do not share out"),
        (lambda p: change_ids(p, (0, 300)), {}, "outside the vocabulary of 300"),
        (
            lambda p: change_ids(p, (0, 0)),
            {},
            "40 of 40 documents end with end-of-document, which occurs 41 times",
        ),
        (lambda p: change_ids(p, (-1, 5)), {}, "39 of 40 documents end"),
        # As many as documents, one in the wrong place.
        (lambda p: change_ids(p, (-1, 5), (0, 0)), {}, "39 of 40 documents end"),
        (lambda p: None, {"documents": 3}, "counts 3 documents"),
    ],
)
def test_what_checksums_do_not_show_is_found(prefix, damage, changes, message):
    damage(prefix)
    bless(prefix, **changes)
    (problem,) = inspect_pair(prefix).problems
    assert message in problem


@pytest.mark.parametrize("number", [-1, 40])
def test_a_document_that_is_not_there_is_named(prefix, number):
    with pytest.raises(DatasetError, match=f"document {number}: .* has documents 0 to 39"):
        inspect_pair(prefix, number)
